"""Writes the Triton model repository that serves an engine.

    repository/
      ensemble/         config.pbtxt  1/            text in, text out: what clients call
      preprocessing/    config.pbtxt  1/model.py    text to tokens
      tensorrt_llm/     config.pbtxt  1/model.py    the steps
      postprocessing/   config.pbtxt  1/model.py    tokens to text

and, in the `staged` layout, what `tensorrt_llm` calls for each step:

      speculative_step/   config.pbtxt  1/          an ensemble of the three
      tree_construction/  config.pbtxt  1/model.py  the drafter
      verification/       config.pbtxt  1/model.py  the target and its cache
      acceptance/         config.pbtxt  1/model.py  which nodes are kept

The model.py files only name a class of this package, so furcate must be installed where Triton runs; the engine is
found through a path relative to the repository.
"""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from furcate.builder.config import Layout
from furcate.builder.errors import ConfigError
from furcate.builder.scheduling_config import Reservation, SchedulingConfig, checked_scheduling
from furcate.builder.staging import check_output, staged
from furcate.decoding.staged_rules import check_staged
from furcate.model_repository import config_message
from furcate.model_repository.scheduling_parameters import parameters_from_scheduling
from furcate.model_repository.staged_tables import (
    ACCEPTANCE,
    SPECULATIVE_STEP,
    SPECULATIVE_STEP_STEPS,
    STAGES,
    TREE_CONSTRUCTION,
    VERIFICATION,
)
from furcate.model_repository.tables import ENSEMBLE, ENSEMBLE_STEPS, POSTPROCESSING, PREPROCESSING, TENSORRT_LLM

LIVE_REQUESTS_PER_ROW = 16
LEAST_SPARE_REQUESTS = 32
"""How many requests take turns for each row of a step, and at least how many more than rows: requests that cancel need a
place too. Further ones wait in order."""

_MODEL_FILE = '''"""Written by furcate; the model is furcate.model_repository.{module}."""

from furcate.model_repository.{module} import {model} as TritonPythonModel
'''
_STAGE_MODELS = {
    TREE_CONSTRUCTION.name: ("triton_stages", "TreeConstructionModel"),
    VERIFICATION.name: ("triton_stages", "VerificationModel"),
    ACCEPTANCE.name: ("triton_stages", "AcceptanceModel"),
}


def write_repository(
    output: Path,
    *,
    engine_dir: Path,
    layout: Layout = Layout.FUSED,
    max_batch_size: int | None = None,
    scheduling: SchedulingConfig | None = None,
    may_replace: bool = False,
) -> Path:
    """The repository's directory, written whole or not at all.

    `max_batch_size` requests make a step (default: as many as the engine allows); further ones take turns with them, and
    the rest wait in order. Raises ConfigError and BuildError.
    """
    manifest = _manifest(engine_dir)
    num_rows = _num_rows(manifest, max_batch_size)
    settings = _scheduling(scheduling, layout)
    check_output(output, may_replace=may_replace)
    relative = os.path.relpath(engine_dir.resolve(), output.resolve())
    configs = {
        PREPROCESSING.name: config_message.python_config(
            PREPROCESSING, max_batch_size=num_rows, parameters={"engine_dir": relative}
        ),
        TENSORRT_LLM.name: config_message.iterative_config(
            TENSORRT_LLM,
            max_batch_size=num_rows,
            max_live_requests=_num_live(num_rows, settings),
            parameters={
                "engine_dir": relative,
                "layout": layout.value,
                **parameters_from_scheduling(settings),
            },
        ),
        POSTPROCESSING.name: config_message.python_config(
            POSTPROCESSING, max_batch_size=num_rows, parameters={"engine_dir": relative}, is_decoupled=True
        ),
        ENSEMBLE.name: config_message.ensemble_config(ENSEMBLE, ENSEMBLE_STEPS, max_batch_size=num_rows),
    }
    models = {
        PREPROCESSING.name: ("triton_preprocessing", "TritonPythonModel"),
        TENSORRT_LLM.name: (f"triton_{layout.value}", "TritonPythonModel"),
        POSTPROCESSING.name: ("triton_postprocessing", "TritonPythonModel"),
    }
    if layout is Layout.STAGED:
        kinds = [head["kind"] for head in (manifest.get("head"), *manifest.get("more_heads", ())) if head is not None]
        check_staged(manifest["acceptance"], kinds)
        configs |= _stage_configs(num_rows, relative)
        models |= _STAGE_MODELS
    _write(output, configs, models)
    return output


def _scheduling(scheduling: SchedulingConfig | None, layout: Layout) -> SchedulingConfig:
    """The settings of a layout: a staged repository's caches lie in two processes, and no page is kept for others there."""
    checked = checked_scheduling(scheduling or SchedulingConfig())
    if layout is Layout.STAGED and checked.reservation is not Reservation.FULL:
        raise ConfigError("reservation is optimistic, but the staged layout promises pages in full; leave it out.")
    return checked if layout is Layout.FUSED else replace(checked, prefix_reuse=False)


def _num_live(num_rows: int, scheduling: SchedulingConfig) -> int:
    """Requests that Triton hands to the model at once; where a limit is set, as many more as may wait for room there."""
    usual = max(LIVE_REQUESTS_PER_ROW * num_rows, num_rows + LEAST_SPARE_REQUESTS)
    return usual + (scheduling.max_waiting_requests or 0)


def _stage_configs(num_rows: int, relative: str) -> dict[str, Any]:
    parameters = {"engine_dir": relative}
    return {
        SPECULATIVE_STEP.name: config_message.ensemble_config(
            SPECULATIVE_STEP, SPECULATIVE_STEP_STEPS, max_batch_size=num_rows, is_decoupled=False
        ),
        **{
            table.name: config_message.python_config(
                table, max_batch_size=num_rows, parameters=parameters, picks_device=table is not ACCEPTANCE
            )
            for table in STAGES
        },
    }


def _manifest(engine_dir: Path) -> dict[str, Any]:
    manifest_path = engine_dir / "manifest.json"
    try:
        manifest = json.loads(manifest_path.read_text())
        int(manifest["max_batch_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"'{engine_dir}' is no engine directory: {manifest_path.name} cannot be read ({type(error).__name__});"
            " build one with build_engine."
        ) from None
    return manifest


def _num_rows(manifest: dict[str, Any], max_batch_size: int | None) -> int:
    limit = int(manifest["max_batch_size"])
    num_rows = limit if max_batch_size is None else max_batch_size
    if not 1 <= num_rows <= limit:
        raise ConfigError(f"max_batch_size is {num_rows}, but this engine allows 1 to {limit}.")
    return num_rows


def _write(output: Path, configs: dict[str, Any], models: dict[str, tuple[str, str]]) -> None:
    """Writes each model's config message and, where it has one, a model.py that names its module and class."""
    with staged(output) as directory:
        for name, config in configs.items():
            version = directory / name / "1"
            version.mkdir(parents=True)
            (directory / name / "config.pbtxt").write_text(config_message.text_from_config(config))
            if name in models:
                module, model = models[name]
                (version / "model.py").write_text(_MODEL_FILE.format(module=module, model=model))

"""Writes the Triton model repository that serves an engine.

    repository/
      ensemble/         config.pbtxt  1/            text in, text out: what clients call
      preprocessing/    config.pbtxt  1/model.py    text to tokens
      tensorrt_llm/     config.pbtxt  1/model.py    the steps
      postprocessing/   config.pbtxt  1/model.py    tokens to text

The model.py files only name a class of this package, so furcate must be installed where Triton runs; the engine is
found through a path relative to the repository.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from furcate.builder.errors import BuildError, ConfigError
from furcate.model_repository import config_message
from furcate.model_repository.tables import ENSEMBLE, ENSEMBLE_STEPS, POSTPROCESSING, PREPROCESSING, TENSORRT_LLM

if TYPE_CHECKING:
    from tritonclient.grpc import model_config_pb2 as pb

LAYOUTS = ("fused",)
MODEL_NAMES = (PREPROCESSING.name, TENSORRT_LLM.name, POSTPROCESSING.name, ENSEMBLE.name)
LIVE_REQUESTS_PER_ROW = 4
"""How many requests take turns for each row of a step, unless told otherwise; the rest wait."""

_MODEL_FILE = '''"""Written by furcate; the model is furcate.model_repository.{module}."""

from furcate.model_repository.{module} import TritonPythonModel as TritonPythonModel
'''


def write_repository(
    output: Path,
    *,
    engine_dir: Path,
    layout: str = "fused",
    max_batch_size: int | None = None,
    max_live_requests: int | None = None,
) -> Path:
    """The repository's directory, written whole or not at all.

    An earlier furcate repository at `output` is replaced. `max_batch_size` rows make a step (default: the engine's);
    `max_live_requests` take turns in them. Raises ConfigError and BuildError.
    """
    if layout not in LAYOUTS:
        raise ConfigError(f"Unknown layout '{layout}'; it can be: {', '.join(LAYOUTS)}.")
    num_rows = _num_rows(engine_dir, max_batch_size)
    num_live = LIVE_REQUESTS_PER_ROW * num_rows if max_live_requests is None else max_live_requests
    if num_live < num_rows:
        raise ConfigError(f"max_live_requests is {num_live}, but a step has {num_rows} rows; give at least {num_rows}.")
    _check_replaceable(output)
    relative = os.path.relpath(engine_dir.resolve(), output.resolve())
    configs = {
        PREPROCESSING.name: config_message.python_config(
            PREPROCESSING, max_batch_size=num_rows, parameters={"engine_dir": relative}
        ),
        TENSORRT_LLM.name: config_message.iterative_config(
            TENSORRT_LLM,
            max_batch_size=num_rows,
            max_live_requests=num_live,
            parameters={"engine_dir": relative, "layout": layout},
        ),
        POSTPROCESSING.name: config_message.python_config(
            POSTPROCESSING, max_batch_size=num_rows, parameters={"engine_dir": relative}
        ),
        ENSEMBLE.name: config_message.ensemble_config(ENSEMBLE, ENSEMBLE_STEPS, max_batch_size=num_rows),
    }
    modules = {
        PREPROCESSING.name: "triton_preprocessing",
        TENSORRT_LLM.name: f"triton_{layout}",
        POSTPROCESSING.name: "triton_postprocessing",
    }
    _write(output, configs, modules)
    return output


def _num_rows(engine_dir: Path, max_batch_size: int | None) -> int:
    manifest_path = engine_dir / "manifest.json"
    try:
        limit = int(json.loads(manifest_path.read_text())["max_batch_size"])
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"'{engine_dir}' is no engine directory: {manifest_path.name} cannot be read ({type(error).__name__});"
            " build one with build_engine."
        ) from None
    num_rows = limit if max_batch_size is None else max_batch_size
    if not 1 <= num_rows <= limit:
        raise ConfigError(f"max_batch_size is {num_rows}, but this engine allows 1 to {limit}.")
    return num_rows


def _check_replaceable(output: Path) -> None:
    """Raises ConfigError when something that is no repository of ours stands at `output`."""
    if not output.exists():
        return
    is_ours = output.is_dir() and {entry.name for entry in output.iterdir()} <= set(MODEL_NAMES)
    if not is_ours:
        raise ConfigError(f"'{output}' exists and is no furcate repository; choose another path or remove it.")


def _write(output: Path, configs: "dict[str, pb.ModelConfig]", modules: dict[str, str]) -> None:
    temporary = None
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
        fresh = temporary / "repository"
        for name, config in configs.items():
            version = fresh / name / "1"
            version.mkdir(parents=True)
            (fresh / name / "config.pbtxt").write_text(config_message.text_from_config(config))
            if name in modules:
                (version / "model.py").write_text(_MODEL_FILE.format(module=modules[name]))
        if output.exists():
            output.rename(temporary / "replaced")
        fresh.rename(output)
    except OSError as error:
        raise BuildError(f"The model repository '{output}' cannot be written: {error.strerror}.") from None
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)

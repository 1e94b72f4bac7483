"""Where tensorrt_llm (<= 1.2.1) is importable, an engine goes through its Builder and Engine classes; else through TensorRT.

1.2.1 is the last release with them. Read from github.com/NVIDIA/TensorRT-LLM, tensorrt_llm/builder.py: `Builder().trt_builder`,
`EngineConfig.from_json_str`, `Engine(config, plan).save(directory)` which writes config.json and rank<R>.engine.
"""

from __future__ import annotations

import importlib
import json
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from furcate.builder.engine import Manifest
from furcate.builder.errors import BuildError
from furcate.builder.trtllm_config import trtllm_config

LAST_VERSION = (1, 2, 1)
OTHERWISE = "plain TensorRT writes the same directory"


def trtllm_builder_module() -> tuple[Any | None, str]:
    """(tensorrt_llm.builder, or None where it cannot be used; one line that says which way the engine takes)."""
    try:
        installed = version("tensorrt_llm")
    except PackageNotFoundError:
        return None, f"tensorrt_llm is not installed: {OTHERWISE}"
    release = tuple(int(number) for number in re.findall(r"\d+", installed)[:3])
    if release > LAST_VERSION:
        return (
            None,
            f"tensorrt_llm {installed} has no engine builder (1.2.1 was the last): plain TensorRT writes the same directory",
        )
    try:
        return importlib.import_module("tensorrt_llm.builder"), f"through tensorrt_llm {installed}'s Builder and Engine"
    except (ImportError, OSError) as error:
        return None, f"tensorrt_llm {installed} cannot be imported ({error}): {OTHERWISE}"


def create_builder(tensorrt: Any, trtllm: Any | None) -> Any:
    """A trt.Builder: TensorRT-LLM's own, which has its logger, or TensorRT's."""
    if trtllm is not None:
        return trtllm.Builder().trt_builder
    return tensorrt.module.Builder(tensorrt.module.Logger(tensorrt.module.Logger.WARNING))


def save_target(directory: Path, manifest: Manifest, plan: bytes, rank: int, trtllm: Any | None) -> None:
    """Writes the target's plan of one rank, through TensorRT-LLM's Engine where there is one.

    Raises BuildError when its own reader refuses the engine's config.json.
    """
    if trtllm is None:
        (directory / f"rank{rank}.engine").write_bytes(plan)
        return
    try:
        config = trtllm.EngineConfig.from_json_str(json.dumps(trtllm_config(manifest)))
    # Its reader raises whatever a missing or unknown field leads to.
    except Exception as error:
        raise BuildError(f"tensorrt_llm refuses the engine's config.json ({error!r}); please report this.") from error
    config.pretrained_config.mapping.rank = rank
    trtllm.Engine(config, plan).save(str(directory))

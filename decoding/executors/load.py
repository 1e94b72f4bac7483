"""The executor of an engine, as its manifest says."""

from __future__ import annotations

import torch

from furcate.builder.config import Executor
from furcate.builder.engine import Engine
from furcate.decoding.executors.executor import EngineExecutor
from furcate.decoding.executors.tensorrt import load_tensorrt_executor
from furcate.decoding.executors.torch import TorchExecutor


def load_executor(engine: Engine, device: str | torch.device | None = None) -> EngineExecutor:
    """The engine loaded for the executor it was built for; `device` None is the GPU, or for torch the CPU where there is none.

    Raises EngineMismatch where this machine or installation cannot run it.
    """
    if engine.manifest.executor is Executor.TENSORRT:
        return load_tensorrt_executor(engine, device or "cuda")
    return TorchExecutor(engine, device or ("cuda" if torch.cuda.is_available() else "cpu"))

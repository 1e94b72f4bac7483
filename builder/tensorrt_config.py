"""Settings of a TensorRT build, and what the manifest records of its plans."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class TensorRTConfig:
    """What --executor tensorrt takes beside the settings of every build."""

    gpu: str | None = None
    """The GPU the plans are for: h100, h200, b200, rtx-pro-6000, ... TensorRT builds on a GPU of that architecture."""
    tp_size: int = 1
    """Tensor parallelism: GPUs that share the target, one plan file each. Needs TensorRT 10.16 or newer."""
    workspace_gib: float | None = None
    """Most memory TensorRT may try tactics in. Default: the whole GPU."""
    optimization_level: int | None = None
    """TensorRT's builder optimisation level, 0 (fast build) to 5. Default: TensorRT's own, 3."""
    timing_cache: Path | None = None
    """Measured tactics kept between builds. Default: beside --output, with the GPU in its name."""
    refit: bool = False
    """Plans whose weights can be replaced by name without another build."""
    strip_weights: bool = False
    """Plans without weights, which are refitted from rank0.safetensors when the engine is loaded."""
    version_compatible: bool = False
    """Plans that newer TensorRT releases of the same major version load."""
    hardware_compatible: bool = False
    """Plans that run on every GPU from Ampere on. Not with our plugins, whose kernels are for one architecture."""


@dataclass(frozen=True, kw_only=True)
class Binding:
    """A plan's input or output: -1 is a dynamic size. `is_output` false: an input."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    is_output: bool


@dataclass(frozen=True, kw_only=True)
class TensorRTRecord:
    """What the manifest keeps of the plans. `bindings` maps a plan's name (target, head, logits, fuse) to its tensors."""

    gpu: str
    arch: int
    version: str
    plugin_version: str
    """Hash of the plugins' interface and kernels, and the compiler that made them."""
    tp_size: int
    num_splits: int
    is_version_compatible: bool
    is_refittable: bool
    is_stripped: bool
    bindings: dict[str, tuple[Binding, ...]]
    shared_tables: tuple[str, ...]
    """Weights that several plans read as inputs, from one buffer filled from rank0.safetensors."""


def tensorrt_record_from_json(value: dict[str, Any]) -> TensorRTRecord:
    """The record that dataclasses.asdict wrote."""
    bindings = {
        plan: tuple(Binding(**{**entry, "shape": tuple(entry["shape"])}) for entry in entries)
        for plan, entries in value["bindings"].items()
    }
    return TensorRTRecord(**{**value, "shared_tables": tuple(value["shared_tables"]), "bindings": bindings})

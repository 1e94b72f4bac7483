"""Turns an emitted network into a plan: builder settings, timing cache, progress, and what TensorRT said when it fails."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from furcate.builder.errors import BuildError
from furcate.builder.ops.tensorrt_versions import TensorRT
from furcate.builder.tensorrt_networks import EmittedNetwork
from furcate.builder.tensorrt_profiles import Profile, add_profiles

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """How TensorRT is to build. `workspace_bytes` None leaves TensorRT's own limit (the whole memory)."""

    arch: int
    workspace_bytes: int | None = None
    optimization_level: int | None = None
    timing_cache: Path | None = None
    is_refittable: bool = False
    strips_weights: bool = False
    is_version_compatible: bool = False
    is_hardware_compatible: bool = False


def build_plan(
    builder: Any,
    emitted: EmittedNetwork,
    profiles: list[Profile],
    settings: PlanSettings,
    progress: Callable[[str, int, int], None] | None = None,
) -> bytes:
    """The serialized plan. `progress` is told (phase, step, number of steps).

    Raises BuildError when TensorRT refuses; its own messages are in its log.
    """
    tensorrt = emitted.graph.tensorrt
    config = builder.create_builder_config()
    apply_settings(tensorrt, config, settings)
    if settings.is_refittable or settings.strips_weights:
        # Only the checkpoint's weights: scalars and rotary tables stay in the plan.
        for name in emitted.graph.weight_names:
            emitted.network.mark_weights_refittable(name)
    add_profiles(builder, config, emitted, profiles)
    cache_file = settings.timing_cache if tensorrt.has_timing_cache else None
    if cache_file is not None:
        read_timing_cache(config, cache_file)
    monitor = None if progress is None else progress_monitor(tensorrt.module, progress)
    if monitor is not None:
        config.progress_monitor = monitor
    plan = builder.build_serialized_network(emitted.network, config)
    if plan is None:
        raise BuildError(
            f"{tensorrt.label} could not build the {emitted.name} network; its log above says why. "
            "Smaller --max-batch-size or --workspace-gib may help when it is memory."
        )
    if cache_file is not None:
        write_timing_cache(config, cache_file)
    return bytes(memoryview(plan))


def apply_settings(tensorrt: TensorRT, config: Any, settings: PlanSettings) -> None:
    """Sets an IBuilderConfig's flags and limits."""
    trt = tensorrt.module
    tensorrt.set_architecture(config, settings.arch)
    flags = {
        "REFIT_INDIVIDUAL": settings.is_refittable or settings.strips_weights,
        "STRIP_PLAN": settings.strips_weights,
        "VERSION_COMPATIBLE": settings.is_version_compatible,
    }
    for name, is_set in flags.items():
        if is_set:
            config.set_flag(getattr(trt.BuilderFlag, name))
    if settings.is_hardware_compatible:
        config.hardware_compatibility_level = trt.HardwareCompatibilityLevel.AMPERE_PLUS
    if settings.workspace_bytes is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, settings.workspace_bytes)
    if settings.optimization_level is not None:
        config.builder_optimization_level = settings.optimization_level


def read_timing_cache(config: Any, path: Path) -> None:
    """Gives an IBuilderConfig the tactics that earlier builds measured.

    A cache that TensorRT refuses, of another GPU, version or none at all, is replaced by an empty one.
    """
    cache = config.create_timing_cache(path.read_bytes() if path.is_file() else b"")
    if cache is None or not config.set_timing_cache(cache, ignore_mismatch=False):
        config.set_timing_cache(config.create_timing_cache(b""), ignore_mismatch=False)


def write_timing_cache(config: Any, path: Path) -> None:
    """Keeps an IBuilderConfig's tactics for the next build; the file is replaced whole."""
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    partial.write_bytes(bytes(memoryview(config.get_timing_cache().serialize())))
    partial.replace(path)


def progress_monitor(trt: Any, progress: Callable[[str, int, int], None]) -> Any:
    """An IProgressMonitor that tells `progress` of the outermost phases, and lets Ctrl-C end the build."""

    class Monitor(trt.IProgressMonitor):
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.steps: dict[str, int] = {}
            self.is_interrupted = False

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            if parent_phase is None:
                self.steps[phase_name] = num_steps
                self._tell(phase_name, 0)

        def step_complete(self, phase_name: str, step: int) -> bool:
            if phase_name in self.steps:
                self._tell(phase_name, step + 1)
            return not self.is_interrupted

        def phase_finish(self, phase_name: str) -> None:
            steps = self.steps.pop(phase_name, None)
            if steps is not None:
                progress(phase_name, steps, steps)

        def _tell(self, phase_name: str, step: int) -> None:
            try:
                progress(phase_name, step, self.steps[phase_name])
            except KeyboardInterrupt:
                # An exception cannot pass through TensorRT; false from step_complete ends the build.
                self.is_interrupted = True

    return Monitor()

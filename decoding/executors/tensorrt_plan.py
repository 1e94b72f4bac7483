"""One TensorRT plan at run time: its profiles' contexts, its tensors bound by name, one enqueue a pass.

A pass takes the context of the profile that holds its shape: contexts are made at load, because switching profiles cannot be
captured into a CUDA graph. Nor can a change of shape: a pass that is to be captured has a context for its shape alone, which has
run once before. All share one scratch buffer, for plans of an engine run one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from furcate.builder.errors import EngineMismatch
from furcate.builder.tensorrt_config import Binding

TORCH_TYPES = {
    "FLOAT": torch.float32, "HALF": torch.float16, "BF16": torch.bfloat16, "INT32": torch.int32, "INT64": torch.int64,
}  # fmt: skip


@dataclass(frozen=True)
class PlanProfile:
    """A profile of a plan: its number, the shapes it holds by input, smallest and largest, and its execution context."""

    index: int
    ranges: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    context: Any

    def holds(self, inputs: Mapping[str, Tensor]) -> bool:
        """Whether every input lies within the profile."""
        return all(
            all(low <= size <= high for low, size, high in zip(*self._with(name, tensor), strict=True))
            for name, tensor in inputs.items()
            if name in self.ranges
        )

    def _with(self, name: str, tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        low, high = self.ranges[name]
        return low, tuple(tensor.shape), high


class TensorRTPlan:
    """A deserialized plan. `fixed` are inputs that every pass binds alike: pool addresses and shared tables.

    `communicator` is a capsule of the rank's NCCL communicator, for plans that sum over ranks.
    """

    def __init__(
        self,
        trt: Any,
        engine: Any,
        bindings: tuple[Binding, ...],
        fixed: Mapping[str, Tensor],
        communicator: Any | None = None,
    ) -> None:
        self.trt = trt
        self.engine = engine
        self.bindings = {binding.name: binding for binding in bindings}
        self.fixed = {name: tensor for name, tensor in fixed.items() if name in self.bindings}
        self.communicator = communicator
        self.profiles: list[PlanProfile] = []
        self._scratch: Tensor | None = None
        self._lasting: dict[tuple[tuple[str, tuple[int, ...]], ...], Any] = {}
        _check_bindings(engine, bindings)

    @property
    def scratch_bytes(self) -> int:
        """Device memory that one pass of the plan needs."""
        return int(self.engine.device_memory_size_v2)

    def make_contexts(self, scratch: Tensor, stream: int) -> None:
        """Makes the context of every profile over the shared scratch buffer (uint8)."""
        self._scratch = scratch
        for index in range(self.engine.num_optimization_profiles):
            context = self._new_context(index, stream)
            self.profiles.append(PlanProfile(index, _ranges(self.engine, index, self.bindings), context))

    def _new_context(self, index: int, stream: int) -> Any:
        assert self._scratch is not None, "make_contexts comes first"
        context = self.engine.create_execution_context(self.trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        context.set_device_memory(self._scratch.data_ptr(), self._scratch.numel())
        context.set_optimization_profile_async(index, stream)
        # A collective call: every rank makes its contexts in the same order.
        if self.communicator is not None and not context.set_communicator(self.communicator):
            raise EngineMismatch("TensorRT refused the ranks' NCCL communicator; its log above says why.")
        return context

    def run(self, inputs: Mapping[str, Tensor], stream: int, device: torch.device) -> dict[str, Tensor]:
        """The outputs by name, of a pass enqueued on `stream`; nothing waits. Raises EngineMismatch where no profile fits."""
        tensors = self._bound(inputs)
        context = self._profile(tensors).context
        _set_shapes(context, tensors)
        return self._enqueue(context, tensors, stream, device)

    def run_lasting(self, inputs: Mapping[str, Tensor], stream: int, device: torch.device) -> dict[str, Tensor]:
        """As `run`, by a context that serves this shape only, so that a later pass of the shape can be captured."""
        tensors = self._bound(inputs)
        shapes = tuple((name, tuple(tensor.shape)) for name, tensor in tensors.items())
        if shapes not in self._lasting:
            self._lasting[shapes] = self._new_context(self._profile(tensors).index, stream)
            _set_shapes(self._lasting[shapes], tensors)
        return self._enqueue(self._lasting[shapes], tensors, stream, device)

    def _enqueue(
        self, context: Any, tensors: Mapping[str, Tensor], stream: int, device: torch.device
    ) -> dict[str, Tensor]:
        for name, tensor in tensors.items():
            context.set_tensor_address(name, tensor.data_ptr())
        outputs = {}
        for binding in self.bindings.values():
            if binding.is_output:
                shape = tuple(context.get_tensor_shape(binding.name))
                outputs[binding.name] = torch.empty(shape, dtype=TORCH_TYPES[binding.dtype], device=device)
                context.set_tensor_address(binding.name, outputs[binding.name].data_ptr())
        if not context.execute_async_v3(stream):
            raise EngineMismatch("TensorRT could not run a pass; its log above says why.")
        return outputs

    def _bound(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Every input of the plan, checked for type and layout."""
        tensors = {**{name: tensor for name, tensor in inputs.items() if name in self.bindings}, **self.fixed}
        for name, binding in self.bindings.items():
            if not binding.is_output:
                given = tensors.get(name)
                assert given is not None, f"the plan's input {name} is not bound"
                assert given.dtype is TORCH_TYPES[binding.dtype], (
                    f"{name} is {given.dtype}, the plan reads {binding.dtype}"
                )
                assert given.is_contiguous(), f"{name} is not contiguous"
        return tensors

    def _profile(self, tensors: Mapping[str, Tensor]) -> PlanProfile:
        for profile in self.profiles:
            if profile.holds(tensors):
                return profile
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items() if name not in self.fixed)
        raise EngineMismatch(f"no profile of the engine holds a pass of {shapes}; build it with larger limits.")


def _set_shapes(context: Any, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        context.set_input_shape(name, tuple(tensor.shape))


def load_plan(trt: Any, runtime: Any, path: Path) -> Any:
    """The ICudaEngine of a plan file. Raises EngineMismatch when it is missing or TensorRT refuses it."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise EngineMismatch(
            f"engine file {path} cannot be read ({error.strerror}); build the engine again."
        ) from error
    engine = runtime.deserialize_cuda_engine(content)
    if engine is None:
        raise EngineMismatch(
            f"TensorRT {trt.__version__} cannot load {path}; its log above says why. Build the engine again on this machine."
        )
    return engine


def refit_plan(trt: Any, engine: Any, weights: Mapping[str, Tensor]) -> None:
    """Gives a plan built with --strip-weights its weights, by name. Raises EngineMismatch for one that is missing."""
    refitter = trt.Refitter(engine, trt.Logger(trt.Logger.WARNING))
    names = {kind: getattr(trt.DataType, name) for name, kind in TORCH_TYPES.items()}
    kept = []
    for name in refitter.get_all_weights():
        if name not in weights:
            raise EngineMismatch(
                f"the plan wants {name}, which rank0.safetensors does not hold; build the engine again."
            )
        tensor = weights[name].contiguous()
        kept.append(tensor)
        refitter.set_named_weights(name, trt.Weights(names[tensor.dtype], tensor.data_ptr(), tensor.numel()))
    if not refitter.refit_cuda_engine():
        raise EngineMismatch(
            f"TensorRT could not refit the plan; missing: {', '.join(refitter.get_missing_weights()[:4])}."
        )


def _check_bindings(engine: Any, bindings: tuple[Binding, ...]) -> None:
    """Raises EngineMismatch where the plan's tensors are not the manifest's."""
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    found = {name: (engine.get_tensor_dtype(name).name, tuple(engine.get_tensor_shape(name))) for name in names}
    wanted = {binding.name: (binding.dtype, tuple(binding.shape)) for binding in bindings}
    for name in sorted(found.keys() | wanted.keys()):
        if name not in found or name not in wanted:
            where = "the plan" if name in found else "the manifest"
            raise EngineMismatch(f"tensor {name} is only in {where}; build the engine again.")
        # Dynamic sizes of an output may be known better to the plan than to the network it was made of.
        have, want = found[name], wanted[name]
        if have[0] != want[0] or len(have[1]) != len(want[1]):
            raise EngineMismatch(
                f"tensor {name} is {have} in the plan and {want} in the manifest; build the engine again."
            )


def _ranges(
    engine: Any, index: int, bindings: Mapping[str, Binding]
) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    ranges = {}
    for name, binding in bindings.items():
        if not binding.is_output and -1 in binding.shape:
            smallest, _, largest = engine.get_tensor_profile_shape(name, index)
            ranges[name] = (tuple(smallest), tuple(largest))
    return ranges

"""TensorRT plugins by `tensorrt.plugin`: PTX inside the engine, no Python and no library at run time.

A plugin is its PluginSpecification and a few functions of a `Call`; everything that TensorRT asks for (a typed
signature, tactics, launch sizes as symbolic expressions) is made here. Held against the bindings 10.13, 10.14 and 11.4.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from furcate.builder.errors import BuildError, ConfigError
from furcate.plugins.aot import CompiledKernel, KernelSource, compile_kernel
from furcate.plugins.chips import chip_of
from furcate.plugins.specification import PluginSpecification
from furcate.plugins.tree_attention.tactics import PLUGIN_SHARED_BYTES

NAMESPACE = "furcate"
NUM_HIDDEN_PARAMETERS = 2
"""Triton appends pointers to global and profile scratch, which no kernel here uses and TensorRT does not pass."""
ACTIVATIONS = {"HALF": "fp16", "BF16": "bf16"}
FORMATS = {"T": "FP16|BF16", "float32": "FP32", "int32": "INT32", "int64": "INT64"}
_registered_arch: list[int] = []


@dataclass(frozen=True, kw_only=True)
class Call:
    """One use of a plugin: its inputs' TensorDescs and its attributes by name, the chip, and TensorRT's module."""

    trtp: Any
    arch: int
    inputs: dict[str, Any]
    attributes: dict[str, Any]

    @property
    def activation(self) -> str:
        """Triton's name of the activations' type."""
        return ACTIVATIONS[self.inputs["qkv"].dtype.name]

    def dimension(self, name: str, axis: int) -> Any:
        """Symbolic size of an input's axis."""
        return self.inputs[name].shape_expr[axis]


@dataclass(frozen=True, kw_only=True)
class PluginLaunch:
    """The kernel of a tactic, its grid, and its scalars in the specification's order, all symbolic."""

    source: KernelSource
    grid: tuple[Any, Any, Any]
    scalars: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class PluginDefinition:
    """What makes a plugin of a specification."""

    specification: PluginSpecification
    output_shapes: Callable[[Call], list[tuple]]
    tactics: Callable[[Call], list[int]]
    """Positive numbers; TensorRT measures each."""
    launch: Callable[[Call, int], PluginLaunch]


def register_plugins(arch: int) -> None:
    """Nothing; afterwards `tensorrt.plugin.op.furcate` makes engines for sm_<arch>. A second call is no error.

    Raises BuildError without a usable TensorRT, ConfigError for another architecture in the same process.
    """
    chip_of(arch)
    if _registered_arch == [arch]:
        return
    if _registered_arch:
        raise ConfigError(
            f"The plugins of this process are compiled for sm_{_registered_arch[0]}; build for sm_{arch} in another one."
        )
    try:
        trtp = importlib.import_module("tensorrt.plugin")
    except ImportError as error:
        raise BuildError(
            f"tensorrt.plugin cannot be imported ({error}); TensorRT 10.13 or newer has it: pip install tensorrt."
        ) from error
    from furcate.plugins.cache_commit.plugin import COMMIT
    from furcate.plugins.tree_attention.plugin import REDUCE, SPLIT

    for definition in (SPLIT, REDUCE, COMMIT):
        _register(trtp, definition, arch)
    _registered_arch.append(arch)


def _register(trtp: Any, definition: PluginDefinition, arch: int) -> None:
    specification = definition.specification
    num_inputs = len(specification.inputs)
    attribute_names = [entry.name for entry in specification.attributes]
    plugin_id = f"{NAMESPACE}::{specification.name}"

    def call_of(descs: tuple, values: dict[str, Any]) -> Call:
        inputs = {entry.name: desc for entry, desc in zip(specification.inputs, descs, strict=True)}
        return Call(trtp=trtp, arch=arch, inputs=inputs, attributes=values)

    def describe(*descs, **values):
        call = call_of(descs, values)
        shapes = definition.output_shapes(call)
        types = _output_types(call, specification)
        return tuple(trtp.from_shape_expr(shape, dtype=kind) for shape, kind in zip(shapes, types, strict=True))

    def autotune(*arguments):
        call = call_of(arguments[:num_inputs], dict(zip(attribute_names, arguments[num_inputs:-1], strict=True)))
        combination = trtp.AutoTuneCombination()
        for position, entry in enumerate((*specification.inputs, *specification.outputs)):
            combination.pos([position], FORMATS[entry.dtype])
        combination.tactics(definition.tactics(call))
        return [combination]

    def implement(*arguments):
        values = dict(zip(attribute_names, arguments[num_inputs:-2], strict=True))
        launch = definition.launch(call_of(arguments[:num_inputs], values), arguments[-1])
        return _implementation(trtp, launch, arch)

    tensors = tuple[(trtp.TensorDesc,) * len(specification.outputs)]
    _annotate(describe, trtp, specification, {}, tensors)
    _annotate(autotune, trtp, specification, {"outputs": tensors}, list[trtp.AutoTuneCombination])
    results = tuple[str | bytes, str | bytes, trtp.KernelLaunchParams, trtp.SymExprs]
    _annotate(implement, trtp, specification, {"outputs": tensors, "tactic": int}, results)
    trtp.register(plugin_id, lazy_register=True)(describe)
    trtp.autotune(plugin_id)(autotune)
    trtp.aot_impl(plugin_id)(implement)


def _annotate(function: Any, trtp: Any, specification: PluginSpecification, extra: dict, returns: Any) -> None:
    """Give `function` the signature that TensorRT reads: tensors, attributes, then what the hook adds."""
    kinds = {entry.name: trtp.TensorDesc for entry in specification.inputs}
    kinds |= {entry.name: entry.kind for entry in specification.attributes} | extra
    parameters = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=kind)
        for name, kind in kinds.items()
    ]
    function.__signature__ = inspect.Signature(parameters, return_annotation=returns)


def _output_types(call: Call, specification: PluginSpecification) -> list[Any]:
    tensorrt = importlib.import_module("tensorrt")
    types = {"float32": tensorrt.float32, "int32": tensorrt.int32}
    return [call.inputs["qkv"].dtype if entry.dtype == "T" else types[entry.dtype] for entry in specification.outputs]


def _implementation(trtp: Any, launch: PluginLaunch, arch: int) -> tuple[str, str, Any, Any]:
    kernel = compile_kernel(launch.source, arch)
    if kernel.report.shared_bytes > PLUGIN_SHARED_BYTES:
        raise BuildError(
            f"{kernel.name} takes {kernel.report.shared_bytes} B of shared memory on sm_{arch}; TensorRT launches a "
            f"plugin with at most {PLUGIN_SHARED_BYTES} B. Use the C++ plugins instead."
        )
    parameters = trtp.KernelLaunchParams()
    parameters.grid_x, parameters.grid_y, parameters.grid_z = launch.grid
    parameters.block_x = 32 * kernel.report.num_warps
    parameters.shared_mem = kernel.report.shared_bytes
    scalars = trtp.SymIntExprs(len(launch.scalars))
    for i, scalar in enumerate(launch.scalars):
        scalars[i] = trtp.SymInt32(scalar)
    return kernel.name, launchable_ptx(kernel), parameters, scalars


def launchable_ptx(kernel: CompiledKernel) -> str:
    """The kernel's PTX without Triton's hidden parameters; BuildError where the kernel reads one of them."""
    entry = re.search(rf"\.visible \.entry {re.escape(kernel.name)}\((.*?)\n\)", kernel.ptx, re.DOTALL)
    if entry is None:
        raise BuildError(f"The PTX of {kernel.name} has no entry of that name; triton 3.6.0 writes one.")
    parameters = [line.strip().rstrip(",") for line in entry[1].strip().splitlines()]
    for hidden in parameters[-NUM_HIDDEN_PARAMETERS:]:
        name = hidden.split()[-1]
        if re.search(rf"{re.escape(name)}\b", kernel.ptx[entry.end() :]):
            raise BuildError(f"{kernel.name} reads its hidden parameter {name}, which TensorRT does not pass.")
    kept = ",\n\t".join(parameters[:-NUM_HIDDEN_PARAMETERS])
    return f"{kernel.ptx[: entry.start(1)]}\n\t{kept}{kernel.ptx[entry.end(1) :]}"

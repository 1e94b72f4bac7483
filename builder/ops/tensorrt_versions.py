"""What differs between the TensorRT modules that a network can be emitted for; nothing else asks which one it is.

| difference | brought by |
|---|---|
| `add_attention` (bool `causal`, mask) | TensorRT 10.14 (10.13.3 lacks it) |
| `add_kv_cache_update`, `add_rotary_embedding` | TensorRT 10.15.1 |
| `add_dist_collective`, `num_ranks` | TensorRT 10.16.0 (a preview feature until 11.0) |
| strong typing is the only typing; flags FP16, BF16, INT8, FP8 and the calibrators are gone | TensorRT 11.0 |
| `add_attention_v2` (CausalMaskKind instead of the bool) | TensorRT 11.0 |
| all of these, but no plugins and no timing cache; `set_compute_capability` builds without a GPU | TensorRT-RTX 1.7.1 |

Sources: TensorRT's release notes 10.15.1, 10.16.0 and 11.0.0; the bindings of 10.14.1, 11.4.0 and RTX 1.7.1 themselves.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from furcate.builder.errors import BuildError

RTX_CAPABILITIES = (75, 80, 86, 89, 120, 121)


@dataclass(frozen=True)
class TensorRT:
    """One TensorRT module; the properties say what it can do."""

    module: Any

    @property
    def version(self) -> str:
        """Its version, as plans are compared by."""
        return str(self.module.__version__)

    @property
    def is_rtx(self) -> bool:
        """TensorRT-RTX: builds without a GPU, knows no plugins."""
        return hasattr(self.module, "ComputeCapability")

    @property
    def label(self) -> str:
        """Name and version, for messages."""
        return f"{'TensorRT-RTX' if self.is_rtx else 'TensorRT'} {self.version}"

    @property
    def has_plugins(self) -> bool:
        """Whether a plugin can be put into a network by Python."""
        return hasattr(self.module.INetworkDefinition, "add_plugin")

    @property
    def has_native_cache(self) -> bool:
        """Whether K/V appends and rotation are layers of their own."""
        return hasattr(self.module.INetworkDefinition, "add_kv_cache_update")

    @property
    def has_timing_cache(self) -> bool:
        """Whether tactics are measured while building; TensorRT-RTX chooses them on the GPU that runs the plan."""
        return not self.is_rtx

    @property
    def has_collectives(self) -> bool:
        """Whether ranks can exchange tensors inside a plan."""
        return hasattr(self.module.INetworkDefinition, "add_dist_collective")

    def create_network(self, builder: Any) -> Any:
        """A strongly typed INetworkDefinition that takes ahead-of-time plugins."""
        flags = self.module.NetworkDefinitionCreationFlag
        value = 1 << int(flags.STRONGLY_TYPED)
        if hasattr(flags, "PREFER_AOT_PYTHON_PLUGINS"):
            value |= 1 << int(flags.PREFER_AOT_PYTHON_PLUGINS)
        return builder.create_network(value)

    def add_attention(self, network: Any, query: Any, key: Any, value: Any) -> Any:
        """IAttention with softmax and no causal mask of its own."""
        softmax = self.module.AttentionNormalizationOp.SOFTMAX
        if hasattr(network, "add_attention_v2"):
            return network.add_attention_v2(query, key, value, softmax, self.module.CausalMaskKind.NONE)
        return network.add_attention(query, key, value, softmax, False)

    def add_all_reduce(self, network: Any, x: Any, num_ranks: int) -> Any:
        """The sum of `x` over all ranks."""
        if not self.has_collectives:
            raise BuildError(
                f"--tp-size {num_ranks} needs TensorRT's collective layers, which came with 10.16; this is {self.label}."
            )
        kinds = self.module.CollectiveOperation
        layer = network.add_dist_collective(x, kinds.ALL_REDUCE, self.module.ReduceOperation.SUM, None, None)
        layer.num_ranks = num_ranks
        return layer

    def set_architecture(self, config: Any, arch: int) -> None:
        """Makes a TensorRT-RTX build for sm_<arch>; TensorRT itself always builds for the GPU it runs on."""
        if not self.is_rtx:
            return
        if arch not in RTX_CAPABILITIES:
            raise BuildError(
                f"{self.label} does not build for sm_{arch}; it builds for sm_{', sm_'.join(map(str, RTX_CAPABILITIES))}."
            )
        config.num_compute_capabilities = 1
        config.set_compute_capability(getattr(self.module.ComputeCapability, f"SM{arch}"), 0)


def installed_tensorrt() -> TensorRT | None:
    """TensorRT itself where it can be imported; None on machines without it."""
    module = _imported("tensorrt")
    return None if module is None else TensorRT(module)


def installed_rtx() -> TensorRT | None:
    """TensorRT-RTX where it can be imported, with or without its meta package."""
    for name in ("tensorrt_rtx", "tensorrt_rtx_bindings"):
        module = _imported(name)
        if module is not None:
            return TensorRT(module)
    return None


def _imported(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    # A driver or library that is missing shows up as an OSError, a broken installation as anything else.
    except (ImportError, OSError, RuntimeError):
        return None

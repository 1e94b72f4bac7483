"""Tree attention by our plugins: `furcate::tree_attention_split` and `_reduce`, over pages reached by address.

The plugins' arguments are named in `plugins/specification.py`; here every one of them gets its value. Axes: B batch, N nodes,
W mask words, P pages, L layers, D head_dim.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch

from furcate.builder.errors import BuildError
from furcate.builder.network.inputs import Array, PassInputs
from furcate.builder.ops.tensorrt import TensorRTOps
from furcate.builder.ops.tensorrt_graph import Graph
from furcate.builder.ops.torch import RopeTables
from furcate.plugins.specification import TREE_ATTENTION_REDUCE, TREE_ATTENTION_SPLIT, PluginSpecification
from furcate.plugins.tree_attention.spec import AttentionSpec


@dataclass(frozen=True, kw_only=True)
class PluginSettings:
    """Paged attention. `plugins` is the namespace that makes the plugins, `tensorrt.plugin.op.furcate`."""

    page_size: int
    num_splits: int
    plugins: Any


@dataclass(frozen=True, kw_only=True)
class PluginPlan:
    """What the layers of one pass share: tensors by their names in the plugins' specification, and attributes."""

    spec: AttentionSpec
    tensors: dict[str, Any]


def registered_plugins(arch: int) -> Any:
    """`tensorrt.plugin.op.furcate`, its kernels compiled for sm_<arch>. Raises BuildError without TensorRT or Triton."""
    try:
        from furcate.plugins.tensorrt_plugin import NAMESPACE, register_plugins
    except ImportError as error:
        raise BuildError(f"the plugins cannot be compiled here ({error}); pip install 'furcate[gpu]'.") from error
    # tensorrt.plugin 11.4 reads numpy.typing without importing it.
    importlib.import_module("numpy.typing")
    register_plugins(arch)
    return getattr(importlib.import_module("tensorrt.plugin").op, NAMESPACE)


class PluginAttention:
    """Declares `kv_pool` [L] int64, the device address of every layer's pages, and emits the plugins over it."""

    def __init__(self, graph: Graph, rope: RopeTables, settings: PluginSettings, num_layers: int) -> None:
        if not graph.tensorrt.has_plugins:
            raise BuildError(f"{graph.tensorrt.label} knows no plugins; use --attention native.")
        self.graph = graph
        self.rope = rope
        self.settings = settings
        self.kv_pool = graph.input("kv_pool", torch.int64, (num_layers,))
        # Inputs that the kernel does not read in this variant still need a tensor.
        self._unread_scales = graph.constant(torch.ones(2))
        self._tables: dict[bool, tuple[Any, Any]] = {}

    def plan(self, inputs: PassInputs, attention: AttentionSpec, local_rope: bool) -> PluginPlan:
        is_local = local_rope and self.rope.local is not None
        if is_local not in self._tables:
            table = self.rope.local if is_local else self.rope.everywhere
            assert table is not None
            self._tables[is_local] = (self.graph.constant(table.cos), self.graph.constant(table.sin))
        cos, sin = self._tables[is_local]
        tensors = {
            "positions": inputs.positions,
            "tree_mask": inputs.tree_mask,
            "num_valid": inputs.num_nodes,
            "cache_lengths": inputs.cache_lengths,
            "page_table": inputs.page_table,
            "rope_cos": cos,
            "rope_sin": sin,
            "kv_scales": self._unread_scales,
            "kv_pool": self.kv_pool,
        }
        return PluginPlan(spec=attention, tensors=tensors)

    def attend(self, ops: TensorRTOps, prefix: str, layer: int, qkv: Array, plan: PluginPlan) -> Array:
        has_norms = ops.has_weight(f"{prefix}.q_norm")
        tensors = {**plan.tensors, "qkv": qkv, **self._norms(ops, prefix, plan.spec, has_norms)}
        attributes = self._attributes(layer, plan.spec, has_norms)
        split = self._add(TREE_ATTENTION_SPLIT, tensors, attributes, f"{prefix}.tree_attention_split")
        partial_out, partial_stats = split.get_output(0), split.get_output(1)
        tensors = {"partial_out": partial_out, "partial_stats": partial_stats, "qkv": qkv}
        reduced = self._add(TREE_ATTENTION_REDUCE, tensors, attributes, f"{prefix}.tree_attention_reduce")
        return reduced.get_output(0)

    def _norms(self, ops: TensorRTOps, prefix: str, spec: AttentionSpec, has_norms: bool) -> dict[str, Any]:
        """Head norm weights in float32, Gemma's 1 + w added; ones, not read, without norms."""
        graph = self.graph
        if not has_norms:
            unread = graph.scalar(1.0, torch.float32, 1)
            return {"query_norm": unread, "key_norm": unread}
        norms = {}
        for argument, name in (("query_norm", "q_norm"), ("key_norm", "k_norm")):
            weight = graph.cast(ops.weights.emitted(f"{prefix}.{name}.weight", 1), torch.float32)
            if ops.settings.has_unit_offset_norm:
                weight = graph.binary("SUM", weight, graph.scalar(1.0, torch.float32, 1))
            norms[argument] = weight
        return norms

    def _attributes(self, layer: int, spec: AttentionSpec, has_norms: bool) -> dict[str, int | float]:
        return {
            "num_query_heads": spec.num_query_heads,
            "num_kv_heads": spec.num_kv_heads,
            "head_dim": spec.head_dim,
            "page_size": self.settings.page_size,
            "has_fp8_pages": 0,
            "layer": layer,
            "num_splits": self.settings.num_splits,
            "scale": float(spec.score_scale),
            "softcap": float(spec.softcap or 0.0),
            "sliding_window": spec.sliding_window or 0,
            "norm_eps": float(spec.norm_eps),
            "has_norms": int(has_norms),
            "is_chain": 0,
        }

    def _add(
        self, specification: PluginSpecification, tensors: dict[str, Any], attributes: dict[str, Any], name: str
    ) -> Any:
        """The plugin's layer; inputs and attributes in the specification's order, which TensorRT checks."""
        inputs = [tensors[entry.name] for entry in specification.inputs]
        values = {entry.name: attributes[entry.name] for entry in specification.attributes}
        make = getattr(self.settings.plugins, specification.name)(*inputs, **values)
        layer = self.graph.network.add_plugin(make, aot=True)
        self.graph.output(layer, name)
        return layer

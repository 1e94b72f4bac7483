"""The TensorRT plugins furcate::tree_attention_split and furcate::tree_attention_reduce.

TensorRT launches one kernel a plugin and no workspace, so split and reduce are two, and the partial results are
ordinary tensors between them. B batch, N nodes, W mask words, P pages, S splits.
"""

from __future__ import annotations

from furcate.plugins.specification import TREE_ATTENTION_REDUCE, TREE_ATTENTION_SPLIT
from furcate.plugins.tensorrt_plugin import Call, PluginDefinition, PluginLaunch
from furcate.plugins.tree_attention.aot import Variant, reduce_source, split_source
from furcate.plugins.tree_attention.spec import AttentionSpec
from furcate.plugins.tree_attention.tactics import PLUGIN_TACTICS, fitting_lines

SIXTEEN_BITS = 2


def _spec(call: Call) -> AttentionSpec:
    """The layer that the attributes describe; 0 means off where the specification says so."""
    value = call.attributes.get
    return AttentionSpec(
        num_query_heads=call.attributes["num_query_heads"],
        num_kv_heads=call.attributes["num_kv_heads"],
        head_dim=call.attributes["head_dim"],
        scale=value("scale"),
        softcap=value("softcap") or None,
        sliding_window=value("sliding_window") or None,
        norm_eps=value("norm_eps", 1e-6),
    )


def _split_shapes(call: Call) -> list[tuple]:
    spec, splits = _spec(call), call.attributes["num_splits"]
    leading = (call.dimension("qkv", 0) * spec.num_kv_heads, splits, call.dimension("qkv", 1) * spec.group_size)
    return [(*leading, spec.head_dim), (*leading, 2)]


def _split_tactics(call: Call) -> list[int]:
    """Numbers of PLUGIN_TACTICS' lines, from 1, that fit the chip and head_dim."""
    fitting = fitting_lines(PLUGIN_TACTICS, call.arch, call.attributes["head_dim"], SIXTEEN_BITS)
    return [number for number, line in enumerate(PLUGIN_TACTICS, start=1) if line in fitting]


def _split_launch(call: Call, tactic: int) -> PluginLaunch:
    spec, attributes = _spec(call), call.attributes
    blocks = PLUGIN_TACTICS[tactic - 1].tactic
    variant = Variant(
        activation=call.activation,
        page_size=attributes["page_size"],
        has_fp8_pages=bool(attributes["has_fp8_pages"]),
        has_norms=bool(attributes["has_norms"]),
        is_chain=bool(attributes["is_chain"]),
    )
    num_nodes, splits = call.dimension("qkv", 1), attributes["num_splits"]
    return PluginLaunch(
        source=split_source(spec, blocks, variant),
        grid=(
            call.trtp.cdiv(num_nodes * spec.group_size, blocks.block_m),
            splits,
            call.dimension("qkv", 0) * spec.num_kv_heads,
        ),
        scalars=(
            attributes["layer"],
            num_nodes,
            call.dimension("tree_mask", 2),
            call.dimension("page_table", 1),
            splits,
            0,
        ),
    )


def _reduce_shapes(call: Call) -> list[tuple]:
    spec = _spec(call)
    return [(call.dimension("qkv", 0), call.dimension("qkv", 1), spec.num_query_heads * spec.head_dim)]


def _reduce_launch(call: Call, _tactic: int) -> PluginLaunch:
    spec, splits = _spec(call), call.attributes["num_splits"]
    num_rows, num_nodes = call.dimension("qkv", 0), call.dimension("qkv", 1)
    return PluginLaunch(
        source=reduce_source(spec, call.activation, splits),
        grid=(num_nodes * spec.group_size, num_rows * spec.num_kv_heads, 1),
        scalars=(num_nodes, splits),
    )


SPLIT = PluginDefinition(
    specification=TREE_ATTENTION_SPLIT,
    output_shapes=_split_shapes,
    tactics=_split_tactics,
    launch=_split_launch,
)
REDUCE = PluginDefinition(
    specification=TREE_ATTENTION_REDUCE,
    output_shapes=_reduce_shapes,
    tactics=lambda _call: [1],
    launch=_reduce_launch,
)

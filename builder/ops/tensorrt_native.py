"""Tree attention out of TensorRT's own layers: rotary embedding, K/V cache update, attention with a bool ancestor mask.

Every sequence's K/V lies in one piece, `k_cache.<layer>` and `v_cache.<layer>` [B,Hkv,S,D]; slot `cache_length + j` is node
j's, as in the paged pool. Axes: B batch, N nodes, W mask words, S slots, G query heads per KV head, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from furcate.builder.errors import BuildError
from furcate.builder.network.inputs import Array, PassInputs
from furcate.builder.ops.tensorrt import TensorRTOps
from furcate.builder.ops.tensorrt_graph import Graph
from furcate.builder.ops.torch import RopeTables
from furcate.plugins.tree_attention.spec import AttentionSpec


@dataclass(frozen=True, kw_only=True)
class NativePlan:
    """What the layers of one pass share: is_attended bool [B,1,N,S], cos and sin [positions, D/2] float32."""

    spec: AttentionSpec
    is_attended: Array
    positions: Array
    write_indices: Array
    cos: Array
    sin: Array


class NativeAttention:
    """Declares the K/V caches as inputs and outputs of the network, and emits attention over them.

    `num_slots` is each cache's capacity S. Raises BuildError for a TensorRT without the layers.
    """

    def __init__(self, graph: Graph, rope: RopeTables, num_slots: int) -> None:
        if not graph.tensorrt.has_native_cache:
            raise BuildError(
                f"native attention needs TensorRT 10.15 or newer (K/V cache layers); this is {graph.tensorrt.label}. "
                "Use --attention plugin."
            )
        self.graph = graph
        self.rope = rope
        self.num_slots = num_slots
        self._tables: dict[bool, tuple[Any, Any]] = {}

    def plan(self, inputs: PassInputs, attention: AttentionSpec, local_rope: bool) -> NativePlan:
        is_local = local_rope and self.rope.local is not None
        if is_local not in self._tables:
            table = self.rope.local if is_local else self.rope.everywhere
            assert table is not None
            self._tables[is_local] = (self.graph.constant(table.cos), self.graph.constant(table.sin))
        cos, sin = self._tables[is_local]
        first = self._first_slots(inputs)
        return NativePlan(
            spec=attention,
            is_attended=self._is_attended(inputs, attention),
            positions=inputs.positions,
            write_indices=first,
            cos=cos,
            sin=sin,
        )

    def _first_slots(self, inputs: PassInputs) -> Array:
        if isinstance(inputs.node_offset, int):
            assert inputs.node_offset == 0, "a dynamic node offset is an input of the network"
            return inputs.cache_lengths
        return self.graph.binary("SUM", inputs.cache_lengths, inputs.node_offset)

    def _is_attended(self, inputs: PassInputs, attention: AttentionSpec) -> Array:
        graph = self.graph
        lengths = graph.reshape(inputs.cache_lengths, (0, 1))
        slots = graph.constant(torch.arange(self.num_slots, dtype=torch.int32)[None])
        column = graph.binary("SUB", slots, lengths)
        is_prefix = graph.binary("LESS", column, graph.scalar(0, torch.int32, 2))
        is_ancestor = self._ancestor_bits(inputs, column)
        is_prefix = graph.reshape(is_prefix, (0, 1, 1, self.num_slots))
        is_attended = graph.binary("OR", is_ancestor, is_prefix)
        if attention.sliding_window is not None:
            near = self._is_near(inputs, is_ancestor, (is_prefix, slots), attention.sliding_window)
            is_attended = graph.binary("AND", is_attended, near)
        return is_attended

    def _ancestor_bits(self, inputs: PassInputs, column: Array) -> Array:
        """bool [B,1,N,S]: the ancestor bit of each slot's tree column [B,S]; false outside the mask's columns."""
        graph = self.graph
        assert inputs.tree_mask is not None, "an emitted network reads ancestor words, a prompt chunk's too"
        words = graph.transpose(self._unsigned(inputs.tree_mask), (0, 2, 1))
        num_words = graph.cast(graph.size(inputs.tree_mask, 2), torch.int32)
        num_columns = graph.binary("PROD", num_words, graph.scalar(32, torch.int32, 1))
        num_columns = graph.reshape(num_columns, (1, 1))
        clamped = graph.binary("MAX", column, graph.scalar(0, torch.int32, 2))
        last = graph.binary("SUB", num_columns, graph.scalar(1, torch.int32, 2))
        clamped = graph.binary("MIN", clamped, last)
        word = graph.binary("FLOOR_DIV", clamped, graph.scalar(32, torch.int32, 2))
        bit = graph.binary("SUB", clamped, graph.binary("PROD", word, graph.scalar(32, torch.int32, 2)))
        power = graph.gather(graph.constant(2 ** torch.arange(32, dtype=torch.int64)), bit, 0)
        power = graph.reshape(power, (0, 0, 1))
        shifted = graph.binary("FLOOR_DIV", graph.gather(words, word, 1, num_elementwise=1), power)
        half = graph.binary("FLOOR_DIV", shifted, graph.scalar(2, torch.int64, 3))
        odd = graph.binary("SUB", shifted, graph.binary("PROD", half, graph.scalar(2, torch.int64, 3)))
        is_set = graph.binary("EQUAL", odd, graph.scalar(1, torch.int64, 3))
        is_set = graph.reshape(is_set, (0, 1, self.num_slots, -1), order=(0, 1, 3, 2))
        in_tree = graph.binary(
            "AND",
            graph.binary("GREATER", column, graph.scalar(-1, torch.int32, 2)),
            graph.binary("LESS", column, num_columns),
        )
        return graph.binary("AND", is_set, graph.reshape(in_tree, (0, 1, 1, self.num_slots)))

    def _unsigned(self, words: Array) -> Array:
        """The int32 words as int64 without sign: TensorRT has no bit shifts, and divisions want them positive."""
        graph = self.graph
        wide = graph.cast(words, torch.int64)
        is_negative = graph.binary("LESS", wide, graph.scalar(0, torch.int64, 3))
        lifted = graph.binary("SUM", wide, graph.scalar(2**32, torch.int64, 3))
        return graph.output(graph.network.add_select(is_negative, lifted, wide))

    def _is_near(self, inputs: PassInputs, is_ancestor: Array, prefix: tuple[Array, Array], window: int) -> Array:
        """bool [B,1,N,S]: slots less than `window` positions behind the node. An ancestor's depth is its rank on the path."""
        graph = self.graph
        is_prefix, slots = prefix
        bits = graph.cast(is_ancestor, torch.int32)
        axis = graph.constant(torch.tensor(3, dtype=torch.int32))
        kind = graph.trt.CumulativeOperation.SUM
        rank = graph.output(graph.network.add_cumulative(bits, axis, kind, True, False))
        in_tree = graph.binary("SUM", graph.reshape(inputs.cache_lengths, (0, 1, 1, 1)), rank)
        slots = graph.reshape(slots, (1, 1, 1, self.num_slots))
        position = graph.output(graph.network.add_select(is_prefix, slots, in_tree))
        distance = graph.binary("SUB", graph.reshape(inputs.positions, (0, 1, -1, 1)), position)
        return graph.binary("LESS", distance, graph.scalar(window, torch.int32, 4))

    def attend(self, ops: TensorRTOps, prefix: str, layer: int, qkv: Array, plan: NativePlan) -> Array:
        graph, spec = self.graph, plan.spec
        sizes = {"q": spec.num_query_heads, "k": spec.num_kv_heads, "v": spec.num_kv_heads}
        heads, start = {}, 0
        for name, count in sizes.items():
            part = graph.last(qkv, start, count * spec.head_dim)
            heads[name] = graph.reshape(part, (0, 0, count, spec.head_dim))
            start += count * spec.head_dim
        query = self._rotated(ops, f"{prefix}.q_norm", heads["q"], plan)
        query = graph.binary("PROD", query, graph.scalar(spec.score_scale, torch.float32, 4))
        query = graph.cast(query, graph.dtype)
        key = graph.cast(self._rotated(ops, f"{prefix}.k_norm", heads["k"], plan), graph.dtype)
        keys = self._cached("k_cache", layer, key, plan)
        values = self._cached("v_cache", layer, graph.transpose(heads["v"], (0, 2, 1, 3)), plan)
        if spec.softcap is None:
            attention = graph.tensorrt.add_attention(graph.network, query, keys, values)
            attention.mask, attention.decomposable = plan.is_attended, True
            attention.name = f"{prefix}.attention"
            out = attention.get_output(0)
        else:
            out = self._softcapped(query, keys, values, plan)
        return graph.reshape(graph.transpose(out, (0, 2, 1, 3)), (0, 0, spec.num_query_heads * spec.head_dim))

    def _rotated(self, ops: TensorRTOps, norm: str, heads: Array, plan: NativePlan) -> Array:
        """[B,N,heads,D] -> [B,heads,N,D] in float32: normed where the checkpoint norms, rotated by position."""
        graph = self.graph
        if ops.has_weight(norm):
            weight = graph.cast(ops.weights.emitted(f"{norm}.weight", 4), torch.float32)
            heads = ops.normed(heads, weight, plan.spec.norm_eps, ops.settings.has_unit_offset_norm)
        heads = graph.transpose(graph.cast(heads, torch.float32), (0, 2, 1, 3))
        layer = graph.network.add_rotary_embedding(heads, plan.cos, plan.sin, False, plan.spec.head_dim)
        layer.set_input(3, plan.positions)
        return graph.output(layer)

    def _cached(self, name: str, layer: int, update: Array, plan: NativePlan) -> Array:
        """The layer's whole cache [B,Hkv,S,D] with the new rows written; an input and an output of the network."""
        graph = self.graph
        shape = (-1, plan.spec.num_kv_heads, self.num_slots, plan.spec.head_dim)
        cache = graph.input(f"{name}.{layer}", graph.dtype, shape)
        mode = graph.trt.KVCacheMode.LINEAR
        updated = graph.output(graph.network.add_kv_cache_update(cache, update, plan.write_indices, mode))
        graph.mark_output(updated, f"{name}.{layer}.out")
        return updated

    def _softcapped(self, query: Array, keys: Array, values: Array, plan: NativePlan) -> Array:
        """Attention with soft-capped scores (Gemma 2), which IAttention has no place for: [B,Hq,N,D]."""
        graph, spec = self.graph, plan.spec
        assert spec.softcap is not None
        grouped = graph.reshape(query, (0, spec.num_kv_heads, -1, spec.head_dim))
        scores = graph.cast(graph.matmul(grouped, keys, transposes_b=True), torch.float32)
        ratio = graph.binary("PROD", scores, graph.scalar(1.0 / spec.softcap, torch.float32, 4))
        capped = graph.activation("TANH", ratio)
        capped = graph.binary("PROD", capped, graph.scalar(spec.softcap, torch.float32, 4))
        # [B,1,N,S] repeats for the G query heads that share a KV head.
        mask = graph.concat([plan.is_attended] * spec.group_size, 2)
        lowest = graph.scalar(float("-inf"), torch.float32, 4)
        softmax = graph.network.add_softmax(graph.output(graph.network.add_select(mask, capped, lowest)))
        softmax.axes = 1 << 3
        weights = graph.cast(graph.output(softmax), graph.dtype)
        out = graph.matmul(weights, values)
        size = graph.concat([
            graph.size(query, 0), graph.sizes(spec.num_query_heads), graph.size(query, 2), graph.sizes(spec.head_dim)
        ], 0)  # fmt: skip
        layer = graph.network.add_shuffle(out)
        layer.set_input(1, size)
        return graph.output(layer)

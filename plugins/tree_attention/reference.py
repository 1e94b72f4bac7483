"""Tree attention, defined: float64, one node and one head at a time. Everything else is tested against this file.

B batch, N nodes, S slots, H heads (q query, kv key/value), D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from furcate.plugins.tree_attention.spec import AttentionSpec, HeadNorms, RopeTable, TreeBatch

if TYPE_CHECKING:
    from jaxtyping import Float, Float64
    from torch import Tensor


@dataclass(frozen=True)
class ReferenceResult:
    """What a call returns and what it stores: keys rotated, values as they came; padding rows are zero."""

    out: Float64[Tensor, "B N Hq*D"]
    keys: Float64[Tensor, "B N Hkv D"]
    values: Float64[Tensor, "B N Hkv D"]


def unchanged(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of a pool that stores them as they are."""
    return keys, values


@dataclass(frozen=True)
class ReferenceModel:
    """What a layer is; `as_stored` is what its pool keeps of a node's keys and values [Hkv, D], fp8 rounding say."""

    spec: AttentionSpec
    rope: RopeTable
    norms: HeadNorms | None = None
    as_stored: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = unchanged


def rotated(x: Float64[Tensor, "H D"], cos: Float64[Tensor, " D/2"], sin: Float64[Tensor, " D/2"]) -> Tensor:
    """x turned by its position, half-split: pairs are (d, d + D/2). RoFormer, arXiv 2104.09864."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def head_normed(x: Float64[Tensor, "H D"], weight: Float64[Tensor, " D"], eps: float) -> Tensor:
    """x with every head scaled to unit root mean square, times weight (Qwen3)."""
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight


def column_depths(batch: TreeBatch, b: int, node: int) -> dict[int, int]:
    """The tree columns that the node attends, each with its depth below the cache's end (the root: 0)."""
    last = batch.node_offset + node
    if batch.is_chain:
        return {column: column for column in range(last + 1)}
    assert batch.tree_mask is not None
    words = batch.tree_mask[b, node].tolist()
    columns = [c for c in range(32 * len(words)) if (words[c // 32] >> (c % 32)) & 1]
    return {column: depth for depth, column in enumerate(columns)}


def stored_rows(pool_layer: Float[Tensor, "pages 2 page_size Hkv D"], batch: TreeBatch, b: int, slots: list[int]):
    """Keys and values [len(slots), Hkv, D] in float64 of a sequence's slots."""
    page_size = pool_layer.shape[2]
    pages = [int(batch.page_table[b, s // page_size]) for s in slots]
    rows = pool_layer[pages, :, [s % page_size for s in slots]].double()
    return rows[:, 0], rows[:, 1]


def reference_tree_attention(
    qkv: Float[Tensor, "B N (Hq+2Hkv)*D"],
    pool_layer: Float[Tensor, "pages 2 page_size Hkv D"],
    batch: TreeBatch,
    model: ReferenceModel,
) -> ReferenceResult:
    """The attention of every node over its sequence's cache and its own ancestors; the pool is read, never written."""
    spec, rope, norms = model.spec, model.rope, model.norms
    num_rows, num_nodes, _ = qkv.shape
    heads = (spec.num_query_heads, spec.num_kv_heads, spec.num_kv_heads)
    q, k, v = qkv.double().view(num_rows, num_nodes, sum(heads), spec.head_dim).split(heads, dim=2)
    result = ReferenceResult(torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v))
    for b in range(num_rows):
        valid = num_nodes if batch.num_nodes is None else min(num_nodes, int(batch.num_nodes[b]))
        queries = q[b].clone()
        for node in range(valid):
            position = int(batch.positions[b, node])
            cos, sin = rope.cos[position].double(), rope.sin[position].double()
            query, key = q[b, node], k[b, node]
            if norms is not None:
                query = head_normed(query, norms.query.double(), spec.norm_eps)
                key = head_normed(key, norms.key.double(), spec.norm_eps)
            queries[node] = rotated(query, cos, sin)
            result.keys[b, node], result.values[b, node] = model.as_stored(rotated(key, cos, sin), v[b, node])
        for node in range(valid):
            keys, values = _attended(pool_layer, batch, spec, (b, node), result)
            result.out[b, node] = _softmax_average(queries[node], keys, values, spec)
    return ReferenceResult(result.out.flatten(2), result.keys, result.values)


def _attended(pool_layer, batch: TreeBatch, spec: AttentionSpec, at: tuple[int, int], result: ReferenceResult):
    """Keys and values [S, Hkv, D] that node `at` attends: cache, earlier nodes in the pages, new nodes of this call."""
    b, node = at
    cache_length = int(batch.cache_lengths[b])
    depths = column_depths(batch, b, node)
    window = spec.sliding_window or (1 << 62)
    first_position = int(batch.positions[b, node]) - window + 1
    cached = [s for s in range(cache_length) if s >= first_position]
    columns = [c for c, depth in depths.items() if cache_length + depth >= first_position]
    cached += [cache_length + c for c in columns if c < batch.node_offset]
    new = [c - batch.node_offset for c in columns if c >= batch.node_offset]
    keys, values = stored_rows(pool_layer, batch, b, cached)
    return torch.cat([keys, result.keys[b, new]]), torch.cat([values, result.values[b, new]])


def _softmax_average(query: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec) -> Tensor:
    """[Hq, D]: softmax(query . keys) values, one query head at a time."""
    out = torch.zeros_like(query)
    for head in range(spec.num_query_heads):
        kv_head = head // spec.group_size
        scores = keys[:, kv_head] @ query[head] * spec.score_scale
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        out[head] = torch.softmax(scores, dim=0) @ values[:, kv_head]
    return out

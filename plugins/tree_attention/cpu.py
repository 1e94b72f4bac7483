"""Tree attention on the CPU: what does not depend on the layer is planned once, a layer is then about ten torch calls.

B batch, N nodes, G query heads per KV head, P pages of a sequence, S = P * page_size slots, H heads, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from furcate.builder.errors import ConfigError
from furcate.plugins.tree_attention.spec import AttentionSpec, HeadNorms, RopeTable, TreeBatch

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Float32, Int64
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class AttentionPlan:
    """One pass, ready for every layer of one AttentionSpec. Rows are rows of the pool's layer seen as [pages*2*ps, .]."""

    spec: AttentionSpec
    mask: Float[Tensor, "B 1 G*N S"]
    """0 where attended, -inf elsewhere; query row g * N + n is node n of the group's query head g."""
    cos: Float32[Tensor, "B N 1 D"]
    sin: Float32[Tensor, "B N 1 D"]
    """The sine with its first half negated, so that rotated = x * cos + roll(x, D/2) * sin."""
    key_rows: Int64[Tensor, " new"]
    value_rows: Int64[Tensor, " new"]
    stored_nodes: Int64[Tensor, " new"] | None
    """Flat [B*N] index of the nodes that are stored; None when none is padding."""
    padding_nodes: Int64[Tensor, " padding"] | None
    half_pages: Int64[Tensor, " 2*B*P"]
    """2 * page of every sequence's pages (keys), then 2 * page + 1 (values)."""
    unattended_rows: Int64[Tensor, " rows"]
    """Gathered rows that no node attends; they may hold anything, NaN included, and are zeroed after the gather."""


def plan_attention(
    batch: TreeBatch, spec: AttentionSpec, rope: RopeTable, pool: Float[Tensor, "... pages 2 page_size Hkv D"]
) -> AttentionPlan:
    """The plan of one forward pass over `pool` (all layers or one: only its sizes and dtype are used).

    Raises ConfigError when the pool is in fp8 or a tree does not fit the pages of page_table.
    """
    if pool.dtype.itemsize == 1:
        raise ConfigError(f"The pool is {pool.dtype}; the CPU path reads float32, bfloat16 or float16 pages.")
    num_rows, num_nodes = batch.positions.shape
    page_size, num_pages = pool.shape[-3], batch.page_table.shape[1]
    num_slots = num_pages * page_size
    lengths = batch.cache_lengths.tolist()
    counts = [num_nodes] * num_rows if batch.num_nodes is None else batch.num_nodes.tolist()
    ends = [length + batch.node_offset + count for length, count in zip(lengths, counts, strict=True)]
    if max(ends) > num_slots:
        raise ConfigError(
            f"A tree ends at slot {max(ends) - 1}, but page_table holds {num_pages} pages of {page_size}: "
            f"{num_slots} slots. Give the sequence more pages."
        )
    mask = additive_mask(batch, spec, num_slots, pool.dtype)
    pages = batch.page_table.long()
    if min(ends) <= num_slots - page_size:
        # Entries behind a sequence's last page may hold anything.
        used = (torch.tensor(ends) + (page_size - 1)) // page_size
        pages = pages.masked_fill(torch.arange(num_pages) >= used[:, None], 0)
    slots = (batch.cache_lengths.long() + batch.node_offset)[:, None] + torch.arange(num_nodes)
    positions = batch.positions.long()
    stored = padding = None
    if min(counts) < num_nodes:
        is_node = torch.arange(num_nodes) < torch.tensor(counts)[:, None]
        slots, positions = slots.masked_fill(~is_node, 0), positions.masked_fill(~is_node, 0)
        stored, padding = (flags.flatten().nonzero().squeeze(1) for flags in (is_node, ~is_node))
    key_rows = (pages.gather(1, slots // page_size) * (2 * page_size) + slots % page_size).flatten()
    key_rows = key_rows if stored is None else key_rows[stored]
    dead = (mask.amax(dim=1) < 0).flatten().nonzero().squeeze(1)
    cos, sin = _rotation_rows(positions, rope)
    keys_of_pages = (2 * pages).flatten()
    return AttentionPlan(
        spec=spec,
        mask=mask.repeat(1, spec.group_size, 1).unsqueeze(1),
        cos=cos,
        sin=sin,
        key_rows=key_rows,
        value_rows=key_rows + page_size,
        stored_nodes=stored,
        padding_nodes=padding,
        half_pages=torch.cat([keys_of_pages, keys_of_pages + 1]),
        unattended_rows=torch.cat([dead, dead + num_rows * num_slots]),
    )


def additive_mask(batch: TreeBatch, spec: AttentionSpec, num_slots: int, dtype: torch.dtype) -> Float[Tensor, "B N S"]:
    """0 where a node attends a slot, -inf elsewhere."""
    num_rows, num_nodes = batch.positions.shape
    if spec.sliding_window is not None or batch.num_nodes is not None:
        is_attended = attended_slots(batch, spec, num_slots)
        return torch.zeros(is_attended.shape, dtype=dtype).masked_fill_(~is_attended, float("-inf"))
    # The common case in two small writes a row: this runs once a pass, and a step is half a dozen passes.
    is_ancestor = ancestor_columns(batch)
    mask = torch.full((num_rows, num_nodes, num_slots), float("-inf"), dtype=dtype)
    for row, length in enumerate(batch.cache_lengths.tolist()):
        mask[row, :, :length] = 0
        mask[row, :, length : length + is_ancestor.shape[2]].masked_fill_(is_ancestor[row], 0)
    return mask


def attended_slots(batch: TreeBatch, spec: AttentionSpec, num_slots: int) -> Bool[Tensor, "B N S"]:
    """True where a node attends a slot of its sequence: the cache, then its ancestors; rows of padding attend nothing."""
    num_rows, num_nodes = batch.positions.shape
    slot = torch.arange(num_slots)
    cache_lengths = batch.cache_lengths.long()[:, None, None]
    is_ancestor = ancestor_columns(batch)
    num_columns = is_ancestor.shape[-1]
    column = slot - cache_lengths
    in_tree = (column >= 0) & (column < num_columns)
    column = column.clamp(0, num_columns - 1).expand(num_rows, num_nodes, num_slots)
    is_attended = (slot < cache_lengths) | (in_tree & is_ancestor.gather(2, column))
    if spec.sliding_window is not None:
        # An ancestor's depth is its rank on the node's own path, so earlier nodes' positions are not needed.
        depth = is_ancestor.long().cumsum(dim=2).gather(2, column) - 1
        position = torch.where(slot < cache_lengths, slot, cache_lengths + depth)
        is_attended &= batch.positions.long()[:, :, None] - position < spec.sliding_window
    return is_attended & _is_node(batch)[:, :, None]


def ancestor_columns(batch: TreeBatch) -> Bool[Tensor, "B N columns"]:
    """The ancestor words as booleans over node_offset + N columns."""
    num_rows, num_nodes = batch.positions.shape
    column = torch.arange(batch.node_offset + num_nodes)
    if batch.is_chain:
        is_ancestor = column <= batch.node_offset + torch.arange(num_nodes)[:, None]
        return is_ancestor.expand(num_rows, -1, -1)
    assert batch.tree_mask is not None
    return (batch.tree_mask[:, :, column // 32] >> (column % 32)).bitwise_and(1).bool()


def tree_attention(
    qkv: Float[Tensor, "B N (Hq+2Hkv)*D"],
    pool_layer: Float[Tensor, "pages 2 page_size Hkv D"],
    plan: AttentionPlan,
    norms: HeadNorms | None = None,
) -> Float[Tensor, "B N Hq*D"]:
    """The attention of every node; its rotated keys and its values are stored in the pool's layer, in place."""
    spec = plan.spec
    num_rows, num_nodes, _ = qkv.shape
    num_kv_heads, head_dim = spec.num_kv_heads, spec.head_dim
    heads = qkv.view(num_rows, num_nodes, -1, head_dim)
    values = heads[:, :, spec.num_query_heads + num_kv_heads :]
    rotated = _rotated(heads[:, :, : spec.num_query_heads + num_kv_heads], plan, norms)
    _store(rotated[:, :, spec.num_query_heads :], values, pool_layer, plan)

    gathered = pool_layer.view(-1, *pool_layer.shape[2:]).index_select(0, plan.half_pages)
    gathered.view(-1, num_kv_heads * head_dim).index_fill_(0, plan.unattended_rows, 0)
    keys, values = gathered.view(2, num_rows, -1, num_kv_heads, head_dim).transpose(2, 3).unbind(0)
    # [B, N, Hq, D] -> [B, Hkv, G * N, D]: the query heads of a group become rows that share their keys.
    queries = rotated[:, :, : spec.num_query_heads].transpose(1, 2)
    queries = queries.reshape(num_rows, num_kv_heads, spec.group_size * num_nodes, head_dim)
    out = _attend(queries, keys, values, plan)
    out = out.reshape(num_rows, spec.num_query_heads, num_nodes, head_dim).transpose(1, 2)
    out = out.reshape(num_rows, num_nodes, spec.num_query_heads * head_dim)
    if plan.padding_nodes is not None:
        out.view(-1, spec.num_query_heads * head_dim).index_fill_(0, plan.padding_nodes, 0)
    return out


def _is_node(batch: TreeBatch) -> Bool[Tensor, "B N"]:
    num_rows, num_nodes = batch.positions.shape
    if batch.num_nodes is None:
        return torch.ones(num_rows, num_nodes, dtype=torch.bool)
    return torch.arange(num_nodes) < batch.num_nodes[:, None]


def _rotation_rows(positions: Int64[Tensor, "B N"], rope: RopeTable) -> tuple[Tensor, Tensor]:
    cos, sin = rope.cos[positions], rope.sin[positions]
    return torch.cat([cos, cos], dim=-1).unsqueeze(2), torch.cat([-sin, sin], dim=-1).unsqueeze(2)


def _rotated(heads: Float[Tensor, "B N H D"], plan: AttentionPlan, norms: HeadNorms | None) -> Tensor:
    dtype, spec = heads.dtype, plan.spec
    if norms is not None:
        weight = torch.cat(
            [norms.query.expand(spec.num_query_heads, -1), norms.key.expand(spec.num_kv_heads, -1)]
        ).float()
        heads = F.rms_norm(heads.float(), (spec.head_dim,), eps=spec.norm_eps) * weight
    rotated = torch.addcmul(heads * plan.cos, heads.roll(spec.head_dim // 2, -1), plan.sin)
    return rotated.to(dtype)


def _store(keys: Tensor, values: Tensor, pool_layer: Tensor, plan: AttentionPlan) -> None:
    row_width = plan.spec.num_kv_heads * plan.spec.head_dim
    rows = pool_layer.view(-1, row_width)
    keys, values = keys.reshape(-1, row_width), values.reshape(-1, row_width)
    if plan.stored_nodes is not None:
        keys, values = keys[plan.stored_nodes], values[plan.stored_nodes]
    rows.index_copy_(0, plan.key_rows, keys)
    rows.index_copy_(0, plan.value_rows, values)


def _attend(queries: Tensor, keys: Tensor, values: Tensor, plan: AttentionPlan) -> Float[Tensor, "B Hkv G*N D"]:
    spec = plan.spec
    if spec.softcap is None:
        return F.scaled_dot_product_attention(queries, keys, values, plan.mask, scale=spec.score_scale)
    scores = (queries @ keys.transpose(2, 3)) * (spec.score_scale / spec.softcap)
    return torch.softmax(scores.tanh_().mul_(spec.softcap) + plan.mask, dim=-1) @ values

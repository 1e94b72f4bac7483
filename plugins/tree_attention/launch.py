"""Launching the kernel on torch tensors: constants and grid from shapes alone, so nothing waits for the device.

B batch, N nodes, M = N * group rows of one (sequence, KV head), D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from furcate.plugins.tree_attention.kernel import tree_attention_reduce, tree_attention_split
from furcate.plugins.tree_attention.spec import AttentionSpec, HeadNorms, RopeTable, TreeBatch
from furcate.plugins.tree_attention.tactics import Tactic

if TYPE_CHECKING:
    from jaxtyping import Float, Float32
    from torch import Tensor

TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float8_e4m3fn: tl.float8e4nv,
}


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How a call is run: its tactic, splits of the prefix, and the two ablations of the benchmark."""

    tactic: Tactic
    num_splits: int = 1
    is_fused: bool = True
    is_packed: bool = True


@dataclass(frozen=True, kw_only=True)
class LayerInputs:
    """What differs between layers. `pool` is the layer's pages, or with `layer` an int64 [layers] of addresses."""

    qkv: Float[Tensor, "B N (Hq+2Hkv)*D"]
    pool: Tensor
    page_size: int
    kv_dtype: torch.dtype
    norms: HeadNorms | None = None
    kv_scales: Float32[Tensor, " 2"] | None = None
    """fp8 pages hold key / kv_scales[0] and value / kv_scales[1]."""
    layer: int = 0


def kernel_constants(spec: AttentionSpec, tactic: Tactic, page_size: int) -> dict:
    """The compile-time constants that spec, tactic and page size fix; launch and ahead-of-time compile share them."""
    return {
        "HQ": spec.num_query_heads,
        "HKV": spec.num_kv_heads,
        "D": spec.head_dim,
        "DP": triton.next_power_of_2(spec.head_dim),
        "PAGE": page_size,
        "SCALE": spec.score_scale,
        "SOFTCAP": spec.softcap,
        "WINDOW": spec.sliding_window,
        "EPS": spec.norm_eps,
        "BLOCK_M": tactic.block_m,
        "BLOCK_N": tactic.block_n,
        "BLOCK_T": tactic.block_t,
        "STAGES": tactic.num_stages,
        "HEAD_PARTS": tactic.head_parts,
    }


def launch_tree_attention(
    inputs: LayerInputs, batch: TreeBatch, spec: AttentionSpec, rope: RopeTable, launch: Launch
) -> Float[Tensor, "B N Hq*D"]:
    """The attention of every node; the pool is written in place. One kernel, and a reduce when there are splits."""
    qkv, tactic, splits = inputs.qkv, launch.tactic, launch.num_splits
    num_rows, num_nodes, _ = qkv.shape
    pack = spec.group_size if launch.is_packed else 1
    num_groups = num_rows * spec.num_query_heads // pack
    out = torch.empty(num_rows, num_nodes, spec.num_query_heads * spec.head_dim, dtype=qkv.dtype, device=qkv.device)
    partial_out, stats = out, out
    if splits > 1:
        shape = (num_groups, splits, num_nodes * pack)
        partial_out = torch.empty(*shape, spec.head_dim, dtype=torch.float32, device=qkv.device)
        stats = torch.empty(*shape, 2, dtype=torch.float32, device=qkv.device)
    query_norm, key_norm = (rope.cos, rope.cos) if inputs.norms is None else (inputs.norms.query, inputs.norms.key)
    tree_mask = batch.cache_lengths if batch.tree_mask is None else batch.tree_mask
    page_table, row_pages = _page_rows(batch.page_table)
    grid = (triton.cdiv(num_nodes * pack, tactic.block_m), splits, num_groups)
    split: Any = tree_attention_split  # a kernel's call takes launch options beside its own arguments
    split[grid](
        qkv.contiguous(), batch.positions.contiguous(), tree_mask.contiguous(),
        batch.cache_lengths if batch.num_nodes is None else batch.num_nodes,
        batch.cache_lengths, page_table, rope.cos, rope.sin, query_norm, key_norm,
        rope.cos if inputs.kv_scales is None else inputs.kv_scales, inputs.pool,
        inputs.layer, num_nodes, tree_mask.shape[-1], row_pages, splits, batch.node_offset,
        partial_out, stats,
        **kernel_constants(spec, tactic, inputs.page_size),
        KV_DTYPE=TRITON_DTYPES[inputs.kv_dtype],
        HAS_NORMS=inputs.norms is not None, IS_RAGGED=batch.num_nodes is not None, IS_CHAIN=batch.is_chain,
        HAS_OFFSET=batch.node_offset > 0, IS_SINGLE=splits == 1,
        IS_FUSED=launch.is_fused, IS_PACKED=launch.is_packed,
        num_warps=tactic.num_warps, num_stages=1, maxnreg=tactic.max_registers,
    )  # fmt: skip
    if splits > 1:
        reduce: Any = tree_attention_reduce
        reduce[(num_nodes * pack, num_groups)](
            partial_out, stats, qkv, num_nodes, splits, out,
            HQ=spec.num_query_heads, HKV=spec.num_kv_heads, D=spec.head_dim,
            DP=triton.next_power_of_2(spec.head_dim), PACK=pack, BLOCK_S=triton.next_power_of_2(splits), num_warps=2,
        )  # fmt: skip
    return out


def _page_rows(page_table: Tensor) -> tuple[Tensor, int]:
    """The table and the step between its rows: the first columns of a wider table are used in place, not copied."""
    num_rows, width = page_table.shape
    if page_table.stride(1) == 1 and (num_rows == 1 or page_table.stride(0) >= width):
        return page_table, max(width, page_table.stride(0))
    return page_table.contiguous(), width

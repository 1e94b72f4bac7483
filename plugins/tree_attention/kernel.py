"""The fused tree-attention kernel: rotate by position, store the tree's K/V in its pages, attend prefix and tree.

One program computes BLOCK_M query rows of one (sequence, KV head) over one split of the prefix. The rows are nodes x
query heads of the group, so a group reads its K/V once. Only the last split attends the tree; its first program
stores the tree's K/V. Argument order is inputs, int32 scalars, outputs: TensorRT launches it so.

b sequence, h KV head, m query row (node * group + query head of the group), n key row, d head_dim (padded to DP).
"""

# Device code is Triton's language, whose constants and branches Python's types do not describe.
# pyright: reportAssignmentType=false, reportArgumentType=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from furcate.plugins.tree_attention.nodes import attend_new_nodes
from furcate.plugins.tree_attention.pages import attend_earlier_nodes, attend_prefix
from furcate.plugins.tree_attention.rows import pool_base, rotated_rows
from furcate.plugins.tree_attention.softmax import LOG2E, LOWEST


@triton.jit(do_not_specialize=["layer", "num_nodes", "num_words", "num_pages", "num_splits", "node_offset"])
def tree_attention_split(
    qkv_ptr, positions_ptr, tree_mask_ptr, num_valid_ptr, cache_lengths_ptr, page_table_ptr,
    rope_cos_ptr, rope_sin_ptr, query_norm_ptr, key_norm_ptr, kv_scales_ptr, kv_pool_ptr,
    layer, num_nodes, num_words, num_pages, num_splits, node_offset,
    partial_out_ptr, partial_stats_ptr,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr,
    KV_DTYPE: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, EPS: tl.constexpr,
    HAS_NORMS: tl.constexpr, IS_RAGGED: tl.constexpr, IS_CHAIN: tl.constexpr, HAS_OFFSET: tl.constexpr,
    IS_SINGLE: tl.constexpr, IS_FUSED: tl.constexpr, IS_PACKED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, STAGES: tl.constexpr,
    HEAD_PARTS: tl.constexpr,
):  # fmt: skip
    """Grid (M blocks, splits, B * KV heads); with IS_SINGLE `out` is [B, N, Hq*D], else partials and their stats.

    IS_FUSED and IS_PACKED are off only in ablations: q and k come rotated and nothing is stored; one query head a row
    block.
    """
    GROUP: tl.constexpr = HQ // HKV
    PACK: tl.constexpr = GROUP if IS_PACKED else 1
    QKV_WIDTH: tl.constexpr = (HQ + 2 * HKV) * D
    IS_FP8: tl.constexpr = tl.float8e4nv == KV_DTYPE
    DTYPE: tl.constexpr = qkv_ptr.dtype.element_ty
    PRECISION: tl.constexpr = "tf32x3" if tl.float32 == DTYPE else "tf32"
    m_block, split = tl.program_id(0), tl.program_id(1)
    b, head = tl.program_id(2) // (HQ // PACK), tl.program_id(2) % (HQ // PACK)
    h = head * PACK // GROUP
    cache_length = tl.load(cache_lengths_ptr + b)
    num_valid = num_nodes
    if IS_RAGGED:
        num_valid = tl.minimum(tl.load(num_valid_ptr + b), num_nodes)
    pool = pool_base(kv_pool_ptr, layer, KV_DTYPE) + h * D
    table = page_table_ptr + b * num_pages
    qk_scale = LOG2E * SCALE if SOFTCAP is None else 2.0 * LOG2E * SCALE / SOFTCAP
    k_scale, v_scale = 1.0, 1.0
    if IS_FP8:
        k_scale, v_scale = tl.load(kv_scales_ptr), tl.load(kv_scales_ptr + 1)
        qk_scale = qk_scale * k_scale

    d = tl.arange(0, DP)
    row = m_block * BLOCK_M + tl.arange(0, BLOCK_M)
    node = row // PACK
    is_row = node < num_valid
    q_rows = qkv_ptr + (b * num_nodes + node) * QKV_WIDTH + (head * PACK + row % PACK) * D
    position = tl.load(positions_ptr + b * num_nodes + node, mask=is_row, other=0)
    q = rotated_rows(
        q_rows, position, is_row, rope_cos_ptr, rope_sin_ptr, query_norm_ptr, D, DP, EPS, HAS_NORMS, IS_FUSED
    ).to(DTYPE)

    m, total, acc = attend_prefix(
        q, position, pool, table, cache_length, qk_scale, split, num_splits,
        D, DP, PAGE, HKV * D, BLOCK_M, BLOCK_N, STAGES, SOFTCAP, WINDOW, PRECISION, HEAD_PARTS,
    )  # fmt: skip
    if split == num_splits - 1:
        mask_rows = tree_mask_ptr + (b * num_nodes + node) * num_words
        last = node_offset + node
        if HAS_OFFSET:
            m, total, acc = attend_earlier_nodes(
                q, position, pool, table, cache_length, qk_scale, m, total, acc,
                mask_rows, is_row, last, node_offset, num_words, num_pages,
                D, DP, PAGE, HKV * D, BLOCK_T, SOFTCAP, WINDOW, PRECISION, HEAD_PARTS, IS_CHAIN,
            )  # fmt: skip
        end = num_valid
        if IS_CHAIN:
            end = tl.minimum(num_valid, ((m_block + 1) * BLOCK_M - 1) // PACK + 1)
        # The last block of rows sees every column, in a chain too.
        is_storing = (m_block == tl.num_programs(0) - 1) & (head * PACK % GROUP == 0) & IS_FUSED
        m, total, acc = attend_new_nodes(
            q, position, pool, table, cache_length, qk_scale, m, total, acc,
            mask_rows, is_row, last, node_offset, num_words, num_pages,
            qkv_ptr + b * num_nodes * QKV_WIDTH + (HQ + h) * D, positions_ptr + b * num_nodes, num_valid, end,
            is_storing, rope_cos_ptr, rope_sin_ptr, key_norm_ptr, k_scale, v_scale,
            HQ, HKV, D, DP, PAGE, KV_DTYPE, EPS, BLOCK_T, SOFTCAP, WINDOW, PRECISION,
            HEAD_PARTS, IS_CHAIN, HAS_NORMS, IS_FUSED,
        )  # fmt: skip

    if IS_FP8:
        acc = acc * v_scale
    is_out = (node < num_nodes)[:, None] & (d < D)[None, :]
    if IS_SINGLE:
        result = tl.where(is_row[:, None], acc / tl.where(total > 0, total, 1.0)[:, None], 0.0)
        out_rows = partial_out_ptr + ((b * num_nodes + node) * HQ + head * PACK + row % PACK) * D
        tl.store(out_rows[:, None] + d[None, :], result.to(partial_out_ptr.dtype.element_ty), mask=is_out)
    else:
        rows = (tl.program_id(2) * num_splits + split).to(tl.int64) * (num_nodes * PACK) + row
        tl.store(partial_out_ptr + rows[:, None] * D + d[None, :], tl.where(is_row[:, None], acc, 0.0), mask=is_out)
        tl.store(partial_stats_ptr + rows * 2, tl.where(is_row, m, LOWEST), mask=node < num_nodes)
        tl.store(partial_stats_ptr + rows * 2 + 1, tl.where(is_row, total, 0.0), mask=node < num_nodes)


@triton.jit(do_not_specialize=["num_nodes", "num_splits"])
def tree_attention_reduce(
    partial_out_ptr, partial_stats_ptr, qkv_ptr,
    num_nodes, num_splits,
    out_ptr,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PACK: tl.constexpr,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Grid (N * PACK rows, B * heads): the splits' partial results weighed together; `qkv` only names the dtype."""
    row, z = tl.program_id(0), tl.program_id(1)
    b, head = z // (HQ // PACK), z % (HQ // PACK)
    split, d = tl.arange(0, BLOCK_S), tl.arange(0, DP)
    is_split = split < num_splits
    rows = (z * num_splits + split).to(tl.int64) * (num_nodes * PACK) + row
    m = tl.load(partial_stats_ptr + rows * 2, mask=is_split, other=LOWEST)
    sums = tl.load(partial_stats_ptr + rows * 2 + 1, mask=is_split, other=0.0)
    weight = tl.exp2(m - tl.max(m, 0))
    total = tl.sum(weight * sums, 0)
    mask = is_split[:, None] & (d < D)[None, :]
    partial = tl.load(partial_out_ptr + rows[:, None] * D + d[None, :], mask=mask, other=0.0)
    out = tl.sum(partial * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    out_row = out_ptr + ((b * num_nodes + row // PACK) * HQ + head * PACK + row % PACK) * D
    tl.store(out_row + d, out.to(out_ptr.dtype.element_ty), mask=d < D)

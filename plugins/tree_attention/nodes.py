"""Device code of the kernel: the call's own nodes, rotated, stored in the pages and attended from registers.

m query rows, t the nodes as key rows, d head_dim (padded to DP); `pool` points at the KV head's part of the layer.
"""

# Device code is Triton's language, whose constants and branches Python's types do not describe.
# pyright: reportAssignmentType=false, reportArgumentType=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from furcate.plugins.tree_attention.ancestors import tree_attended
from furcate.plugins.tree_attention.rows import rotated_rows, row_pointers, widened
from furcate.plugins.tree_attention.softmax import attend_block


@triton.jit
def attend_new_nodes(
    q, position, pool, table, cache_length, qk_scale, m, total, acc,
    mask_rows, is_row, last, node_offset, num_words, num_pages,
    key_rows, positions, num_valid, end, is_storing, rope_cos_ptr, rope_sin_ptr, key_norm_ptr, k_scale, v_scale,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr,
    KV_DTYPE: tl.constexpr, EPS: tl.constexpr, BLOCK_T: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
    PRECISION: tl.constexpr, HEAD_PARTS: tl.constexpr, IS_CHAIN: tl.constexpr, HAS_NORMS: tl.constexpr,
    IS_FUSED: tl.constexpr,
):  # fmt: skip
    """(m, total, acc) after nodes 0 .. end - 1; `key_rows` and `positions` are those of the sequence's node 0."""
    QKV_WIDTH: tl.constexpr = (HQ + 2 * HKV) * D
    d, t = tl.arange(0, DP), tl.arange(0, BLOCK_T)
    for start in tl.range(0, end, BLOCK_T, num_stages=1):
        new = start + t
        is_new = new < num_valid
        new_rows = key_rows + new * QKV_WIDTH
        position_t = tl.load(positions + new, mask=is_new, other=0)
        k = rotated_rows(
            new_rows, position_t, is_new, rope_cos_ptr, rope_sin_ptr, key_norm_ptr, D, DP, EPS, HAS_NORMS, IS_FUSED
        )
        v = tl.load(new_rows[:, None] + HKV * D + d[None, :], mask=is_new[:, None] & (d < D)[None, :], other=0.0)
        if tl.float8e4nv == KV_DTYPE:
            # Attended as stored: a tree grown level by level gives what the whole tree gives.
            k = tl.clamp(k / k_scale, -448.0, 448.0)
            v = tl.clamp(v.to(tl.float32) / v_scale, -448.0, 448.0)
        k, v = k.to(KV_DTYPE), v.to(KV_DTYPE)
        if is_storing:
            slot = cache_length + node_offset + new
            page_t = tl.load(table + slot // PAGE, mask=is_new & (slot // PAGE < num_pages), other=-1)
            keys, values = row_pointers(pool, page_t, slot % PAGE, DP, PAGE, HKV * D)
            tl.store(keys, k, mask=(page_t >= 0)[:, None] & (d < D)[None, :])
            tl.store(values, v, mask=(page_t >= 0)[:, None] & (d < D)[None, :])
        is_attended = tree_attended(
            mask_rows, is_row, last, position, cache_length, node_offset + start, node_offset + num_valid, num_words,
            node_offset + new, IS_CHAIN, WINDOW,
        )  # fmt: skip
        m, total, acc = attend_block(
            q, widened(k, q.dtype), widened(v, q.dtype), is_attended, m, total, acc, qk_scale,
            SOFTCAP, PRECISION, HEAD_PARTS,
        )  # fmt: skip
    return m, total, acc

"""Device code of the kernel: attention over what lies in the pages, the prefix and nodes of earlier calls.

m query rows, n and t key rows, d head_dim (padded to DP); `pool` points at the KV head's part of the layer.
"""

# Device code is Triton's language, whose constants and branches Python's types do not describe.
# pyright: reportAssignmentType=false, reportArgumentType=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from furcate.plugins.tree_attention.ancestors import tree_attended
from furcate.plugins.tree_attention.rows import row_pointers, widened
from furcate.plugins.tree_attention.softmax import LOWEST, attend_block


@triton.jit
def attend_prefix(
    q, position, pool, table, cache_length, qk_scale, split, num_splits,
    D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, ROW_WIDTH: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
    HEAD_PARTS: tl.constexpr,
):  # fmt: skip
    """(m, total, acc) of the split's share of the prefix: greatest scores, sums of weights, weighted values."""
    d = tl.arange(0, DP)
    m = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DP], tl.float32)

    # The prefix: blocks start at multiples of BLOCK_N, so a block lies on one page where pages are at least as long.
    first = 0
    if WINDOW is not None:
        first = tl.maximum(cache_length + 1 - WINDOW, 0) // BLOCK_N * BLOCK_N
    per_split = tl.cdiv(tl.cdiv(cache_length - first, BLOCK_N), num_splits) * BLOCK_N
    low = first + split * per_split
    high = tl.minimum(low + per_split, cache_length)
    whole = high // BLOCK_N * BLOCK_N
    n = tl.arange(0, BLOCK_N)
    if PAGE >= BLOCK_N:
        page = tl.load(table + low // PAGE, mask=low < high, other=0)
    else:
        page = tl.load(table + (low + n) // PAGE, mask=low + n < high, other=0)
    for start in tl.range(low, whole, BLOCK_N, num_stages=STAGES):
        # The next block's page id is fetched one block ahead, so that its K/V copy need not wait for it.
        if PAGE >= BLOCK_N:
            next_page = tl.load(table + (start + BLOCK_N) // PAGE, mask=start + BLOCK_N < high, other=0)
            keys, values = row_pointers(pool, page, start % PAGE + n, DP, PAGE, ROW_WIDTH)
        else:
            following = start + BLOCK_N + n
            next_page = tl.load(table + following // PAGE, mask=following < high, other=0)
            keys, values = row_pointers(pool, page, n % PAGE, DP, PAGE, ROW_WIDTH)
        if D == DP:
            k, v = tl.load(keys), tl.load(values)
        else:
            k = tl.load(keys, mask=(d < D)[None, :], other=0.0)
            v = tl.load(values, mask=(d < D)[None, :], other=0.0)
        is_attended = None
        if WINDOW is not None:
            is_attended = position[:, None] - (start + n)[None, :] < WINDOW
        m, total, acc = attend_block(
            q, widened(k, q.dtype), widened(v, q.dtype), is_attended, m, total, acc, qk_scale,
            SOFTCAP, PRECISION, HEAD_PARTS,
        )  # fmt: skip
        page = next_page
    if whole < high and low < high:
        # The prefix's last, partial block: rows behind the cache's end are not read, whatever they hold.
        slot = whole + n
        keys, values = row_pointers(pool, page, slot % PAGE, DP, PAGE, ROW_WIDTH)
        k = tl.load(keys, mask=(slot < high)[:, None] & (d < D)[None, :], other=0.0)
        v = tl.load(values, mask=(slot < high)[:, None] & (d < D)[None, :], other=0.0)
        is_attended = (slot < high)[None, :]
        if WINDOW is not None:
            is_attended = is_attended & (position[:, None] - slot[None, :] < WINDOW)
        m, total, acc = attend_block(
            q, widened(k, q.dtype), widened(v, q.dtype), is_attended, m, total, acc, qk_scale,
            SOFTCAP, PRECISION, HEAD_PARTS,
        )  # fmt: skip
    return m, total, acc


@triton.jit
def attend_earlier_nodes(
    q, position, pool, table, cache_length, qk_scale, m, total, acc,
    mask_rows, is_row, last, node_offset, num_words, num_pages,
    D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, ROW_WIDTH: tl.constexpr, BLOCK_T: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr, HEAD_PARTS: tl.constexpr,
    IS_CHAIN: tl.constexpr,
):  # fmt: skip
    """(m, total, acc) after the tree nodes that earlier calls stored behind the cache's end, under their mask bits."""
    d, t = tl.arange(0, DP), tl.arange(0, BLOCK_T)
    for start in tl.range(0, node_offset, BLOCK_T, num_stages=1):
        column = start + t
        slot = cache_length + column
        is_earlier = column < node_offset
        page_t = tl.load(table + slot // PAGE, mask=is_earlier & (slot // PAGE < num_pages), other=-1)
        is_attended = tree_attended(
            mask_rows, is_row, last, position, cache_length, start, node_offset, num_words, column,
            IS_CHAIN, WINDOW,
        )  # fmt: skip
        # A column that no row attends may never have been stored.
        is_stored = (tl.max(is_attended.to(tl.int32), 0) > 0) & (page_t >= 0)
        keys, values = row_pointers(pool, page_t, slot % PAGE, DP, PAGE, ROW_WIDTH)
        k = tl.load(keys, mask=is_stored[:, None] & (d < D)[None, :], other=0.0)
        v = tl.load(values, mask=is_stored[:, None] & (d < D)[None, :], other=0.0)
        m, total, acc = attend_block(
            q, widened(k, q.dtype), widened(v, q.dtype), is_attended, m, total, acc, qk_scale,
            SOFTCAP, PRECISION, HEAD_PARTS,
        )  # fmt: skip
    return m, total, acc

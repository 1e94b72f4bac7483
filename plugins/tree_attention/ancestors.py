"""Device code of the kernel: which tree columns a row attends, from its ancestor words."""

import triton
import triton.language as tl


@triton.jit
def popcount(x):
    x = x.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def tree_bits(mask_rows, is_row, first, num_words):
    """int32 [rows]: the 32 ancestor bits of every row that start at column `first`."""
    word, shift = first // 32, first % 32
    low = tl.load(mask_rows + word, mask=is_row, other=0).to(tl.uint32, bitcast=True) >> shift
    next_word = tl.load(mask_rows + word + 1, mask=is_row & (shift > 0) & (word + 1 < num_words), other=0)
    high = tl.where(shift > 0, next_word.to(tl.uint32, bitcast=True) << ((32 - shift) % 32), 0)
    return (low | high).to(tl.int32, bitcast=True)


@triton.jit
def tree_attended(
    mask_rows, is_row, last, position, cache_length, first, num_columns, num_words, column,
    IS_CHAIN: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """bool [rows, columns]: which tree columns first + 0.. every row attends. `last` is the row's own column."""
    if IS_CHAIN:
        is_attended = column[None, :] <= last[:, None]
        depth = column[None, :]
    else:
        bits = tree_bits(mask_rows, is_row, first, num_words)
        offset = column - first
        is_attended = ((bits[:, None] >> offset[None, :]) & 1) != 0
        if WINDOW is not None:
            # The depth of an ancestor is its rank on the row's own path.
            before = tl.zeros_like(last)
            for word in tl.range(0, first // 32, num_stages=1):
                before += popcount(tl.load(mask_rows + word, mask=is_row, other=0))
            if first % 32 > 0:
                partial = tl.load(mask_rows + first // 32, mask=is_row, other=0)
                before += popcount(partial & ((1 << (first % 32)) - 1))
            lower = (1 << offset) - 1
            depth = before[:, None] + popcount(bits[:, None] & lower[None, :])
    if WINDOW is not None:
        is_attended &= position[:, None] - (cache_length + depth) < WINDOW
    return is_attended & (column < num_columns)[None, :]

"""The commit kernel: K/V of every accepted path moved into place, for all layers in one launch.

One program moves all rows of a slice of columns of one (layer, key or value, sequence). It reads them all, waits for
its threads, then writes: sources and destinations may overlap. A path entries (padded to BLOCK_A), P pages.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_pages", "num_entries"])
def cache_commit(
    page_table_ptr, cache_lengths_ptr, path_nodes_ptr, num_accepted_ptr, kv_pool_ptr,
    num_pages, num_entries,
    committed_lengths_ptr,
    ROW_WIDTH: tl.constexpr, PAGE: tl.constexpr, KV_DTYPE: tl.constexpr,
    LAYER_ELEMENTS: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Grid (column slices, 2 * layers, B). `kv_pool` holds one int64 address per layer, or with LAYER_ELEMENTS is the
    pool itself, seen as integers of the elements' size.
    """
    layer, half, b = tl.program_id(1) // 2, tl.program_id(1) % 2, tl.program_id(2)
    if LAYER_ELEMENTS is None:
        pool = tl.multiple_of(tl.load(kv_pool_ptr + layer).to(tl.pointer_type(KV_DTYPE)), 16)
    else:
        pool = kv_pool_ptr + layer.to(tl.int64) * LAYER_ELEMENTS
    cache_length, num_accepted = tl.load(cache_lengths_ptr + b), tl.load(num_accepted_ptr + b)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(committed_lengths_ptr + b, cache_length + num_accepted)
    entry = tl.arange(0, BLOCK_A)
    is_entry = (entry < num_entries) & (entry < num_accepted)
    node = tl.load(path_nodes_ptr + b * num_entries + entry, mask=is_entry, other=0)
    # What lies in place is left alone: an idle row may name another sequence's page.
    is_moved = is_entry & (node != entry)
    source, target = cache_length + node, cache_length + entry
    table = page_table_ptr + b * num_pages
    source_page = tl.load(table + source // PAGE, mask=is_moved & (source // PAGE < num_pages), other=-1)
    target_page = tl.load(table + target // PAGE, mask=is_moved & (target // PAGE < num_pages), other=-1)
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_moved &= (source_page >= 0) & (target_page >= 0)
    mask = is_moved[:, None] & (column < ROW_WIDTH)[None, :]
    from_rows = ((source_page.to(tl.int64) * 2 + half) * PAGE + source % PAGE) * ROW_WIDTH
    to_rows = ((target_page.to(tl.int64) * 2 + half) * PAGE + target % PAGE) * ROW_WIDTH
    moved = tl.load(pool + from_rows[:, None] + column[None, :], mask=mask)
    tl.debug_barrier()
    tl.store(pool + to_rows[:, None] + column[None, :], moved, mask=mask)

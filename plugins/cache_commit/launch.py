"""Launching the commit kernel on torch tensors; nothing waits for the device.

B batch, A path entries, P pages of a sequence, L layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from furcate.plugins.cache_commit.kernel import cache_commit

if TYPE_CHECKING:
    from jaxtyping import Int32, Int64, Shaped
    from torch import Tensor

BITS = {1: (tl.int8, torch.int8), 2: (tl.int16, torch.int16), 4: (tl.int32, torch.int32)}
"""Elements are moved as bits: their type does not matter, their size does."""
ELEMENTS_PER_PROGRAM = 4096
NUM_WARPS = 4


def commit_constants(row_width: int, page_size: int, num_entries: int, element_bytes: int) -> dict:
    """The compile-time constants for rows of `row_width` = Hkv * D elements; launch and ahead-of-time share them."""
    block_a = triton.next_power_of_2(num_entries)
    return {
        "ROW_WIDTH": row_width,
        "PAGE": page_size,
        "KV_DTYPE": BITS[element_bytes][0],
        "LAYER_ELEMENTS": None,
        "BLOCK_A": block_a,
        "BLOCK_C": min(triton.next_power_of_2(row_width), max(ELEMENTS_PER_PROGRAM // block_a, 16)),
    }


def layer_addresses(pool: Shaped[Tensor, "layers pages 2 page_size Hkv D"]) -> Int64[Tensor, " layers"]:
    """Device address of every layer's pages; made once per pool."""
    step = pool.stride(0) * pool.element_size()
    addresses = [pool.data_ptr() + layer * step for layer in range(pool.shape[0])]
    return torch.tensor(addresses, dtype=torch.int64, device=pool.device)


def launch_cache_commit(
    pool: Shaped[Tensor, "layers pages 2 page_size Hkv D"],
    page_table: Int32[Tensor, "B P"],
    cache_lengths: Int32[Tensor, " B"],
    path: tuple[Int32[Tensor, "B A"], Int32[Tensor, " B"]],
    addresses: Int64[Tensor, " layers"] | None = None,
) -> Int32[Tensor, " B"]:
    """The committed lengths; `path` is (path_nodes, num_accepted).

    With `addresses` = layer_addresses(pool) the kernel reaches the pool as it does in a TensorRT engine.
    """
    path_nodes, num_accepted = path
    committed_lengths = torch.empty_like(cache_lengths)
    num_rows, num_entries = path_nodes.shape
    constants = commit_constants(pool.shape[4] * pool.shape[5], pool.shape[3], num_entries, pool.element_size())
    target = addresses
    if target is None:
        target = pool.view(BITS[pool.element_size()][1])
        constants["LAYER_ELEMENTS"] = pool.stride(0)
    grid = (triton.cdiv(constants["ROW_WIDTH"], constants["BLOCK_C"]), 2 * pool.shape[0], num_rows)
    kernel: Any = cache_commit  # its call takes launch options beside its own arguments
    kernel[grid](
        page_table, cache_lengths, path_nodes, num_accepted, target,
        page_table.shape[1], num_entries, committed_lengths, **constants, num_warps=NUM_WARPS,
    )  # fmt: skip
    return committed_lengths

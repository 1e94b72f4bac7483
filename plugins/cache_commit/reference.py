"""The commit of accepted paths, defined: one row and one layer at a time, into a copy.

B batch, A path entries, P pages of a sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxtyping import Int32, Shaped
    from torch import Tensor


def reference_commit(
    pool: Shaped[Tensor, "layers pages 2 page_size Hkv D"],
    page_table: Int32[Tensor, "B P"],
    cache_lengths: Int32[Tensor, " B"],
    path_nodes: Int32[Tensor, "B A"],
    num_accepted: Int32[Tensor, " B"],
) -> Shaped[Tensor, "layers pages 2 page_size Hkv D"]:
    """A copy of the pool in which slot cache_length + i holds what slot cache_length + path_nodes[i] held before."""
    committed = pool.clone()
    page_size = pool.shape[3]
    for b in range(path_nodes.shape[0]):
        for i in range(int(num_accepted[b])):
            source = int(cache_lengths[b]) + int(path_nodes[b, i])
            target = int(cache_lengths[b]) + i
            source_page = int(page_table[b, source // page_size])
            target_page = int(page_table[b, target // page_size])
            committed[:, target_page, :, target % page_size] = pool[:, source_page, :, source % page_size]
    return committed

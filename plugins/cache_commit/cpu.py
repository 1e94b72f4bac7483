"""The commit of accepted paths on the CPU: one gather and one write for all layers.

B batch, A path entries, P pages of a sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from jaxtyping import Int32, Shaped
    from torch import Tensor


def commit_paths(
    pool: Shaped[Tensor, "layers pages 2 page_size Hkv D"],
    page_table: Int32[Tensor, "B P"],
    cache_lengths: Int32[Tensor, " B"],
    path_nodes: Int32[Tensor, "B A"],
    num_accepted: Int32[Tensor, " B"],
) -> None:
    """Nothing; in every layer slot cache_length + i becomes what slot cache_length + path_nodes[i] held.

    `path_nodes` ascends and starts with the root (node 0); entries at or behind num_accepted[b] are not read.
    All rows are gathered before any is written, so sources and destinations may overlap.
    """
    page_size = pool.shape[3]
    step = torch.arange(path_nodes.shape[1])
    nodes = path_nodes.long()
    # Dropping what does not move, instead of writing it onto itself, keeps an idle row whose page_table points at
    # another sequence's page from racing with that sequence's own move.
    b, i = ((step < num_accepted[:, None]) & (nodes != step)).nonzero(as_tuple=True)
    if b.numel() == 0:
        return
    first = cache_lengths.long()[b]
    source, target = (_key_rows(page_table, b, first + offset, page_size) for offset in (nodes[b, i], i))
    rows = pool.view(pool.shape[0], -1, pool.shape[4] * pool.shape[5])
    moved = rows.index_select(1, torch.cat([source, source + page_size]))
    rows.index_copy_(1, torch.cat([target, target + page_size]), moved)


def _key_rows(page_table: torch.Tensor, b: torch.Tensor, slots: torch.Tensor, page_size: int) -> torch.Tensor:
    """Rows of a layer seen as [pages * 2 * page_size, .] that hold the keys of row b's slots."""
    return page_table[b, slots // page_size].long() * (2 * page_size) + slots % page_size

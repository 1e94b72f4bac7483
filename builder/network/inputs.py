"""The tensors one pass reads: the engine's I/O table as a dataclass.

Axes: B batch, N nodes, T tree columns (node_offset + N), W mask words ceil(T / 32), P pages, F feature width, V vocabulary.
`Array` is whatever the ops object computes with: `torch.Tensor`, or TensorRT's `ITensor` while a network is emitted.
"""

from dataclasses import dataclass
from typing import Any

Array = Any


@dataclass(frozen=True, kw_only=True)
class PassInputs:
    """What every pass of target or head reads.

    token_ids [B,N] int32       node tokens, root first
    positions [B,N] int32       rotary position of each node
    tree_mask [B,N,W] int32     ancestor words, LSB first; None for a chain (causal within the nodes)
    cache_lengths [B] int32     committed tokens; node j is written to cache slot cache_length + node_offset + j
    page_table [B,P] int32      the sequence's pages
    num_nodes [B] int32         rows from here on are padding; None when no row is
    node_offset                 nodes of the same tree already in the cache behind the committed tokens
    """

    token_ids: Array
    positions: Array
    tree_mask: Array | None
    cache_lengths: Array
    page_table: Array
    num_nodes: Array | None = None
    node_offset: int = 0


@dataclass(frozen=True, kw_only=True)
class TargetOutputs:
    """logits [B,R,V] for the rows asked for (all N by default); features [B,N,F], what the head reads (None without head)."""

    logits: Array
    features: Array | None

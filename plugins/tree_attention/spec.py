"""What one tree-attention call is given, as data shared by the reference, the CPU path and the kernel.

B batch, N nodes (new rows), W mask words, P pages of a sequence, H heads (q query, kv key/value), D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from furcate.builder.errors import ConfigError

if TYPE_CHECKING:
    from jaxtyping import Float32, Int32
    from torch import Tensor

PAGE_SIZES = (16, 32, 64, 128)
HEAD_DIMS = (64, 80, 96, 128, 256)


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """The sizes and constants of one attention layer. `scale` None means head_dim ** -0.5; lengths are in tokens."""

    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float | None = None
    softcap: float | None = None
    """Scores become softcap * tanh(score / softcap) before masking (Gemma 2)."""
    sliding_window: int | None = None
    """A node attends keys less than this many positions behind it, itself included."""
    norm_eps: float = 1e-6
    """Epsilon of the per-head RMS norm of q and k; used only when norm weights are given."""

    def __post_init__(self) -> None:
        if self.num_query_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.num_query_heads} query heads cannot share {self.num_kv_heads} KV heads: "
                "the first must be a multiple of the second."
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ConfigError(f"sliding_window is {self.sliding_window}; give at least 1 token, or None for no window.")

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_query_heads // self.num_kv_heads

    @property
    def score_scale(self) -> float:
        """The factor on q.k."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def qkv_width(self) -> int:
        """Columns of the fused projection: (Hq + 2 Hkv) D."""
        return (self.num_query_heads + 2 * self.num_kv_heads) * self.head_dim


@dataclass(frozen=True, kw_only=True)
class TreeBatch:
    """The trees of one pass and where their sequences live; the same for every layer.

    Node j of row b is stored in slot `cache_lengths[b] + node_offset + j`; slot s of a sequence lies on page
    `page_table[b, s // page_size]`, row `s % page_size`. Mask columns 0 .. node_offset - 1 are nodes of the same tree
    that earlier calls stored. Rows j >= num_nodes[b] are padding: not stored, output zero.
    """

    positions: Int32[Tensor, "B N"]
    """Cache length + depth: the row of the cos/sin table."""
    tree_mask: Int32[Tensor, "B N W"] | None
    """Ancestor words, LSB first: bit c of row i is set when column c is node i or its ancestor. None with is_chain."""
    cache_lengths: Int32[Tensor, " B"]
    page_table: Int32[Tensor, "B P"]
    node_offset: int = 0
    num_nodes: Int32[Tensor, " B"] | None = None
    is_chain: bool = False
    """Nodes follow each other (a prompt chunk): causal, and the mask is not read."""

    def __post_init__(self) -> None:
        if self.tree_mask is None and not self.is_chain:
            raise ConfigError("tree_mask is None; give the ancestor words, or is_chain=True for a prompt chunk.")
        if self.tree_mask is not None and not self.is_chain:
            columns = self.node_offset + self.positions.shape[1]
            if self.tree_mask.shape[-1] * 32 < columns:
                raise ConfigError(
                    f"tree_mask has {self.tree_mask.shape[-1]} words a row for {columns} columns; "
                    f"give ceil({columns} / 32) words."
                )


@dataclass(frozen=True)
class RopeTable:
    """cos and sin by position, half-split form; the attention factor of yarn and longrope is multiplied in."""

    cos: Float32[Tensor, "positions D/2"]
    sin: Float32[Tensor, "positions D/2"]


@dataclass(frozen=True)
class HeadNorms:
    """Per-head RMS norm weights of q and k, multiplied as they are (Gemma's 1 + w is added by the caller)."""

    query: Float32[Tensor, " D"]
    key: Float32[Tensor, " D"]

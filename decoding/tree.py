"""The tree of candidate tokens that one step verifies.

B batch rows, N nodes (fixed for all rows; a row may use fewer), D depth of the deepest node (the root has depth 0),
W = ceil(N / 32) mask words, T trials (proposals of a node), L draft laws, V vocabulary. Node 0 is the root; ancestors
always precede descendants, and a node's children are tried in the order of their indices. All functions keep fixed shapes
and read nothing back to the host.
"""

from dataclasses import dataclass, replace
from enum import Enum

import torch
from jaxtyping import Bool, Float, Int32, Int64
from torch import Tensor

WORD_BITS = 32


class DraftKind(Enum):
    """How the children of one node were come by. An acceptance rule is exact for some kinds only."""

    DETERMINISTIC = "deterministic"
    """Picked by a fixed rule from what the drafter knows, such as the most probable tokens."""
    WITH_REPLACEMENT = "with replacement"
    """Drawn independently, repeats included."""
    WITHOUT_REPLACEMENT = "without replacement"
    """Drawn one after another, each from the law with the earlier ones struck out."""
    MIXED = "mixed"
    """Deterministic, but for at most one child drawn from the law with the deterministic ones struck out."""


@dataclass(frozen=True, kw_only=True)
class DraftLaws:
    """What the drafted tokens were drawn from.

    kind      how
    probs     L distributions over the vocabulary, the draft's temperature already applied. Without replacement this is the
              law of the first draw; in mixed trees it is the drawn child's, the deterministic ones already struck out
    law_ids   probs[b, law_ids[b, t]] is the distribution that proposed trial t
    is_drawn  true when node n was drawn at random. Whether a drawn node is in the tree must be decided before its token is
              known, or by the order of drawing; deterministic nodes may be pruned freely
    trial_nodes  the node that trial t proposes, in the order of drawing; trial 0 is the root and proposes nothing, and 0
              marks padding too. None: trial t is node t. Trees merged from several drafters have more trials than nodes,
              because a token that several drew is one node
    """

    kind: DraftKind
    probs: Float[Tensor, "B L V"]
    law_ids: Int64[Tensor, "B T"]
    is_drawn: Bool[Tensor, "B N"]
    trial_nodes: Int64[Tensor, "B T"] | None = None


@dataclass(frozen=True, kw_only=True)
class Tree:
    """B trees of N nodes each.

    token_ids      the candidates; column 0 is the newest committed token
    parents        parents[b, n] < n is the node above n; 0 for the root and for padding
    depths         edges between n and the root; 0 for padding
    ancestor_mask  mask[b, i, j] is true when j is i or its ancestor; false in every row and column of padding
    num_nodes      nodes in use, root included; nodes from there on are padding
    max_depth      no node of any row is deeper (a bound known without reading tensors)
    max_trials     most children offered on one way down, all children of the nodes passed included (also a bound)
    num_parents    nodes from there on have no children in any row (also a bound)
    draft_laws     None for a tree whose every token was picked deterministically

    With parents [0, 0, 0, 1]: nodes 1 and 2 are the root's children, node 3 is node 1's; depths are [0, 1, 1, 2] and
    row 3 of the mask is [1, 1, 0, 1].
    """

    token_ids: Int64[Tensor, "B N"]
    parents: Int64[Tensor, "B N"]
    depths: Int64[Tensor, "B N"]
    ancestor_mask: Bool[Tensor, "B N N"]
    num_nodes: Int64[Tensor, " B"]
    max_depth: int
    max_trials: int
    num_parents: int
    draft_laws: DraftLaws | None = None

    @property
    def is_node(self) -> Bool[Tensor, "B N"]:
        """True for nodes in use, false for padding."""
        return torch.arange(self.token_ids.shape[1], device=self.token_ids.device) < self.num_nodes[:, None]

    @property
    def kind(self) -> DraftKind:
        """How the tree's tokens were come by."""
        return self.draft_laws.kind if self.draft_laws else DraftKind.DETERMINISTIC

    @property
    def is_chain(self) -> bool:
        """True when no node of any row can have two children."""
        return self.max_trials == self.max_depth

    def with_draft_laws(self, draft_laws: DraftLaws) -> "Tree":
        """The same tree, saying what its tokens were drawn from."""
        return replace(self, draft_laws=draft_laws)


def tree_from_parents(
    token_ids: Int64[Tensor, "B N"], parents: Int64[Tensor, "B N"], num_nodes: Int64[Tensor, " B"], max_depth: int
) -> Tree:
    """A Tree with depths and mask computed. Padding may hold any token; its parents must be 0."""
    is_node = torch.arange(parents.shape[1], device=parents.device) < num_nodes[:, None]
    mask = ancestors_from_parents(parents, max_depth) & is_node[:, :, None] & is_node[:, None, :]
    return Tree(
        token_ids=token_ids,
        parents=parents,
        depths=depths_from_mask(mask),
        ancestor_mask=mask,
        num_nodes=num_nodes,
        max_depth=max_depth,
        max_trials=parents.shape[1] - 1,
        num_parents=parents.shape[1],
    )


def ancestors_from_parents(parents: Int64[Tensor, "B N"], max_depth: int) -> Bool[Tensor, "B N N"]:
    """mask[b, i, j], true when j is i or its ancestor; every node has the root above it.

    parents [0, 0, 1] give rows [1,0,0], [1,1,0], [1,1,1]. Nodes deeper than `max_depth` would miss ancestors.
    """
    num_rows, num_nodes = parents.shape
    mask = torch.eye(num_nodes, dtype=torch.bool, device=parents.device).repeat(num_rows, 1, 1)
    above = parents
    for depth in range(max_depth):
        mask.scatter_(2, above[:, :, None], True)
        if depth + 1 < max_depth:
            above = parents.gather(1, above)
    return mask


def depths_from_mask(ancestor_mask: Bool[Tensor, "B N N"]) -> Int64[Tensor, "B N"]:
    """Each node's depth: its ancestors without itself; 0 for padding."""
    return (ancestor_mask.sum(-1) - 1).clamp_(min=0)


def pack_mask(ancestor_mask: Bool[Tensor, "B N N"]) -> Int32[Tensor, "B N W"]:
    """Mask words: bit j % 32 of word j // 32 (least significant first) is mask[b, i, j].

    TensorRT-LLM's `spec_decoding_packed_mask` layout. Row [1, 1, 0, 1] becomes the word 0b1011 = 11.
    """
    num_rows, num_nodes, _ = ancestor_mask.shape
    num_words = -(-num_nodes // WORD_BITS)
    bits = torch.nn.functional.pad(ancestor_mask, (0, num_words * WORD_BITS - num_nodes))
    words = bits.view(num_rows, num_nodes, num_words, WORD_BITS) * _bit_values(ancestor_mask.device)
    return words.sum(-1, dtype=torch.int32)


def unpack_mask(words: Int32[Tensor, "B N W"], num_nodes: int) -> Bool[Tensor, "B N N"]:
    """The mask that `pack_mask` packed."""
    bits = (words[..., None] & _bit_values(words.device)) != 0
    return bits.flatten(2)[:, :, :num_nodes]


def _bit_values(device: torch.device) -> Int32[Tensor, "32"]:
    # The last wraps to the sign bit. Made on the device: a copy from the host cannot be captured in a CUDA graph.
    return torch.ones((), dtype=torch.int32, device=device) << torch.arange(WORD_BITS, dtype=torch.int32, device=device)

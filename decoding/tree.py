"""The tree of candidate tokens that one step verifies.

B batch rows, N nodes (fixed for all rows; a row may use fewer), D depth of the deepest node (the root has depth 0),
W = ceil(N / 32) mask words. Node 0 is the root; ancestors always precede descendants, and a node's children are tried
in the order of their indices. All functions keep fixed shapes and read nothing back to the host.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int32, Int64
from torch import Tensor

WORD_BITS = 32


@dataclass(frozen=True, kw_only=True)
class DraftLaws:
    """What the drafted tokens were drawn from.

    probs     L distributions over the vocabulary, the draft's temperature already applied
    law_ids   probs[b, law_ids[b, n]] is the distribution that proposed node n; root and padding hold any valid index.
              One drafter has one law for all children of a node; merged drafters have one each.
    is_drawn  true when node n's token was drawn at random from its law, false when it was picked (say, as the most
              probable). Whether a drawn node is in the tree must be decided before it is drawn.
    """

    probs: Float[Tensor, "B L V"]
    law_ids: Int64[Tensor, "B N"]
    is_drawn: Bool[Tensor, "B N"]


@dataclass(frozen=True, kw_only=True)
class Tree:
    """B trees of N nodes each.

    token_ids      the candidates; column 0 is the newest committed token
    parents        parents[b, n] < n is the node above n; 0 for the root and for padding
    depths         edges between n and the root; 0 for padding
    ancestor_mask  mask[b, i, j] is true when j is i or its ancestor; false in every row and column of padding
    num_nodes      nodes in use, root included; nodes from there on are padding
    max_depth      no node of any row is deeper (a bound known without reading tensors)
    max_trials     most children offered on one way down, all children of the nodes passed included (same kind of bound)
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
    draft_laws: DraftLaws | None = None

    @property
    def is_node(self) -> Bool[Tensor, "B N"]:
        """True for nodes in use, false for padding."""
        return torch.arange(self.token_ids.shape[1], device=self.token_ids.device) < self.num_nodes[:, None]

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

"""Orders in which nodes and their proposals are visited, and rows of distribution tables.

B batch rows, N nodes, T trials, V vocabulary. Index 0, the root's, stands for "none": the root is nobody's child.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from furcate.decoding.tree import Tree

TINY = 1e-37
"""Keeps a division defined where its dividend is 0 as well; no probability that matters is so small."""


def table_rows(table: Float[Tensor, "B N V"], indices: Int64[Tensor, " B"]) -> Float[Tensor, "B V"]:
    """table[b, indices[b]] for every row."""
    num_rows, num_entries, _ = table.shape
    offsets = torch.arange(num_rows, device=table.device) * num_entries
    return table.flatten(0, 1).index_select(0, indices + offsets)


def entries(values: Float[Tensor, "B V"], indices: Int64[Tensor, " B"]) -> Float[Tensor, " B"]:
    """values[b, indices[b]] for every row."""
    return values.gather(1, indices[:, None]).squeeze(1)


def select_rows(
    is_first: Bool[Tensor, " B"], first: Float[Tensor, "B V"], second: Float[Tensor, "B V"]
) -> Float[Tensor, "B V"]:
    """`first` in the rows where `is_first`, else `second`; both finite. On a CPU four times as fast as torch.where."""
    return torch.lerp(second, first, is_first[:, None].to(first.dtype))


def weights_or(weights: Float[Tensor, "B V"], fallback: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
    """`weights`, and `fallback` in rows where all are 0: exact laws never pick from such a row, but rounding may."""
    return select_rows(weights.sum(1) > 0, weights, fallback)


def strike(Q: Float[Tensor, "B V"], tokens: Int64[Tensor, " B"]) -> Float[Tensor, "B V"]:
    """Q without `tokens`, normalised. Summed anew, not by subtraction, which would lose a small remainder."""
    struck = Q.scatter(1, tokens[:, None], 0.0)
    return struck.div_(struck.sum(1, keepdim=True).clamp_(min=TINY))


@dataclass(frozen=True, kw_only=True)
class Trials:
    """The proposals in order. Trial t proposes `nodes[b, t]`; trial 0 is none.

    first  the first trial below each node, and 0 below a leaf
    next   the trial after t below the same node, and 0 after the last
    """

    nodes: Int64[Tensor, "B T"]
    law_ids: Int64[Tensor, "B T"]
    first: Int64[Tensor, "B N"]
    next: Int64[Tensor, "B T"]


def trials_of(tree: Tree) -> Trials:
    """The tree's proposals, linked below each node. The tree must have draft laws."""
    assert tree.draft_laws is not None
    nodes = tree.draft_laws.trial_nodes
    if nodes is None:
        nodes = torch.arange(tree.token_ids.shape[1], device=tree.parents.device) * tree.is_node
    num_trials = nodes.shape[1]
    order = torch.arange(num_trials, device=nodes.device)
    parents = tree.parents.gather(1, nodes)
    ranks = torch.where(nodes > 0, order, num_trials)
    first = torch.full_like(tree.parents, num_trials).scatter_reduce(1, parents, ranks, "amin") % num_trials
    follows = (parents[:, :, None] == parents[:, None, :]) & (order[:, None] < order) & (nodes > 0)[:, None, :]
    following = follows.byte().argmax(2) * (nodes > 0)
    return Trials(nodes=nodes, law_ids=tree.draft_laws.law_ids, first=first, next=following)


def sibling_order(tree: Tree) -> tuple[Int64[Tensor, "B N"], Int64[Tensor, "B N"]]:
    """Nodes such that siblings are neighbours and follow their parent, with those parents; (0, N) fills the end.

    With parents [0, 0, 1, 0]: nodes [1, 3, 2, 0], parents [0, 0, 1, 4].
    """
    num_nodes = tree.token_ids.shape[1]
    is_child = tree.is_node & (torch.arange(num_nodes, device=tree.parents.device) > 0)
    parents, nodes = torch.where(is_child, tree.parents, num_nodes).sort(dim=1, stable=True)
    return nodes * (parents < num_nodes), parents


def post_order(tree: Tree) -> Int64[Tensor, "B N"]:
    """The nodes such that each follows all below it and all earlier siblings' subtrees; the root, then 0 for padding.

    A node's rank is its rank in depth-first order, plus the size of its subtree, less its depth and 1.
    """
    num_nodes = tree.token_ids.shape[1]
    order = torch.arange(num_nodes, device=tree.parents.device)
    sizes = tree.ancestor_mask.sum(1)
    is_earlier = (tree.parents[:, :, None] == tree.parents[:, None, :]) & (order[:, None] > order) & (order > 0)
    skipped = (is_earlier * sizes[:, None, :]).sum(2) + (order > 0)
    ranks = (tree.ancestor_mask * skipped[:, None, :]).sum(2) - tree.depths + sizes - 1
    ranks = torch.where(tree.is_node, ranks, order)
    return torch.zeros_like(ranks).scatter_(1, ranks, order * tree.is_node)

"""The union of several drafters' trees (SpecInfer's merge): a path that several drafted is verified once.

B batch rows, N nodes of one tree, T nodes of all trees together (the root once), L laws.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from furcate.builder.errors import ConfigError
from furcate.decoding.tree import DraftKind, DraftLaws, Tree, tree_from_parents


def merge_trees(trees: Sequence[Tree]) -> Tree:
    """One tree of T nodes, equal paths folded into one node, padding at the end. All trees have the same roots.

    Every draw stays one trial with its own drafter's law, tree after tree: a token that was drawn m times is offered m times,
    as exactness demands. Folds the repeats within a single tree too. Raises ConfigError unless all trees are deterministic
    or all are drawn with replacement.
    """
    kinds = {tree.kind for tree in trees}
    if len(kinds) != 1 or not kinds <= {DraftKind.DETERMINISTIC, DraftKind.WITH_REPLACEMENT}:
        given = " and ".join(sorted(kind.value for kind in kinds))
        raise ConfigError(
            f"Trees drafted {given} cannot be merged; draft all of them deterministically, or all with replacement."
        )
    token_ids, parents, is_node = _concatenated(trees)
    num_trials = token_ids.shape[1]
    order = torch.arange(num_trials, device=token_ids.device)
    max_depth = max(tree.max_depth for tree in trees)
    firsts = _first_equals(token_ids, parents, is_node, max_depth)
    is_kept = (firsts == order) & is_node
    nodes_of = (is_kept.cumsum(1) - 1).gather(1, firsts) * is_node
    sources = torch.where(is_kept, order, num_trials).sort(1).values % num_trials
    merged = tree_from_parents(
        token_ids.gather(1, sources),
        nodes_of.gather(1, parents.gather(1, sources)),
        is_kept.sum(1),
        max_depth,
    )
    if kinds == {DraftKind.DETERMINISTIC}:
        return merged
    return merged.with_draft_laws(_merged_laws(trees, nodes_of, merged.is_node))


def _concatenated(trees: Sequence[Tree]) -> tuple[Int64[Tensor, "B T"], Int64[Tensor, "B T"], Bool[Tensor, "B T"]]:
    """Tokens, parents and use of all trees' nodes, the first tree's root being everybody's."""
    tokens, parents, is_node, start = [], [], [], 0
    for tree in trees:
        first = 0 if tree is trees[0] else 1
        tokens.append(tree.token_ids[:, first:])
        parents.append((tree.parents + start * (tree.parents > 0))[:, first:])
        is_node.append(tree.is_node[:, first:])
        start += tree.token_ids.shape[1] - 1
    return torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(is_node, 1)


def _first_equals(
    token_ids: Int64[Tensor, "B T"], parents: Int64[Tensor, "B T"], is_node: Bool[Tensor, "B T"], max_depth: int
) -> Int64[Tensor, "B T"]:
    """For each node the first one with the same path. A depth settles once the depth above has."""
    order = torch.arange(token_ids.shape[1], device=token_ids.device)
    firsts = order.expand_as(token_ids)
    is_comparable = (is_node & (order > 0))[:, :, None] & (is_node & (order > 0))[:, None, :]
    is_itself = order[:, None] == order
    has_same_token = (token_ids[:, :, None] == token_ids[:, None, :]) & is_comparable
    for _ in range(max_depth):
        above = firsts.gather(1, parents)
        is_same = has_same_token & (above[:, :, None] == above[:, None, :]) | is_itself
        firsts = is_same.byte().argmax(2)
    return firsts


def _merged_laws(trees: Sequence[Tree], nodes_of: Int64[Tensor, "B T"], is_node: Bool[Tensor, "B T"]) -> DraftLaws:
    probs, law_ids, start = [], [], 0
    for tree in trees:
        assert tree.draft_laws is not None and tree.draft_laws.trial_nodes is None
        probs.append(tree.draft_laws.probs)
        law_ids.append(tree.draft_laws.law_ids[:, 0 if tree is trees[0] else 1 :] + start)
        start += tree.draft_laws.probs.shape[1]
    return DraftLaws(
        kind=DraftKind.WITH_REPLACEMENT,
        probs=torch.cat(probs, 1),
        law_ids=torch.cat(law_ids, 1),
        is_drawn=is_node,
        trial_nodes=nodes_of,
    )

"""EAGLE-2's dynamic tree: grow level by level along the most probable nodes, then keep the best of everything seen.

B batch rows, K nodes expanded per level, C candidates in all, N nodes of the final tree. Scores are log-probabilities
summed from the root. Two pure functions; the drafter runs its layer between calls of the first.
Source: EAGLE-2 (arXiv 2406.16858).
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from furcate.decoding.tree import Tree, tree_from_parents


@dataclass(frozen=True, kw_only=True)
class Level:
    """The children of one level, and those of them to expand next.

    candidate_scores  of all K * children; candidate k * children + c is child c of node k
    chosen            candidate indices of the `width` best, best first
    scores            their scores
    """

    candidate_scores: Float[Tensor, "B candidates"]
    chosen: Int64[Tensor, "B width"]
    scores: Float[Tensor, "B width"]


def expand_level(scores: Float[Tensor, "B K"], log_probs: Float[Tensor, "B K children"], width: int) -> Level:
    """The level below K nodes with these `scores`, whose children have these `log_probs`.

    NaN counts as -inf and a log-probability above 0 as 0, so no child scores above its parent. Ties go to the lower
    index.
    """
    candidates = (scores[:, :, None] + clean_log_probs(log_probs)).flatten(1)
    ordered, indices = candidates.sort(dim=1, descending=True, stable=True)
    return Level(candidate_scores=candidates, chosen=indices[:, :width], scores=ordered[:, :width])


def clean_log_probs(log_probs: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """The same with NaN as -inf and nothing above 0."""
    return log_probs.nan_to_num(nan=-torch.inf, posinf=0.0, neginf=-torch.inf).clamp(max=0.0)


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Everything a dynamic tree may keep, level after level.

    parents[b, c] is 0 for a child of the root and j + 1 for a child of candidate j, with j < c: the index that the
    parent would have if every candidate became a node.
    """

    token_ids: Int64[Tensor, "B C"]
    scores: Float[Tensor, "B C"]
    parents: Int64[Tensor, "B C"]


@dataclass(frozen=True, kw_only=True)
class Reranked:
    """The final tree, and where its nodes came from: node n was candidate sources[b, n] - 1; 0 for root and padding."""

    tree: Tree
    sources: Int64[Tensor, "B N"]


def rerank(root_ids: Int64[Tensor, " B"], candidates: Candidates, budget: int, max_depth: int) -> Reranked:
    """The tree of the root and the budget - 1 best candidates, in the candidates' order; N = min(budget, C + 1).

    Always closed under ancestors: a candidate counts no more than its parent, and of equals the earlier, so the parent,
    is kept. Candidates of score NaN or -inf are dropped with all below them; a row short of candidates ends in padding.
    """
    scores = candidates.scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    scores = torch.nn.functional.pad(scores, (1, 0), value=torch.inf)
    parents = torch.nn.functional.pad(candidates.parents, (1, 0))
    for _ in range(max_depth - 1):
        scores = torch.minimum(scores, scores.gather(1, parents))
    ordered, indices = scores.sort(dim=1, descending=True, stable=True)
    is_kept = ordered[:, :budget] > -torch.inf
    num_candidates = scores.shape[1]
    sources = torch.where(is_kept, indices[:, :budget], num_candidates).sort(dim=1).values
    sources = torch.where(sources < num_candidates, sources, 0)
    # Padding writes to the root's place, as the root does: all of them must write 0.
    nodes = torch.arange(sources.shape[1], device=sources.device) * (sources > 0)
    node_of = torch.zeros_like(parents).scatter_(1, sources, nodes)
    tree = tree_from_parents(
        torch.cat([root_ids[:, None], candidates.token_ids], dim=1).gather(1, sources),
        node_of.gather(1, parents.gather(1, sources)),
        is_kept.sum(1),
        max_depth,
    )
    return Reranked(tree=tree, sources=sources)

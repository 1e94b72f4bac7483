"""UniVer's trees, grown dynamically: EAGLE-2's most probable nodes, and below some of them one child drawn from what is left.

The drawn children compete for the budget like all others, by the probability that any token beside their siblings comes next.
That is known before they are drawn, so which of them are in the tree does not depend on their tokens; they have no children.

B batch rows, K nodes expanded a level, C children a node, E nodes expanded in all, N nodes of the tree, Vd draft vocabulary.
Sources: UniVer (arXiv 2605.04543), EAGLE-2 (arXiv 2406.16858).
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from furcate.builder.tree_config import TreeConfig
from furcate.decoding.drafters.laws import draft_laws
from furcate.decoding.drafters.proposer import DraftRows, Proposer
from furcate.decoding.draws import FLOOR
from furcate.decoding.dynamic_tree import Candidates, Reranked, expand_level, rerank
from furcate.decoding.randomness import Draw, node_uniforms
from furcate.decoding.sampling import SamplingRows, draw
from furcate.decoding.tree import DraftKind, DraftLaws, Tree

DRAWN_WORTH = 0.7
"""How often a drawn child is accepted, as a share of the probability it was drawn from."""


@dataclass(frozen=True, kw_only=True)
class _Level:
    """The children of the K nodes expanded last. `parents` counts as `Candidates.parents` does."""

    laws: Float[Tensor, "B K Vd"]
    draft_ids: Int64[Tensor, "B K*C"]
    scores: Float[Tensor, "B K*C"]
    expanded_scores: Float[Tensor, "B K"]
    expanded: Int64[Tensor, "B K"]
    """The K nodes themselves: 0 for the root, a candidate's place + 1 for others."""


class MixedGrower:
    """Grows a dynamic tree of `budget` nodes, drawn children included."""

    def __init__(self, config: TreeConfig) -> None:
        self.config = config
        self.max_depth = config.max_depth
        self.num_nodes = config.budget
        self.num_cached_nodes = config.depth * config.top_k

    def grow(self, proposer: Proposer | None, rows: DraftRows, sampling: SamplingRows) -> Tree:
        """The trees of these sequences, with the laws of their drawn children."""
        assert proposer is not None, "a dynamic tree needs a proposer"
        levels = self._levels(proposer, rows, sampling)
        draft_ids = torch.cat([level.draft_ids for level in levels], 1)
        laws = torch.cat([level.laws for level in levels], 1)
        num_expanded = laws.shape[1]
        left = 1 - laws.topk(self.config.top_k, dim=2).values.sum(2)
        drawn_scores = torch.cat([level.expanded_scores for level in levels], 1) + (DRAWN_WORTH * left).log()
        expanded = torch.cat([level.expanded for level in levels], 1)
        candidates = Candidates(
            token_ids=torch.nn.functional.pad(proposer.target_token_ids(draft_ids), (0, num_expanded)),
            scores=torch.cat([*(level.scores for level in levels), drawn_scores], 1),
            parents=torch.cat([expanded.repeat_interleave(self.config.top_k, 1), expanded], 1),
        )
        reranked = rerank(rows.root_ids, candidates, self.num_nodes, self.max_depth)
        return self._draw(reranked, draft_ids, laws, (proposer, rows, sampling))

    def _levels(self, proposer: Proposer, rows: DraftRows, sampling: SamplingRows) -> list[_Level]:
        top_k = self.config.top_k
        draft = proposer.start(rows)
        scores = torch.zeros_like(rows.states[:, :1], dtype=torch.float32)
        expanded = torch.zeros_like(rows.root_ids)[:, None]
        levels: list[_Level] = []
        first = 1  # index of the next candidate, one more than its place, as rerank counts
        for depth in range(self.config.depth + 1):
            laws = draft_laws(draft.logits, sampling)
            top = laws.topk(top_k, dim=2)
            level = expand_level(scores, top.values.log(), top_k)
            draft_ids = top.indices.flatten(1)
            levels.append(
                _Level(
                    laws=laws,
                    draft_ids=draft_ids,
                    scores=level.candidate_scores,
                    expanded_scores=scores,
                    expanded=expanded,
                )
            )
            if depth < self.config.depth:
                draft.descend(level.chosen // top_k, proposer.target_token_ids(draft_ids.gather(1, level.chosen)))
                scores, expanded = level.scores, level.chosen + first
                first += draft_ids.shape[1]
        return levels

    def _draw(
        self,
        reranked: Reranked,
        draft_ids: Int64[Tensor, "B E*C"],
        laws: Float[Tensor, "B E Vd"],
        context: tuple[Proposer, DraftRows, SamplingRows],
    ) -> Tree:
        """The tree with a token in every drawn node. A node's law is its parent's without the picked siblings in the tree."""
        proposer, rows, sampling = context
        tree, sources = reranked.tree, reranked.sources
        num_picked, top_k = draft_ids.shape[1], self.config.top_k
        is_drawn = sources > num_picked
        is_picked = (sources > 0) & ~is_drawn
        # Which expanded node each tree node hangs below; E for the root and padding.
        places = torch.where(is_drawn, sources - 1 - num_picked, (sources - 1).clamp(min=0) // top_k)
        # The drawn nodes come last in a row, as their candidates do.
        columns = int(is_drawn.sum(1).max()) if laws.device.type == "cpu" else min(laws.shape[1], self.num_nodes - 1)
        if columns == 0:
            return tree
        nodes = is_drawn.byte().sort(dim=1, descending=True, stable=True).indices[:, :columns]
        node_places = places.gather(1, nodes)
        own_laws = laws.gather(1, node_places[:, :, None].expand(-1, -1, laws.shape[2])).clamp(min=FLOOR)
        ids = draft_ids.gather(1, (sources - 1).clamp(0, num_picked - 1))
        is_sibling = is_picked[:, None, :] & (places[:, None, :] == node_places[:, :, None])
        kept = (~is_sibling).to(own_laws.dtype)
        own_laws = own_laws.scatter_reduce(2, ids[:, None, :].expand_as(is_sibling), kept, "prod")
        own_laws = own_laws / own_laws.sum(2, keepdim=True)
        numbers = node_uniforms(sampling.seeds, rows.cache_lengths.long(), self.num_nodes, Draw.DRAFT).gather(1, nodes)
        drawn = draw(own_laws.flatten(0, 1), numbers.flatten()).view(nodes.shape)
        best = own_laws.argmax(2)
        drawn = proposer.target_token_ids(torch.where((sampling.temperature <= 0)[:, None], best, drawn))
        is_own = is_drawn.gather(1, nodes)
        tokens = tree.token_ids.scatter(1, nodes, torch.where(is_own, drawn, tree.token_ids.gather(1, nodes)))
        law_ids = torch.zeros_like(tokens).scatter_(
            1, nodes, torch.arange(columns, device=nodes.device).expand_as(nodes)
        )
        draft_laws_ = DraftLaws(
            kind=DraftKind.MIXED, probs=proposer.target_laws(own_laws), law_ids=law_ids, is_drawn=is_drawn
        )
        return replace(tree, token_ids=tokens, draft_laws=draft_laws_)

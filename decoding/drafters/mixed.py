"""UniVer's trees, grown dynamically: EAGLE-2's most probable nodes, and below some of them one child drawn from what is left.

The drawn children compete for the budget like all others, by the probability that any token beside their siblings comes next.
That is known before they are drawn, so which of them are in the tree does not depend on their tokens; they have no children.

B batch rows, K nodes of a draft pass, C children of each, E nodes expanded in all, N nodes of the tree, M of them drawn, Vd draft
vocabulary.
Sources: UniVer (arXiv 2605.04543), EAGLE-2 (arXiv 2406.16858).
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from furcate.builder.tree_config import TreeConfig
from furcate.decoding.device_constants import device_constant
from furcate.decoding.drafters.laws import draft_laws
from furcate.decoding.drafters.proposer import DraftRows, Proposer
from furcate.decoding.draws import FLOOR, draw
from furcate.decoding.dynamic_tree import Candidates, expand_level, rerank
from furcate.decoding.randomness import Draw, node_seeds
from furcate.decoding.sampling import SamplingRows
from furcate.decoding.tree import DraftKind, DraftLaws, Tree

DRAWN_WORTH = 0.7
"""How often a drawn child is accepted, as a share of the probability it was drawn from."""


def num_expanded(config: TreeConfig) -> int:
    """Nodes below the root that the draft passes of a dynamic tree run, at most."""
    return sum(width for _, width in config.levels[:-1])


@dataclass(frozen=True, kw_only=True)
class _Level:
    """The K nodes of one draft pass and their C most probable children each."""

    laws: Float[Tensor, "B K Vd"]
    scores: Float[Tensor, "B K"]
    nodes: Int64[Tensor, "B K"]
    """The K nodes as `Candidates.parents` counts: 0 for the root, a candidate's place + 1 for others."""
    num_children: int
    child_ids: Int64[Tensor, "B K*C"]
    """Draft-vocabulary ids."""
    child_scores: Float[Tensor, "B K*C"]
    rest: Float[Tensor, "B K"]
    """The probability of all tokens but the C."""


class MixedGrower:
    """Grows a dynamic tree of `budget` nodes, drawn children included."""

    def __init__(self, config: TreeConfig) -> None:
        self.config = config
        self.max_depth = config.max_depth
        self.num_nodes = config.budget
        self.num_cached_nodes = num_expanded(config)
        counts = [(width, children) for (children, _), width in zip(config.levels, self._widths(), strict=True)]
        picked = torch.arange(sum(width for width, _ in counts)).repeat_interleave(
            torch.tensor([children for width, children in counts for _ in range(width)])
        )
        self.places = (*picked.tolist(), *range(self.num_cached_nodes + 1))
        """Of each candidate, the drawn ones last: which of the E expanded nodes it is a child of."""

    def _widths(self) -> list[int]:
        """Nodes that each draft pass runs; the first runs the root."""
        return [1, *(width for _, width in self.config.levels[:-1])]

    def grow(self, proposer: Proposer | None, rows: DraftRows, sampling: SamplingRows) -> Tree:
        """The trees of these sequences, with the laws of their drawn children."""
        assert proposer is not None, "a dynamic tree needs a proposer"
        levels = self._levels(proposer, rows, sampling)
        child_ids = torch.cat([level.child_ids for level in levels], 1)
        drawn_scores = [level.scores + (DRAWN_WORTH * level.rest).log() for level in levels]
        picked_parents = [level.nodes.repeat_interleave(level.num_children, 1) for level in levels]
        num_drawable = sum(level.nodes.shape[1] for level in levels)
        candidates = Candidates(
            token_ids=torch.nn.functional.pad(proposer.target_token_ids(child_ids), (0, num_drawable)),
            scores=torch.cat([*(level.child_scores for level in levels), *drawn_scores], 1),
            parents=torch.cat([*picked_parents, *(level.nodes for level in levels)], 1),
        )
        reranked = rerank(rows.root_ids, candidates, self.num_nodes, self.max_depth)
        drawn = self._drawn_nodes(reranked.sources, child_ids.shape[1])
        if drawn.nodes.shape[1] == 0:
            return reranked.tree
        laws = self._laws_of(drawn, torch.cat([level.laws for level in levels], 1), child_ids, reranked.sources)
        return _with_draws(reranked.tree, drawn, laws, (proposer, rows, sampling))

    def _levels(self, proposer: Proposer, rows: DraftRows, sampling: SamplingRows) -> list[_Level]:
        draft = proposer.start(rows)
        nodes = torch.zeros_like(rows.root_ids)[:, None]
        scores = torch.zeros(nodes.shape, device=nodes.device)
        levels: list[_Level] = []
        first = 1  # index of the next candidate, one more than its place, as rerank counts
        for num_children, width in self.config.levels:
            laws = draft_laws(draft.logits, sampling)
            top = draft.logits.topk(num_children, dim=2)
            # Scored by the draft's own law: sharpened by a low temperature it would be too sure of its deep paths.
            log_probs = top.values.float() - draft.logits.float().logsumexp(2, keepdim=True)
            below = expand_level(scores, log_probs, width)
            child_ids = top.indices.flatten(1)
            levels.append(
                _Level(
                    laws=laws,
                    scores=scores,
                    nodes=nodes,
                    num_children=num_children,
                    child_ids=child_ids,
                    child_scores=below.candidate_scores,
                    rest=1 - laws.gather(2, top.indices).sum(2),
                )
            )
            if len(levels) < len(self.config.levels):
                expanded_ids = proposer.target_token_ids(child_ids.gather(1, below.chosen))
                draft.descend(below.chosen // num_children, expanded_ids)
                scores, nodes = below.scores, below.chosen + first
                first += child_ids.shape[1]
        return levels

    def _drawn_nodes(self, sources: Int64[Tensor, "B N"], num_picked: int) -> "_DrawnNodes":
        is_drawn = sources > num_picked
        # The drawn nodes come last in a row, as their candidates do; one column for each of the row with the most.
        most = min(self.num_cached_nodes + 1, self.num_nodes - 1)
        if sources.device.type == "cpu":
            most = int(is_drawn.sum(1).max())
        nodes = is_drawn.byte().sort(dim=1, descending=True, stable=True).indices[:, :most]
        places = device_constant(self.places, sources.device)[(sources - 1).clamp(min=0)]
        return _DrawnNodes(is_drawn=is_drawn, nodes=nodes, places=places)

    def _laws_of(
        self,
        drawn: "_DrawnNodes",
        laws: Float[Tensor, "B E Vd"],
        child_ids: Int64[Tensor, "B C"],
        sources: Int64[Tensor, "B N"],
    ) -> Float[Tensor, "B M Vd"]:
        """What each drawn node is drawn from: its parent's law without the picked siblings that are in the tree."""
        places = drawn.places.gather(1, drawn.nodes)
        own = laws.gather(1, places[:, :, None].expand(-1, -1, laws.shape[2])).clamp(min=FLOOR)
        is_picked = (sources > 0) & ~drawn.is_drawn
        is_sibling = is_picked[:, None, :] & (drawn.places[:, None, :] == places[:, :, None])
        ids = child_ids.gather(1, (sources - 1).clamp(0, child_ids.shape[1] - 1))
        kept = (~is_sibling).to(own.dtype)
        own = own.scatter_reduce(2, ids[:, None, :].expand_as(is_sibling), kept, "prod")
        return own / own.sum(2, keepdim=True)


@dataclass(frozen=True, kw_only=True)
class _DrawnNodes:
    """Which nodes are drawn. `places` says for every node below which expanded node it hangs; `nodes` lists the M drawn ones.

    Rows with fewer than M are filled up with nodes that are not drawn.
    """

    is_drawn: Bool[Tensor, "B N"]
    nodes: Int64[Tensor, "B M"]
    places: Int64[Tensor, "B N"]


def _with_draws(
    tree: Tree,
    drawn: _DrawnNodes,
    laws: Float[Tensor, "B M Vd"],
    context: tuple[Proposer, DraftRows, SamplingRows],
) -> Tree:
    """The tree with a token in every drawn node."""
    proposer, rows, sampling = context
    nodes = drawn.nodes
    seeds = node_seeds(sampling.seeds, rows.cache_lengths.long(), tree.token_ids.shape[1], Draw.DRAFT)
    drawn_ids = draw(laws.flatten(0, 1), seeds.gather(1, nodes).flatten()).view(nodes.shape)
    is_greedy = (sampling.temperature <= 0)[:, None]
    new_ids = proposer.target_token_ids(torch.where(is_greedy, laws.argmax(2), drawn_ids))
    new_ids = torch.where(drawn.is_drawn.gather(1, nodes), new_ids, tree.token_ids.gather(1, nodes))
    columns = torch.arange(nodes.shape[1], device=nodes.device).expand_as(nodes)
    draft_laws = DraftLaws(
        kind=DraftKind.MIXED,
        probs=proposer.target_laws(laws),
        law_ids=torch.zeros_like(tree.token_ids).scatter_(1, nodes, columns),
        is_drawn=drawn.is_drawn,
    )
    return replace(tree, token_ids=tree.token_ids.scatter(1, nodes, new_ids), draft_laws=draft_laws)

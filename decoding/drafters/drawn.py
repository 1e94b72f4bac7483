"""Trees of a fixed shape whose tokens are drawn from the draft's laws: chains, choice lists, SpecInfer's expansions.

How many children a node gets is the shape's, so it never depends on what was drawn. B batch rows, K nodes expanded a level,
P of them with C children each, R = B * P, N nodes of the tree, Vd draft vocabulary.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from furcate.decoding.device_constants import device_constant
from furcate.decoding.drafters.laws import draft_laws
from furcate.decoding.drafters.proposer import DraftRows, Proposer
from furcate.decoding.draws import Drawn, draw_mixed, draw_with_replacement, draw_without_replacement
from furcate.decoding.randomness import Draw, node_seeds
from furcate.decoding.sampling import SamplingRows
from furcate.decoding.tree import DraftKind, DraftLaws, Tree
from furcate.decoding.tree_shape import TreeShape


class DrawnGrower:
    """Draws a tree of `shape`, children in the order they are drawn. Rows at temperature 0 get the most probable ones."""

    def __init__(self, shape: TreeShape, kind: DraftKind, first_seed: int = 0) -> None:
        self.shape = shape
        self.first_seed = first_seed
        """Index of the root's seed: drafters of one tree share none."""
        self.kind = kind
        self.max_depth = shape.max_depth
        self.num_nodes = shape.num_nodes
        self.levels = [_Level.of(shape, depth) for depth in range(shape.max_depth)]
        self.num_cached_nodes = sum(len(level.nodes) for level in self.levels[1:])
        order = [node for level in self.levels for node in level.nodes]
        self.law_ids = tuple(order.index(parent) for parent in shape.parents)
        last_children = {children[-1] for children in shape.children if children}
        self.is_drawn = tuple(
            node > 0 and (kind is not DraftKind.MIXED or node in last_children) for node in range(self.num_nodes)
        )

    def grow(self, proposer: Proposer | None, rows: DraftRows, sampling: SamplingRows) -> Tree:
        """The trees of these sequences, with their draft laws."""
        assert proposer is not None, "a drawn tree needs a proposer"
        device, num_rows = rows.root_ids.device, len(rows.root_ids)
        num_seeds = self.first_seed + self.num_nodes
        seeds = node_seeds(sampling.seeds, rows.cache_lengths.long(), num_seeds, Draw.DRAFT)[:, self.first_seed :]
        tokens = rows.root_ids[:, None].repeat(1, self.num_nodes)
        draft = proposer.start(rows)
        laws: list[Float[Tensor, "B K Vd"]] = []
        for depth, level in enumerate(self.levels):
            if depth > 0:
                above = device_constant(level.above, device).expand(num_rows, -1)
                draft.descend(above, tokens[:, device_constant(level.nodes, device)])
            law = draft_laws(draft.logits, sampling)
            for group in level.groups:
                places, children = device_constant(group.places, device), device_constant(group.children, device)
                drawn = self._draw(law[:, places], seeds[:, children], sampling)
                tokens[:, children] = proposer.target_token_ids(drawn.token_ids).view(num_rows, -1)
                law[:, places] = drawn.law.view(num_rows, len(group.places), -1)
            laws.append(law)
        return self.shape.tree(tokens).with_draft_laws(
            DraftLaws(
                kind=self.kind,
                probs=proposer.target_laws(torch.cat(laws, 1)),
                law_ids=device_constant(self.law_ids, device).expand(num_rows, -1),
                is_drawn=device_constant(self.is_drawn, device, torch.bool).expand(num_rows, -1),
            )
        )

    def _draw(self, law: Float[Tensor, "B P Vd"], seeds: Int64[Tensor, "B P*C"], sampling: SamplingRows) -> Drawn:
        num_parents = law.shape[1]
        law, seeds = law.flatten(0, 1), seeds.reshape(len(law) * num_parents, -1)
        drawn = draw_children(law, seeds, self.kind)
        best = law.topk(seeds.shape[1], dim=1).indices
        is_greedy = (sampling.temperature <= 0).repeat_interleave(num_parents)[:, None]
        return Drawn(token_ids=torch.where(is_greedy, best, drawn.token_ids), law=drawn.law)


def draw_children(law: Float[Tensor, "R Vd"], seeds: Int64[Tensor, "R C"], kind: DraftKind) -> Drawn:
    """C children of each row, drawn in the manner of `kind`; of mixed ones the last alone is drawn."""
    if kind is DraftKind.WITH_REPLACEMENT:
        return draw_with_replacement(law, seeds)
    if kind is DraftKind.WITHOUT_REPLACEMENT:
        return draw_without_replacement(law, seeds)
    assert kind is DraftKind.MIXED
    return draw_mixed(law, seeds.shape[1], seeds[:, -1])


@dataclass(frozen=True)
class _Group:
    """Nodes of one level with equally many children: their places among the level's expanded nodes, and all children."""

    places: tuple[int, ...]
    children: tuple[int, ...]


@dataclass(frozen=True)
class _Level:
    """The nodes of one depth that have children.

    above   the place of each node's parent among the level above's expanded nodes
    """

    nodes: tuple[int, ...]
    above: tuple[int, ...]
    groups: list[_Group]

    @classmethod
    def of(cls, shape: TreeShape, depth: int) -> "_Level":
        nodes = tuple(node for node in shape.levels[depth] if shape.children[node])
        expanded = [node for node in shape.levels[depth - 1] if shape.children[node]] if depth > 0 else []
        counts = sorted({len(shape.children[node]) for node in nodes})
        groups = []
        for count in counts:
            places = tuple(place for place, node in enumerate(nodes) if len(shape.children[node]) == count)
            groups.append(_Group(places, tuple(child for place in places for child in shape.children[nodes[place]])))
        return cls(nodes, tuple(expanded.index(shape.parents[node]) for node in nodes if depth > 0), groups)

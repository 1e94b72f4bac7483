"""Turns proposals into trees: EAGLE-2's dynamic tree, a static shape (choice lists, chains), or the root alone.

B batch rows, K nodes expanded a level, C children a node, N nodes of the tree.
"""

from typing import Protocol

import torch

from furcate.builder.errors import ConfigError
from furcate.builder.tree_config import TreeConfig, TreeKind
from furcate.decoding.device_constants import device_constant
from furcate.decoding.drafters.drawn import DrawnGrower
from furcate.decoding.drafters.merged import MergedGrower
from furcate.decoding.drafters.mixed import MixedGrower, num_expanded
from furcate.decoding.drafters.proposer import DraftRows, Proposer
from furcate.decoding.dynamic_tree import Candidates, expand_level, rerank
from furcate.decoding.sampling import SamplingRows
from furcate.decoding.tree import DraftKind, Tree
from furcate.decoding.tree_shape import TreeShape, chain_shape, shape_from_choices, single_node_shape


class Grower(Protocol):
    """Drafts a tree a step."""

    max_depth: int
    num_nodes: int
    num_cached_nodes: int
    """Most nodes whose K/V a draft writes behind the committed tokens."""

    def grow(self, proposer: Proposer | None, rows: DraftRows, sampling: SamplingRows) -> Tree:
        """The tree for these sequences."""
        ...


def grower_of(config: TreeConfig, kind: DraftKind = DraftKind.DETERMINISTIC, first_seed: int = 0) -> Grower:
    """The grower a tree config asks for, drafting in the manner of `kind` with seeds from `first_seed` on.

    Raises ConfigError for a dynamic tree of drawn tokens: choosing among them by probability would bias the text.
    """
    if config.kind is TreeKind.MERGED:
        firsts = [sum(part.budget for part in config.parts[:place]) for place in range(len(config.parts))]
        parts = [grower_of(part, kind, first) for part, first in zip(config.parts, firsts, strict=True)]
        return MergedGrower(parts, config.max_depth)
    if config.kind is TreeKind.DYNAMIC:
        if kind is DraftKind.DETERMINISTIC:
            return DynamicGrower(config)
        if kind is DraftKind.MIXED:
            return MixedGrower(config)
        raise ConfigError(
            f"tree '{config}' is dynamic, and its tokens cannot be drawn {kind.value}; use a fixed shape."
        )
    shape = shape_of(config)
    if kind is DraftKind.DETERMINISTIC or shape.max_depth == 0:
        return StaticGrower(shape)
    return DrawnGrower(shape, kind, first_seed)


def shape_of(config: TreeConfig) -> TreeShape:
    """The fixed shape of a config that has one."""
    if config.kind is TreeKind.CHAIN:
        return chain_shape(config.depth)
    return shape_from_choices(config.choices) if config.kind is TreeKind.STATIC else single_node_shape()


class DynamicGrower:
    """EAGLE-2 (arXiv 2406.16858): expand the most probable nodes of each level, then keep the best of all candidates."""

    def __init__(self, config: TreeConfig) -> None:
        self.config = config
        self.max_depth = config.max_depth
        self.num_nodes = config.budget
        self.num_cached_nodes = num_expanded(config)

    def grow(self, proposer: Proposer | None, rows: DraftRows, sampling: SamplingRows) -> Tree:
        assert proposer is not None, "a dynamic tree needs a proposer"
        (num_children, width), *deeper = self.config.levels
        draft = proposer.start(rows)
        proposal = draft.propose(num_children)
        level = expand_level(torch.zeros_like(proposal.log_probs[:, :, 0]), proposal.log_probs, width)
        token_ids = [proposal.token_ids.flatten(1)]
        scores = [level.candidate_scores]
        parents = [torch.zeros_like(token_ids[0])]
        first = 1  # index of the newest level's first candidate, one more than its place, as rerank counts
        for num_grandchildren, next_width in deeper:
            chosen_ids = token_ids[-1].gather(1, level.chosen)
            chosen_parents = level.chosen + first
            # Place of each chosen node's parent among the nodes expanded before: candidates come C to a parent.
            draft.descend(level.chosen // num_children, chosen_ids)
            num_children = num_grandchildren
            proposal = draft.propose(num_children)
            first += token_ids[-1].shape[1]
            parents.append(chosen_parents.repeat_interleave(num_children, dim=1))
            level = expand_level(level.scores, proposal.log_probs, next_width)
            token_ids.append(proposal.token_ids.flatten(1))
            scores.append(level.candidate_scores)
        candidates = Candidates(
            token_ids=torch.cat(token_ids, 1), scores=torch.cat(scores, 1), parents=torch.cat(parents, 1)
        )
        return rerank(rows.root_ids, candidates, self.num_nodes, self.max_depth).tree


class StaticGrower:
    """A fixed shape: node with rank path (r1, .., rd) is the rd-th child of its parent. Only nodes with children are run."""

    def __init__(self, shape: TreeShape) -> None:
        self.shape = shape
        self.max_depth = shape.max_depth
        self.num_nodes = shape.num_nodes
        self.levels = [_ShapeLevel(shape, depth) for depth in range(1, shape.max_depth + 1)]
        self.num_cached_nodes = sum(len(level.expanded) for level in self.levels[1:])

    def grow(self, proposer: Proposer | None, rows: DraftRows, sampling: SamplingRows) -> Tree:
        if not self.levels:
            return self.shape.tree(rows.root_ids[:, None])
        assert proposer is not None, "a tree of more than the root needs a proposer"
        draft, device = proposer.start(rows), rows.root_ids.device
        columns = [rows.root_ids[:, None]]
        for above, level in zip([None, *self.levels], self.levels, strict=False):
            if above is not None:
                expanded_ids = columns[-1][:, device_constant(level.expanded_places, device)]
                parents = device_constant(level.parent_places, device).expand(len(rows.root_ids), -1)
                draft.descend(parents, expanded_ids)
            proposal = draft.propose(level.num_children)
            columns.append(proposal.token_ids.flatten(1)[:, device_constant(level.picks, device)])
        return self.shape.tree(torch.cat(columns, dim=1))


class _ShapeLevel:
    """The nodes of one depth: which nodes above are expanded, and which of their children are picked."""

    def __init__(self, shape: TreeShape, depth: int) -> None:
        nodes, above = shape.levels[depth], shape.levels[depth - 1]
        self.expanded = sorted({shape.parents[node] for node in nodes})
        self.num_children = 1 + max(shape.ranks[node] for node in nodes)
        self.expanded_places = tuple([above.index(node) for node in self.expanded])
        """Places of the expanded nodes within their own level."""
        before = sorted({shape.parents[node] for node in above}) if depth > 1 else []
        self.parent_places = tuple([before.index(shape.parents[node]) for node in self.expanded if depth > 1])
        """Places of the expanded nodes' parents among the nodes expanded before."""
        self.picks = tuple(
            [self.expanded.index(shape.parents[node]) * self.num_children + shape.ranks[node] for node in nodes]
        )

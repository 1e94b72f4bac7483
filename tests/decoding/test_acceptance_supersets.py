"""A superset tree is never accepted less: in expectation, by enumeration, over random trees and random models.

A superset of a drawn tree keeps every node as it was drawn: new siblings are tried after the old ones. In a mixed tree a new
sibling would become the drawn one and change what the others are, so there only nodes below leaves make a superset; what the others
cost is shown too. Walks that match token by token need no expectation: test_acceptance_match.py.
"""

import random

import pytest
from exact_laws import draw_all, exact_law
from toy_models import Pair

from furcate.decoding.acceptance.registry import RULES
from furcate.decoding.tree import DraftKind
from furcate.decoding.tree_shape import Path, TreeShape, chain_shape, shape_from_choices

NUM_TREES = 25
ROUNDING = 1e-12
RULE_KINDS = [
    ("match", DraftKind.DETERMINISTIC),
    ("match", DraftKind.MIXED),
    ("multi_step", DraftKind.WITH_REPLACEMENT),
    ("recursive", DraftKind.WITHOUT_REPLACEMENT),
    ("traversal", DraftKind.WITHOUT_REPLACEMENT),
    ("univer", DraftKind.DETERMINISTIC),
    ("univer", DraftKind.MIXED),
    ("typical", DraftKind.DETERMINISTIC),
]
MOST_CHILDREN, MOST_LEVELS = 3, 3


def grown(paths: list[Path], parent: Path) -> list[Path]:
    """The paths and one more child of `parent`, the last of its children."""
    rank = sum(path[:-1] == parent for path in paths)
    return [*paths, (*parent, rank)]


def parents_of(paths: list[Path], *, leaves_only: bool) -> list[Path]:
    """Nodes that may get another child."""
    counts = {node: sum(path[:-1] == node for path in paths) for node in [(), *paths]}
    most = 1 if leaves_only else MOST_CHILDREN
    return [node for node, count in counts.items() if len(node) < MOST_LEVELS and count < most]


def random_pair_of_shapes(generator: random.Random, *, leaves_only: bool) -> tuple[TreeShape, TreeShape]:
    """A random shape of two to four nodes, and the same with one node more."""
    while True:
        paths: list[Path] = [(0,)]
        for _ in range(generator.choice([0, 1, 2])):
            paths = grown(paths, generator.choice(parents_of(paths, leaves_only=False)))
        parents = parents_of(paths, leaves_only=leaves_only)
        if parents:
            more = grown(paths, generator.choice(parents))
            return shape_from_choices([list(path) for path in paths]), shape_from_choices(list(map(list, more)))


def mean_drafts(name: str, pair: Pair, shape: TreeShape, kind: DraftKind) -> float:
    return exact_law(draw_all(pair, shape, kind, drawn_first=False), RULES[name].accept).mean_drafts


@pytest.mark.parametrize(("name", "kind"), RULE_KINDS)
def test_one_more_node_is_never_accepted_less(name, kind):
    generator = random.Random(17)
    gains = []
    for _ in range(NUM_TREES):
        leaves_only = name == "univer" and kind is DraftKind.MIXED
        small, large = random_pair_of_shapes(generator, leaves_only=leaves_only)
        pair = Pair(generator.randrange(1000))
        gains.append(mean_drafts(name, pair, large, kind) - mean_drafts(name, pair, small, kind))
    assert min(gains) >= -ROUNDING
    assert max(gains) > 0.05


def test_a_longer_chain_is_never_accepted_less_by_block_verification():
    for seed in range(10):
        lengths = [mean_drafts("block", Pair(seed), chain_shape(n), DraftKind.WITH_REPLACEMENT) for n in (1, 2, 3, 4)]
        assert lengths == sorted(lengths)


def test_a_sibling_of_a_mixed_trees_drawn_child_changes_what_that_was():
    """Not a superset: the child with the subtree was drawn from q, and is now the most probable token."""
    below = [[0], [0, 0], [0, 0, 0]]
    alone, beside = shape_from_choices(below), shape_from_choices([*below, [1]])
    losses = [
        mean_drafts("univer", Pair(seed), alone, DraftKind.MIXED)
        - mean_drafts("univer", Pair(seed), beside, DraftKind.MIXED)
        for seed in range(12)
    ]
    assert max(losses) > 0.05

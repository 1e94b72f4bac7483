"""Every lossless rule gives the target's law, by enumeration of all trees and all branches of the rule's own code.

The largest error allowed is 1e-12: float64 sums of up to a few 10,000 terms stay below 1e-14, the smallest known mistake
(one missing multiplicity) makes 1e-4.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch
from exact_laws import Drafts, Law, draw_all, exact_law
from toy_models import EDGE_PAIRS, PAIRS, Pair

from furcate.builder.errors import ConfigError
from furcate.decoding.acceptance.match import Greedy
from furcate.decoding.acceptance.registry import RULES, rule_named
from furcate.decoding.acceptance.typical import Typical
from furcate.decoding.tree import DraftKind, tree_from_parents
from furcate.decoding.tree_shape import TreeShape, chain_shape, expansion_shape, shape_from_choices, single_node_shape

LAW_TOLERANCE = 1e-12
CHAIN = expansion_shape([1, 1, 1])
SHAPES = {
    "chain": CHAIN,
    "2-1": expansion_shape([2, 1]),
    "2-2": expansion_shape([2, 2]),
    "3-1": expansion_shape([3, 1]),
    "2-1-1": expansion_shape([2, 1, 1]),
    "uneven": shape_from_choices([[0], [1], [2], [1, 0], [1, 1], [1, 0, 0]]),
    "root": single_node_shape(),
}
RULE_KINDS = [
    ("multi_step", DraftKind.WITH_REPLACEMENT),
    ("recursive", DraftKind.WITHOUT_REPLACEMENT),
    ("traversal", DraftKind.WITHOUT_REPLACEMENT),
    ("univer", DraftKind.MIXED),
    ("univer", DraftKind.DETERMINISTIC),
    ("match", DraftKind.DETERMINISTIC),
    ("match", DraftKind.MIXED),
]


@cache
def law_of(name: str, pair: Pair, shape: TreeShape, kind: DraftKind) -> Law:
    return exact_law(draw_all(pair, shape, kind, drawn_first=False), RULES[name].accept)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(("name", "kind"), RULE_KINDS)
def test_tree_rules_give_the_targets_law(name, kind, shape):
    for pair in PAIRS:
        assert law_of(name, pair, shape, kind).error(pair) <= LAW_TOLERANCE


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_block_verification_gives_the_targets_law_and_beats_token_by_token(length):
    for pair in PAIRS:
        drafts = draw_all(pair, chain_shape(length), DraftKind.WITH_REPLACEMENT)
        law = exact_law(drafts, RULES["block"].accept)
        assert law.error(pair) <= LAW_TOLERANCE
        assert law.mean_drafts >= exact_law(drafts, RULES["multi_step"].accept).mean_drafts - LAW_TOLERANCE


@pytest.mark.parametrize("pair", EDGE_PAIRS, ids=lambda pair: type(pair).__name__)
@pytest.mark.parametrize(("name", "kind"), [*RULE_KINDS, ("block", DraftKind.WITH_REPLACEMENT)])
def test_empty_residuals_zero_probabilities_and_sure_models_keep_the_law(pair, name, kind):
    drafts = draw_all(pair, CHAIN if name == "block" else SHAPES["2-1"], kind)
    assert exact_law(drafts, RULES[name].accept).error(pair) <= LAW_TOLERANCE


@pytest.mark.parametrize("name", ["multi_step", "recursive", "traversal", "block"])
def test_a_drafter_that_equals_the_target_is_always_accepted_on_a_chain(name):
    kind = sorted(RULES[name].kinds, key=lambda kind: kind.value)[0]
    law = exact_law(draw_all(EDGE_PAIRS[0], CHAIN, kind), RULES[name].accept)
    assert law.mean_drafts == pytest.approx(3, abs=1e-12)


def test_mean_accepted_drafts_of_the_toy_trees():
    """The figures of the rules' comparison on [2, 1, 1], mean over four pairs: 1.985, 2.139, 2.238."""
    means = {}
    for name, kind in (RULE_KINDS[0], RULE_KINDS[1], RULE_KINDS[2], RULE_KINDS[3]):
        laws = [law_of(name, pair, SHAPES["2-1-1"], kind) for pair in PAIRS]
        means[name] = sum(law.mean_drafts for law in laws) / len(laws)
    assert means["multi_step"] == pytest.approx(1.985, abs=5e-4)
    assert means["recursive"] == pytest.approx(2.139, abs=5e-4)
    assert means["traversal"] == pytest.approx(2.238, abs=5e-4)
    assert means["univer"] > means["traversal"]


def test_a_mixed_trees_drawn_child_may_be_tried_first_or_last():
    for pair in PAIRS:
        first, last = (
            exact_law(draw_all(pair, SHAPES["3-1"], DraftKind.MIXED, drawn_first=drawn_first), RULES["univer"].accept)
            for drawn_first in (True, False)
        )
        assert first.error(pair) <= LAW_TOLERANCE
        assert last.error(pair) <= LAW_TOLERANCE


def test_no_rule_accepts_more_of_a_deterministic_tree_than_the_paths_probabilities():
    for pair in PAIRS:
        drafts = draw_all(pair, SHAPES["2-2"], DraftKind.DETERMINISTIC)
        tokens = drafts.tree.token_ids[0].tolist()
        bound = 0.0
        for node in range(1, len(tokens)):
            chance, below = 1.0, node
            while below:
                above = SHAPES["2-2"].parents[below]
                chance *= drafts.target[0, above, tokens[below]].item()
                below = above
            bound += chance
        for name in ("match", "univer"):
            assert exact_law(drafts, RULES[name].accept).mean_drafts == pytest.approx(bound, abs=1e-12)


def ragged(pair: Pair, kind: DraftKind, shapes: list) -> Drafts:
    """Rows of several shapes in one batch, shorter ones padded with nodes that hold misleading tokens and laws."""
    parts = [draw_all(pair, shape, kind) for shape in shapes]
    size = max(shape.num_nodes for shape in shapes) + 2

    def padded(part: torch.Tensor, value: float) -> torch.Tensor:
        widths = (0, 0) * (part.dim() - 2) + (0, size - part.shape[1])
        return torch.nn.functional.pad(part, widths, value=value)

    trees = [part.tree for part in parts]
    num_nodes = torch.cat([tree.num_nodes for tree in trees])
    tree = tree_from_parents(
        torch.cat([padded(tree.token_ids, 2) for tree in trees]),
        torch.cat([padded(tree.parents, 0) for tree in trees]),
        num_nodes,
        max(shape.max_depth for shape in shapes),
    )
    if kind is not DraftKind.DETERMINISTIC:
        laws = [tree.draft_laws for tree in trees]
        tree = tree.with_draft_laws(
            type(laws[0])(
                kind=kind,
                probs=torch.cat([padded(law.probs, 0.25) for law in laws]),
                law_ids=torch.cat([padded(law.law_ids, 0) for law in laws]),
                is_drawn=torch.cat([padded(law.is_drawn, True) for law in laws]),
            )
        )
    weights = torch.cat([part.weights for part in parts]) / len(parts)
    return Drafts(pair, tree, weights, torch.cat([padded(part.target, 0.25) for part in parts]))


@pytest.mark.parametrize(("name", "kind"), RULE_KINDS)
def test_rows_of_different_shapes_share_a_batch(name, kind):
    shapes = [single_node_shape(), SHAPES["2-1"], expansion_shape([3]), expansion_shape([1, 1])]
    drafts = ragged(PAIRS[1], kind, shapes)
    law = exact_law(drafts, RULES[name].accept)
    assert law.error(PAIRS[1]) <= LAW_TOLERANCE
    alone = [exact_law(draw_all(PAIRS[1], shape, kind), RULES[name].accept).mean_drafts for shape in shapes]
    assert law.mean_drafts == pytest.approx(sum(alone) / len(alone), abs=1e-12)


def test_block_verification_of_chains_of_different_lengths():
    shapes = [single_node_shape(), chain_shape(2), chain_shape(3)]
    drafts = ragged(PAIRS[2], DraftKind.WITH_REPLACEMENT, shapes)
    drafts = replace(drafts, tree=replace(drafts.tree, max_trials=drafts.tree.max_depth))
    law = exact_law(drafts, RULES["block"].accept)
    assert law.error(PAIRS[2]) <= LAW_TOLERANCE
    alone = [
        exact_law(draw_all(PAIRS[2], shape, DraftKind.WITH_REPLACEMENT), RULES["block"].accept).mean_drafts
        for shape in shapes
    ]
    assert law.mean_drafts == pytest.approx(sum(alone) / len(alone), abs=1e-12)


def test_greedy_is_sample_and_match_at_temperature_zero():
    pair = EDGE_PAIRS[2]
    drafts = draw_all(pair, SHAPES["2-2"], DraftKind.WITHOUT_REPLACEMENT)
    greedy, matched = (exact_law(drafts, RULES[name].accept) for name in ("greedy", "match"))
    assert torch.equal(greedy.next_three, matched.next_three)
    assert greedy.mean_drafts == matched.mean_drafts
    assert greedy.error(pair) <= LAW_TOLERANCE
    assert isinstance(RULES["greedy"], Greedy)


def test_typical_keeps_the_longest_plausible_path_and_says_it_is_lossy():
    # Root law: tokens 1 and 2 plausible; node 1's law makes 3 implausible, node 2's makes 3 plausible.
    tree = shape_from_choices([[0], [1], [0, 0], [1, 0]]).tree(torch.tensor([[0, 1, 2, 3, 3]]))
    target = torch.tensor(
        [[[0.02, 0.50, 0.46, 0.02], [0.9, 0.05, 0.04, 0.01], [0.2, 0.2, 0.2, 0.4], *[[0.25] * 4] * 2]]
    )
    rule = rule_named("typical")
    accepted = rule.accept(tree, target, coins=None)  # type: ignore[arg-type]
    assert accepted.path_nodes[0, : accepted.num_accepted[0]].tolist() == [0, 2, 4]
    assert accepted.bonus.tolist() == [0]
    assert not rule.is_lossless
    assert [name for name, other in RULES.items() if not other.is_lossless] == ["typical"]
    # A threshold that nothing passes leaves the root and its argmax.
    strict = Typical(threshold=2.0, alpha=100.0).accept(tree, target, coins=None)  # type: ignore[arg-type]
    assert (strict.num_accepted.item(), strict.bonus.item()) == (1, 1)


def test_typical_prefers_the_more_probable_of_equally_long_paths():
    tree = shape_from_choices([[0], [1]]).tree(torch.tensor([[0, 1, 2]]))
    target = torch.tensor([[[0.1, 0.3, 0.5, 0.1], [0.25] * 4, [0.25] * 4]])
    accepted = Typical().accept(tree, target, coins=None)  # type: ignore[arg-type]
    assert accepted.path_nodes.tolist() == [[0, 2]]


def test_typical_differs_from_the_targets_law():
    drafts = draw_all(PAIRS[0], SHAPES["2-1"], DraftKind.DETERMINISTIC)
    assert exact_law(drafts, RULES["typical"].accept).error(PAIRS[0]) > 0.1


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("multi_step", DraftKind.WITHOUT_REPLACEMENT),
        ("multi_step", DraftKind.DETERMINISTIC),
        ("recursive", DraftKind.WITH_REPLACEMENT),
        ("traversal", DraftKind.MIXED),
        ("univer", DraftKind.WITH_REPLACEMENT),
        ("block", DraftKind.DETERMINISTIC),
    ],
)
def test_a_rule_refuses_trees_it_would_be_wrong_for(name, kind):
    drafts = draw_all(PAIRS[0], CHAIN, kind)
    with pytest.raises(ConfigError, match=f"{name}.*{kind.value}.*exact for"):
        exact_law(drafts, RULES[name].accept)


def test_block_verification_refuses_a_branching_tree():
    with pytest.raises(ConfigError, match="branching"):
        exact_law(draw_all(PAIRS[0], SHAPES["2-1"], DraftKind.WITH_REPLACEMENT), RULES["block"].accept)


def test_an_unknown_rule_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"'best'.*traversal"):
        rule_named("best")

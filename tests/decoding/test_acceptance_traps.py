"""Known ways of getting a rule wrong: each wrong variant errs by the size that is known of it, and the right one does not.

The sizes are those of the first toy pair; an error below 1e-12 is rounding.
"""

from dataclasses import replace

import pytest
import torch
from exact_laws import BranchCoins, Drafts, draw_all, exact_law
from torch import Tensor
from toy_models import PAIRS, VOCABULARY

from furcate.decoding.acceptance.accepted import Accepted, accept_path_to
from furcate.decoding.acceptance.coins import CounterCoins
from furcate.decoding.acceptance.match import follow
from furcate.decoding.acceptance.order import entries, post_order
from furcate.decoding.acceptance.registry import RULES
from furcate.decoding.acceptance.traversal import _Failures
from furcate.decoding.sampling import race
from furcate.decoding.tree import DraftKind, DraftLaws, Tree, tree_from_parents
from furcate.decoding.tree_shape import expansion_shape, shape_from_choices

PAIR = PAIRS[0]
ROUNDING = 1e-12
TWO = expansion_shape([2])


def error_of(drafts: Drafts, name: str) -> float:
    return exact_law(drafts, RULES[name].accept).error(drafts.pair)


def declared(drafts: Drafts, kind: DraftKind) -> Drafts:
    """The same trees, said to be of another kind."""
    assert drafts.tree.draft_laws is not None
    return replace(drafts, tree=drafts.tree.with_draft_laws(replace(drafts.tree.draft_laws, kind=kind)))


def keep_children(drafts: Drafts, kept: Tensor) -> Drafts:
    """Flat trees cut down to the children `kept` [rows, num_kept], in their order."""
    tree, laws = drafts.tree, drafts.tree.draft_laws
    assert laws is not None
    nodes = torch.nn.functional.pad(kept.sort(1).values, (1, 0))
    parents = torch.zeros_like(nodes)
    pruned = tree_from_parents(tree.token_ids.gather(1, nodes), parents, parents[:, 0] + nodes.shape[1], max_depth=1)
    laws = replace(laws, law_ids=parents, is_drawn=laws.is_drawn.gather(1, nodes))
    target = drafts.target.gather(1, nodes[:, :, None].expand(-1, -1, VOCABULARY))
    return replace(drafts, tree=pruned.with_draft_laws(laws), target=target)


@pytest.mark.parametrize("name", ["recursive", "traversal"])
def test_pruning_drawn_children_by_probability_is_biased_and_keeping_the_first_drawn_is_not(name):
    drafts = draw_all(PAIR, TWO, DraftKind.WITHOUT_REPLACEMENT)
    assert drafts.tree.draft_laws is not None
    chances = drafts.tree.draft_laws.probs[:, 0].gather(1, drafts.tree.token_ids)
    chances[:, 0] = -1
    by_probability = keep_children(drafts, chances.topk(1, dim=1).indices)
    by_order = keep_children(drafts, torch.ones_like(drafts.tree.num_nodes)[:, None])
    assert error_of(by_probability, name) == pytest.approx(0.044, abs=5e-4)
    assert error_of(by_order, name) <= ROUNDING


def test_most_probable_children_verified_as_if_they_were_drawn_are_biased():
    drafts = draw_all(PAIR, TWO, DraftKind.DETERMINISTIC)
    laws = DraftLaws(
        kind=DraftKind.WITHOUT_REPLACEMENT,
        probs=torch.tensor([[PAIR.draft(())]], dtype=torch.float64),
        law_ids=torch.zeros_like(drafts.tree.parents),
        is_drawn=torch.ones_like(drafts.tree.parents, dtype=torch.bool),
    )
    as_drawn = replace(drafts, tree=drafts.tree.with_draft_laws(laws))
    assert error_of(as_drawn, "recursive") == pytest.approx(0.067, abs=5e-4)
    assert error_of(drafts, "match") <= ROUNDING
    assert error_of(drafts, "univer") <= ROUNDING


def test_children_without_replacement_under_the_rule_for_replacement_are_biased():
    drafts = draw_all(PAIR, TWO, DraftKind.WITHOUT_REPLACEMENT)
    assert error_of(declared(drafts, DraftKind.WITH_REPLACEMENT), "multi_step") == pytest.approx(5e-4, abs=5e-5)
    assert error_of(drafts, "recursive") <= ROUNDING


def test_offering_a_repeated_token_once_is_biased_and_once_a_draw_is_not():
    drafts = draw_all(PAIR, TWO, DraftKind.WITH_REPLACEMENT)
    is_repeat = drafts.tree.token_ids[:, 1] == drafts.tree.token_ids[:, 2]
    once = replace(drafts, tree=replace(drafts.tree, num_nodes=drafts.tree.num_nodes - is_repeat.long()))
    assert error_of(once, "multi_step") == pytest.approx(2.4e-4, abs=1e-5)
    assert error_of(drafts, "multi_step") <= ROUNDING


def sample_per_path(tree: Tree, target: Tensor, coins: BranchCoins) -> Accepted:
    """Wrong: every path of a flat tree draws its own token after the root; the first path that matches wins."""
    root = torch.zeros_like(tree.num_nodes)
    drawn = []
    for _ in range(1, tree.token_ids.shape[1]):
        coins.picks.clear()
        drawn.append(coins.pick(root, target[:, 0]))
    coins.picks.clear()
    is_match = torch.stack(drawn, 1) == tree.token_ids[:, 1:]
    nodes = (is_match.byte().argmax(1) + 1) * is_match.any(1)
    after = coins.pick(nodes, target.gather(1, nodes[:, None, None].expand(-1, 1, VOCABULARY)).squeeze(1))
    return accept_path_to(tree, nodes, torch.where(nodes > 0, after, drawn[0]))


def test_drawing_a_token_per_path_instead_of_per_node_is_biased():
    drafts = draw_all(PAIR, TWO, DraftKind.DETERMINISTIC)
    first = exact_law(drafts, sample_per_path).next_three.sum((1, 2))
    assert (first - torch.tensor(PAIR.target(()))).abs().max() == pytest.approx(0.085, abs=1e-3)
    assert error_of(drafts, "match") <= ROUNDING


class PublicTraversal:
    """Wrong: after a failure alpha <- min(1, sum (alpha P - Q)+ / sum Q), at the root too, as published code does."""

    def accept(self, tree: Tree, target: Tensor, coins: BranchCoins) -> Accepted:
        failures = _Failures(tree, target)
        alphas = torch.ones_like(failures.alphas)
        for trial in range(target.shape[1] - 1):
            parents = failures.parents[:, trial]
            failures.alphas.copy_(alphas)
            before_P, before_Q = failures._laws_before(trial)
            failures.fail(trial)
            nodes = failures.nodes[:, trial]
            alphas.scatter_(1, nodes[:, None], failures.alphas.gather(1, nodes[:, None]))
            left = (before_P * entries(alphas, parents)[:, None] - before_Q).clamp(min=0).sum(1)
            alphas.scatter_(1, parents[:, None], left.clamp(max=1)[:, None])
        order = post_order(tree)
        chances = alphas.gather(1, order)
        chances[:, tree.token_ids.shape[1] - 1] = 1.0
        last_nodes = coins.first(order, chances)
        return accept_path_to(tree, last_nodes, coins.pick(last_nodes, failures.law_after(last_nodes)))


@pytest.mark.parametrize("widths", [[2], [2, 1]])
def test_the_published_update_of_traversals_alpha_is_biased(widths):
    errors = []
    for pair in PAIRS:
        drafts = draw_all(pair, expansion_shape(widths), DraftKind.WITHOUT_REPLACEMENT)
        errors.append(exact_law(drafts, PublicTraversal().accept).error(pair))
        assert error_of(drafts, "traversal") <= ROUNDING
    assert 3e-3 < max(errors) < 0.2


def test_choosing_among_drawn_nodes_of_a_mixed_tree_by_probability_is_biased_and_pruning_picked_ones_is_not():
    shape = shape_from_choices([[0], [1], [0, 0], [1, 0]])
    drafts = draw_all(PAIR, shape, DraftKind.MIXED, drawn_first=False)
    laws = drafts.tree.draft_laws
    assert laws is not None
    # Node 1 is picked, node 2 drawn. Dropping node 2 when it was improbable looks harmless.
    drawn_from = laws.probs[:, 0]
    is_probable = drawn_from.gather(1, drafts.tree.token_ids[:, 2:3])[:, 0] == drawn_from.amax(1)
    assert error_of(without_subtree(drafts, 2, ~is_probable), "univer") > 1e-2
    always = torch.ones_like(is_probable)
    for node in (1, 2):
        assert error_of(without_subtree(drafts, node, always), "univer") <= ROUNDING


def without_subtree(drafts: Drafts, node: int, where: Tensor) -> Drafts:
    """The trees without that child of the root and the node below it, in rows `where`. Subtrees are (1, 3) and (2, 4)."""
    tree = drafts.tree
    assert tree.draft_laws is not None
    kept = 3 - node
    order = torch.where(where[:, None], torch.tensor([0, kept, kept + 2, 0, 0]), torch.arange(5))
    num_nodes = torch.where(where, 3, 5)
    parents = torch.where(where[:, None], torch.tensor([0, 0, 1, 0, 0]), tree.parents)
    pruned = tree_from_parents(tree.token_ids.gather(1, order), parents, num_nodes, max_depth=2)
    laws = tree.draft_laws
    laws = replace(laws, law_ids=laws.law_ids.gather(1, order), is_drawn=laws.is_drawn.gather(1, order))
    target = drafts.target.gather(1, order[:, :, None].expand(-1, -1, VOCABULARY))
    return replace(drafts, tree=pruned.with_draft_laws(laws), target=target)


def test_a_number_that_float32_rounds_to_one_would_return_a_token_of_probability_zero():
    law = torch.tensor([[0.5, 0.5, 0.0]])
    number = 1 - 2.0**-26
    assert torch.searchsorted(law.cumsum(1), torch.tensor([[number]]).float(), right=True).item() > 1
    seeds = torch.arange(20_000)
    assert set(race(law.expand(20_000, -1), seeds, seeds).tolist()) == {0, 1}


def test_zero_padding_makes_no_phantom_acceptance():
    # Padding holds token 0 and the target is sure of token 0: only real nodes may be accepted.
    tree = tree_from_parents(torch.tensor([[3, 1, 0, 0]]), torch.zeros(1, 4, dtype=torch.long), torch.tensor([2]), 1)
    target = torch.zeros(1, 4, VOCABULARY, dtype=torch.float64)
    target[:, :, 0] = 1
    coins = CounterCoins(tree, torch.tensor([1]), torch.tensor([5]))
    by_rules = [RULES[name].accept(tree, target, coins) for name in ("match", "univer")]
    for accepted in (follow(tree, target.argmax(-1)), *by_rules):
        assert (accepted.num_accepted.item(), accepted.bonus.item()) == (1, 0)


def test_temperature_belongs_to_the_targets_law_and_not_to_the_drafts():
    """Any draft law keeps the target's; but a target law changed after acceptance was decided does not come out."""
    drafts = draw_all(PAIR, TWO, DraftKind.WITHOUT_REPLACEMENT)
    assert error_of(drafts, "recursive") <= ROUNDING

    def tempered_bonus(tree: Tree, target: Tensor, coins: BranchCoins) -> Accepted:
        flattened = target**0.5 / (target**0.5).sum(-1, keepdim=True)
        return RULES["recursive"].accept(tree, flattened, coins)

    assert exact_law(drafts, tempered_bonus).error(PAIR) > 1e-2

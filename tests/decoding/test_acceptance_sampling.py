"""Drafting and accepting with the real counter coins: row by row reproducible, and of the target's law.

The laws are proved without sampling elsewhere; here the numbers, the draws and the rules are run together.
"""

import pytest
import torch
from torch import Tensor
from toy_models import PAIRS, VOCABULARY, Pair

from furcate.decoding.acceptance.coins import CounterCoins
from furcate.decoding.acceptance.registry import RULES
from furcate.decoding.draws import draw_mixed, draw_with_replacement, draw_without_replacement
from furcate.decoding.randomness import Draw, node_seeds
from furcate.decoding.sampling import race
from furcate.decoding.tree import DraftKind, DraftLaws, Tree
from furcate.decoding.tree_shape import TreeShape, chain_shape, expansion_shape

PAIR = PAIRS[3]
NUM_ROWS = 20_000
RULE_KINDS = [
    ("multi_step", DraftKind.WITH_REPLACEMENT),
    ("recursive", DraftKind.WITHOUT_REPLACEMENT),
    ("traversal", DraftKind.WITHOUT_REPLACEMENT),
    ("univer", DraftKind.MIXED),
    ("block", DraftKind.WITH_REPLACEMENT),
    ("match", DraftKind.MIXED),
]


def laws_after(model, tokens: Tensor) -> Tensor:
    """The model's law after each row of tokens [R, depth], as [R, V] in float32."""
    contexts = [tuple(row) for row in tokens.tolist()]
    table = {context: torch.tensor(model(context)) for context in set(contexts)}
    return torch.stack([table[context] for context in contexts])


def drafted(pair: Pair, shape: TreeShape, kind: DraftKind, seeds: Tensor, positions: Tensor) -> tuple[Tree, Tensor]:
    """One tree a row, drawn with the counter's seeds, and the target's laws after its nodes."""
    num_rows = len(seeds)
    tokens = torch.zeros(num_rows, shape.num_nodes, dtype=torch.long)
    laws = torch.full((num_rows, shape.num_nodes, VOCABULARY), 1 / VOCABULARY)
    draft_seeds = node_seeds(seeds, positions, shape.num_nodes, Draw.DRAFT)
    target = torch.empty_like(laws)
    for node, children in enumerate(shape.children):
        path = [node]
        while path[0]:
            path.insert(0, shape.parents[path[0]])
        context = tokens[:, path[1:]]
        target[:, node] = laws_after(pair.target, context)
        if children:
            law = laws_after(pair.draft, context)
            if kind is DraftKind.MIXED:
                drawn = draw_mixed(law, len(children), draft_seeds[:, children[-1]])
            elif kind is DraftKind.WITH_REPLACEMENT:
                drawn = draw_with_replacement(law, draft_seeds[:, children])
            else:
                drawn = draw_without_replacement(law, draft_seeds[:, children])
            tokens[:, children], laws[:, node] = drawn.token_ids, drawn.law
    tree = shape.tree(tokens)
    is_last = torch.tensor(
        [node > 0 and node == shape.children[shape.parents[node]][-1] for node in range(len(tokens[0]))]
    )
    is_drawn = is_last if kind is DraftKind.MIXED else torch.arange(shape.num_nodes) > 0
    draft_laws = DraftLaws(kind=kind, probs=laws, law_ids=tree.parents, is_drawn=is_drawn.expand_as(tokens))
    return tree.with_draft_laws(draft_laws), target


def emitted(pair: Pair, name: str, kind: DraftKind, seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Three tokens a row, those after the bonus by plain sampling; and how many came from the step."""
    shape = chain_shape(2) if name == "block" else expansion_shape([2, 2])
    tree, target = drafted(pair, shape, kind, seeds, positions)
    accepted = RULES[name].accept(tree, target, CounterCoins(tree, seeds, positions))
    tokens = tree.token_ids.gather(1, accepted.path_nodes).roll(-1, 1)
    tokens = tokens.scatter(1, accepted.num_accepted[:, None] - 1, accepted.bonus[:, None])
    return plain(pair, seeds, positions, tokens, accepted.num_accepted), accepted.num_accepted


def plain(pair: Pair, seeds: Tensor, positions: Tensor, given: Tensor, num_given: Tensor) -> Tensor:
    """Plain sampling of three tokens after `positions`, but for the first `num_given`, which are given."""
    tokens = given.clone()
    for place in range(3):
        token = race(laws_after(pair.target, tokens[:, :place]), seeds, positions + 1 + place)
        tokens[:, place] = torch.where(place < num_given, tokens[:, place], token)
    return tokens


def p_value(counts: Tensor, expected: Tensor) -> float:
    """Upper tail of chi-square, cells below 5 expected counts joined."""
    is_small = expected < 5
    cells = torch.cat([counts[~is_small], counts[is_small].sum()[None]])
    means = torch.cat([expected[~is_small], expected[is_small].sum()[None]])
    is_used = means > 0
    chi_square = ((cells - means)[is_used] ** 2 / means[is_used]).sum()
    degrees = is_used.sum().double() - 1
    return torch.special.gammaincc(degrees / 2, chi_square / 2).item()


@pytest.mark.parametrize(("name", "kind"), RULE_KINDS)
def test_sampled_steps_have_the_targets_law(name, kind):
    seeds = torch.arange(NUM_ROWS)
    tokens, num_accepted = emitted(PAIR, name, kind, seeds, torch.full_like(seeds, 17))
    assert num_accepted.double().mean() > 1.3
    cells = tokens[:, 0] * VOCABULARY**2 + tokens[:, 1] * VOCABULARY + tokens[:, 2]
    counts = torch.bincount(cells, minlength=VOCABULARY**3).double()
    # The seeds are fixed, so this cannot flake; a bias of 0.01 in one cell of these would give p < 1e-9.
    assert p_value(counts, PAIR.next_three.flatten() * NUM_ROWS) > 1e-3


def test_the_chi_square_test_sees_a_bias_of_one_percent():
    law = PAIR.next_three.flatten()
    biased = law.clone()
    biased[law.argmax()] -= 0.01
    biased[law.argmin()] += 0.01
    assert p_value(biased * NUM_ROWS, law * NUM_ROWS) < 1e-9


@pytest.mark.parametrize(("name", "kind"), RULE_KINDS)
def test_a_rows_tokens_do_not_depend_on_its_batch(name, kind):
    seeds, positions = torch.arange(12), torch.arange(12) * 3
    whole, _ = emitted(PAIR, name, kind, seeds, positions)
    shuffled = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    assert torch.equal(emitted(PAIR, name, kind, seeds[shuffled], positions[shuffled])[0], whole[shuffled])
    for row in range(12):
        alone, _ = emitted(PAIR, name, kind, seeds[row : row + 1], positions[row : row + 1])
        assert torch.equal(alone[0], whole[row])


def test_sample_and_match_emits_the_text_of_plain_sampling_whatever_the_tree():
    seeds, positions = torch.arange(500), torch.arange(500) % 7
    expected = plain(PAIR, seeds, positions, torch.zeros(500, 3, dtype=torch.long), torch.zeros_like(seeds))
    for kind in (DraftKind.MIXED, DraftKind.WITHOUT_REPLACEMENT):
        tokens, num_accepted = emitted(PAIR, "match", kind, seeds, positions)
        assert torch.equal(tokens, expected)
        assert num_accepted.unique().tolist() == [1, 2, 3]


def test_coins_follow_their_probabilities_and_a_zero_one_never_falls():
    tree = chain_shape(3).tree(torch.zeros(4000, 4, dtype=torch.long))
    coins = CounterCoins(tree, torch.arange(4000), torch.zeros(4000, dtype=torch.long))
    trial = torch.full((4000,), 2)
    assert not coins.flip(trial, torch.zeros(4000)).any()
    assert coins.flip(trial, torch.ones(4000)).all()
    # 4.5 standard errors of a share of 0.3 among 4000.
    assert abs(coins.flip(trial, torch.full((4000,), 0.3)).double().mean() - 0.3) < 4.5 * (0.21 / 4000) ** 0.5
    order = torch.tensor([3, 1, 0]).expand(4000, -1)
    first = coins.first(order, torch.tensor([0.5, 0.5, 1.0]).expand(4000, -1))
    shares = torch.bincount(first, minlength=4).double() / 4000
    assert torch.allclose(shares, torch.tensor([0.25, 0.25, 0.0, 0.5]).double(), atol=4.5 * (0.25 / 4000) ** 0.5)


@pytest.mark.parametrize("name", RULES)
def test_rules_read_nothing_back_off_the_cpu(name):
    """Tensors of the meta device hold no values: reading one raises."""
    shape = chain_shape(3) if name == "block" else expansion_shape([2, 2])
    tokens = torch.zeros(2, shape.num_nodes, dtype=torch.long, device="meta")
    target = torch.empty(2, shape.num_nodes, VOCABULARY, device="meta")
    seeds = torch.zeros(2, dtype=torch.long, device="meta")
    for kind in RULES[name].kinds:
        tree = shape.tree(tokens)
        if kind is not DraftKind.DETERMINISTIC:
            laws = DraftLaws(kind=kind, probs=target, law_ids=tree.parents, is_drawn=tree.depths > 0)
            tree = tree.with_draft_laws(laws)
        accepted = RULES[name].accept(tree, target, CounterCoins(tree, seeds, seeds))
        assert accepted.path_nodes.shape == (2, shape.max_depth + 1)

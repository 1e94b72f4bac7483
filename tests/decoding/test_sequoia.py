"""Sequoia's dynamic programme against every tree, and its choice of size."""

import itertools
from functools import cache

import pytest

from furcate.builder.errors import ConfigError
from furcate.decoding.sequoia import StepTimes, best_budget, optimal_shape, plans, predicted_tau
from furcate.decoding.tree_shape import chain_shape, expansion_shape, shape_from_accuracies, single_node_shape

RATES = {
    "steady": [[0.5, 0.2, 0.1, 0.05]],
    "by depth": [[0.6, 0.2, 0.05], [0.3, 0.3, 0.2], [0.8, 0.1]],
    "late ranks better": [[0.1, 0.6, 0.2]],
    "useless second": [[0.7, 0.0, 0.2], [0.4, 0.0]],
}
Tree = tuple["Tree", ...]


@cache
def all_trees(size: int, depth: int) -> list[Tree]:
    """Every ordered tree of `size` nodes and at most `depth` levels below the top, as nested tuples of children."""
    return all_forests(size - 1, depth)


@cache
def all_forests(size: int, depth: int) -> list[Tree]:
    if size == 0:
        return [()]
    if depth == 0:
        return []
    return [
        (first, *others)
        for first_size in range(1, size + 1)
        for first, others in itertools.product(all_trees(first_size, depth - 1), all_forests(size - first_size, depth))
    ]


def tau_of(tree: Tree, rates: list[list[float]], depth: int = 0) -> float:
    row = rates[min(depth, len(rates) - 1)]
    below = (row[rank] * tau_of(child, rates, depth + 1) for rank, child in enumerate(tree) if rank < len(row))
    return 1 + sum(below)


def test_all_trees_are_counted_by_catalan_numbers():
    assert [len(all_trees(size, 8)) for size in range(1, 10)] == [1, 1, 2, 5, 14, 42, 132, 429, 1430]


@pytest.mark.parametrize("rates", RATES.values(), ids=RATES)
@pytest.mark.parametrize("max_depth", [1, 2, 8])
def test_the_programme_equals_the_best_of_all_trees_up_to_nine_nodes(rates, max_depth):
    for budget in range(1, 10):
        best = max(tau_of(tree, rates) for size in range(1, budget + 1) for tree in all_trees(size, max_depth))
        shape = optimal_shape(rates, budget, max_depth)
        assert predicted_tau(shape, rates) == pytest.approx(best, rel=1e-12)
        assert shape.num_nodes <= budget
        assert shape.max_depth <= max_depth


def test_children_are_always_there_with_their_earlier_siblings():
    shape = optimal_shape(RATES["late ranks better"], 9, 4)
    for children in shape.children:
        assert [shape.ranks[child] for child in children] == list(range(len(children)))


def test_falling_rates_give_the_greedy_tree_also_for_a_large_budget():
    rates = [[0.55, 0.17, 0.08, 0.05, 0.03]]
    shape = optimal_shape(rates, 64, 8)
    greedy = shape_from_accuracies(rates * 8, 64)
    assert predicted_tau(shape, rates) == pytest.approx(predicted_tau(greedy, rates), rel=1e-12)


def test_predicted_tau_by_hand():
    assert predicted_tau(single_node_shape(), [[0.5]]) == 1
    assert predicted_tau(chain_shape(3), [[0.5]]) == 1 + 0.5 + 0.25 + 0.125
    assert predicted_tau(expansion_shape([2, 1]), [[0.5, 0.25], [0.1]]) == pytest.approx(1 + 0.75 + 0.075)
    assert predicted_tau(expansion_shape([3]), [[0.5]]) == 1.5


def test_nodes_that_add_nothing_are_left_out():
    assert optimal_shape([[0.5, 0.0]], 9, 2).paths == chain_shape(2).paths
    assert optimal_shape([[0.0]], 9, 3).paths == single_node_shape().paths


def test_the_chosen_size_is_the_fastest_of_all_sizes_and_depths():
    rates = RATES["by depth"]
    times = StepTimes(verify_ms={1: 10.0, 2: 10.5, 4: 11.0, 6: 14.0, 9: 30.0}, draft_ms=0.8)
    by_hand = {
        budget: max(
            tau_of(tree, rates) / times.step_ms(budget, depth)
            for depth in range(budget)
            for size in range(depth + 1, budget + 1)
            for tree in all_trees(size, depth)
            if depth == 0 or tree not in all_trees(size, depth - 1)
        )
        for budget in times.verify_ms
    }
    found = plans(rates, times, max_depth=8)
    assert [plan.budget for plan in found] == [1, 2, 4, 6, 9]
    for plan in found:
        assert plan.tokens_per_second == pytest.approx(1000 * by_hand[plan.budget], rel=1e-12)
    assert best_budget(rates, times, max_depth=8).budget == max(by_hand, key=lambda budget: by_hand[budget])


def test_plain_decoding_is_chosen_where_trees_lose():
    times = StepTimes(verify_ms={1: 10.0, 2: 12.0, 8: 20.0}, draft_ms=1.0)
    assert best_budget([[0.05, 0.01]], times, max_depth=4).shape.num_nodes == 1


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: optimal_shape([[0.5]], 0, 1), "at least 1"),
        (lambda: optimal_shape([], 4, 1), "at least one depth"),
        (lambda: optimal_shape([[0.7, 0.7]], 4, 1), "together 1 at most"),
        (lambda: optimal_shape([[-0.1]], 4, 1), "between 0 and 1"),
        (lambda: optimal_shape([[float("nan")]], 4, 1), "between 0 and 1"),
        (lambda: best_budget([[0.5]], StepTimes(verify_ms={}), 3), "table is empty"),
    ],
)
def test_bad_rates_and_sizes_are_refused_with_a_sentence(call, words):
    with pytest.raises(ConfigError, match=words):
        call()

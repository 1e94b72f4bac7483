"""Static shapes: order, closure, shipped lists, and growth from measured accuracies."""

import itertools

import pytest
import torch

from furcate.builder.errors import ConfigError
from furcate.decoding.tree_shape import (
    cartesian_shape,
    chain_shape,
    expansion_shape,
    named_shape,
    shape_from_accuracies,
    shape_from_choices,
    shipped_shapes,
    single_node_shape,
)


def test_choices_in_any_order_give_the_hand_drawn_shape():
    #  root -> [0] -> [0,0] -> [0,0,2]
    #       -> [3]
    shape = shape_from_choices([[0, 0, 2], [3], [0], [0, 0]])
    assert shape.paths == ((), (0,), (3,), (0, 0), (0, 0, 2))
    assert shape.parents == (0, 0, 0, 1, 3)
    assert shape.depths == (0, 1, 1, 2, 3)
    assert shape.ranks == (0, 0, 3, 0, 2)
    assert shape.levels == ((0,), (1, 2), (3,), (4,))
    assert shape.children == ((1, 2), (3,), (), (4,), ())
    assert shape.max_depth == 3
    assert shape.max_trials == 4


def test_tree_of_a_shape_has_its_tensors_in_every_row():
    tokens = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    tree = shape_from_choices([[0], [1], [0, 0]]).tree(tokens)
    assert torch.equal(tree.token_ids, tokens)
    assert tree.parents.tolist() == [[0, 0, 0, 1]] * 2
    assert tree.depths.tolist() == [[0, 1, 1, 2]] * 2
    assert tree.ancestor_mask[1].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]
    assert tree.num_nodes.tolist() == [4, 4]
    assert (tree.max_depth, tree.max_trials) == (2, 3)


def test_chain_single_node_and_expansion():
    assert chain_shape(3).parents == (0, 0, 1, 2)
    assert chain_shape(3).max_trials == 3
    assert single_node_shape().parents == (0,)
    assert single_node_shape().max_depth == single_node_shape().max_trials == 0
    wide = expansion_shape([1, 1, 3, 1, 1])
    assert [len(level) for level in wide.levels] == [1, 1, 1, 3, 3, 3]
    assert wide.parents == (0, 0, 1, 2, 2, 2, 3, 4, 5, 6, 7, 8)


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ([[0], [1, 0]], "add \\[1\\]"),
        ([[0], [0]], "twice"),
        ([[0], []], "ranks >= 0"),
        ([[-1]], "ranks >= 0"),
        ([[0.0]], "ranks >= 0"),
        ([[True]], "ranks >= 0"),
        ([0], "ranks >= 0"),
        (["0"], "ranks >= 0"),
    ],
)
def test_bad_choices_are_refused_with_a_sentence(choices, words):
    with pytest.raises(ConfigError, match=words):
        shape_from_choices(choices)


def test_every_shipped_list_loads_and_has_its_published_size():
    sizes = {name: (named_shape(name).num_nodes, named_shape(name).max_depth) for name in shipped_shapes()}
    assert sizes.pop("eagle_mc_sim_7b_63") == (26, 5)
    assert sizes.pop("vicuna_33b_stage1") == (64, 3)
    assert len(sizes) == 8
    assert set(sizes.values()) == {(64, 4)}


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"'mc'.*mc_sim_7b_63.*zephyr_stage2"):
        named_shape("mc")


def expected_accepted(paths, accuracies) -> float:
    total = 0.0
    for path in paths:
        chance = 1.0
        for depth, rank in enumerate(path):
            chance *= accuracies[depth][rank]
        total += chance
    return total


def test_growth_equals_the_best_of_all_trees():
    accuracies = [[0.5, 0.3, 0.1], [0.2, 0.6, 0.1]]  # a later rank may be the better one
    every = [path for depth in (1, 2) for path in itertools.product(range(3), repeat=depth)]
    for budget in range(1, 6):
        closed = (
            subset
            for subset in itertools.combinations(every, budget - 1)
            if all(len(path) == 1 or path[:-1] in subset for path in subset)
        )
        best = max(expected_accepted(subset, accuracies) for subset in closed)
        grown = shape_from_accuracies(accuracies, budget)
        assert grown.num_nodes == budget
        assert expected_accepted(grown.paths[1:], accuracies) == pytest.approx(best, rel=1e-12)


def test_cartesian_product_is_whole_under_a_large_budget_and_pruned_under_a_small_one():
    accuracies = [[0.6, 0.2, 0.1], [0.5, 0.2, 0.1]]
    assert cartesian_shape([2, 3], accuracies, budget=100).paths == expansion_shape([2, 3]).paths
    assert cartesian_shape([2, 3], accuracies, budget=4).paths == ((), (0,), (1,), (0, 0))


def test_paths_of_no_chance_are_left_out():
    assert shape_from_accuracies([[1.0, 0.0], [0.0, 0.5]], budget=10).paths == ((), (0,), (0, 1))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: chain_shape(0), "1 or more"),
        (lambda: expansion_shape([]), "one or more widths"),
        (lambda: expansion_shape([2, 0]), "one or more widths"),
        (lambda: shape_from_accuracies([[0.5]], 0), "1 or more"),
        (lambda: shape_from_accuracies([[1.5]], 3), "between 0 and 1"),
        (lambda: shape_from_accuracies([[float("nan")]], 3), "between 0 and 1"),
        (lambda: cartesian_shape([2], [[0.5]], 3), "cover 1 ranks"),
        (lambda: cartesian_shape([1, 1], [[0.5]], 3), "2 depths but accuracies for 1"),
    ],
)
def test_bad_sizes_are_refused_with_a_sentence(call, words):
    with pytest.raises(ConfigError, match=words):
        call()

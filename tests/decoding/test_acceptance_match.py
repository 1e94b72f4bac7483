"""Following the target's own choices: hand-drawn walks, a plain walk as reference, and supersets of trees."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from furcate.decoding.acceptance.match import follow
from furcate.decoding.tree import tree_from_parents
from furcate.decoding.tree_shape import chain_shape, single_node_shape

VOCABULARY = 3


def tree_of(parents: list[int], tokens: list[int], num_padding: int = 0):
    pad = [0] * num_padding
    return tree_from_parents(
        torch.tensor([tokens + pad]), torch.tensor([parents + pad]), torch.tensor([len(parents)]), len(parents) - 1
    )


def test_hand_drawn_walk():
    tree = tree_of([0, 0, 0, 1, 1], [5, 7, 8, 9, 6])
    accepted = follow(tree, torch.tensor([[7, 6, 0, 0, 4]]))
    assert accepted.num_accepted.tolist() == [3]
    assert accepted.path_nodes[0, :3].tolist() == [0, 1, 4]
    assert accepted.path_nodes[0, 3:].tolist() == [4, 4]
    assert accepted.bonus.tolist() == [4]


def test_nothing_matches_and_single_node():
    tree = tree_of([0, 0], [5, 7])
    accepted = follow(tree, torch.tensor([[8, 8]]))
    assert (accepted.num_accepted.item(), accepted.bonus.item(), accepted.path_nodes.tolist()) == (1, 8, [[0, 0]])
    alone = follow(single_node_shape().tree(torch.tensor([[5]])), torch.tensor([[3]]))
    assert (alone.num_accepted.item(), alone.bonus.item(), alone.path_nodes.tolist()) == (1, 3, [[0]])


def test_padding_of_token_zero_is_never_accepted():
    # Padding holds token 0 and parent 0: choosing token 0 after the root must not walk into it.
    tree = tree_of([0, 0], [5, 7], num_padding=3)
    accepted = follow(tree, torch.zeros(1, 5, dtype=torch.long))
    assert accepted.num_accepted.item() == 1


def test_a_root_token_equal_to_its_own_choice_is_not_a_child_of_itself():
    accepted = follow(tree_of([0, 0], [7, 8]), torch.tensor([[7, 7]]))
    assert (accepted.num_accepted.item(), accepted.bonus.item()) == (1, 7)


def test_of_equal_children_the_first_counts():
    # Nodes 1 and 2 both hold 7; only node 2 has the child that would match.
    tree = tree_of([0, 0, 0, 2], [5, 7, 7, 9])
    accepted = follow(tree, torch.tensor([[7, 9, 9, 0]]))
    assert accepted.path_nodes[0, :2].tolist() == [0, 1]
    assert accepted.num_accepted.item() == 2
    assert accepted.bonus.item() == 9


def test_rows_are_independent():
    tree = chain_shape(2).tree(torch.tensor([[5, 6, 7], [5, 6, 7], [5, 6, 7]]))
    accepted = follow(tree, torch.tensor([[6, 7, 8], [6, 0, 8], [0, 7, 8]]))
    assert accepted.num_accepted.tolist() == [3, 2, 1]
    assert accepted.bonus.tolist() == [8, 0, 0]


def walk(parents, tokens, choices) -> list[int]:
    path = [0]
    while True:
        below = [n for n in range(1, len(parents)) if parents[n] == path[-1] and tokens[n] == choices[path[-1]]]
        if not below:
            return path
        path.append(below[0])


@st.composite
def random_trees(draw: st.DrawFn):
    size = draw(st.integers(1, 20))
    parents = [0] + [draw(st.integers(0, node - 1)) for node in range(1, size)]
    tokens = [draw(st.integers(0, VOCABULARY - 1)) for _ in range(size)]
    choices = [draw(st.integers(0, VOCABULARY - 1)) for _ in range(size)]
    return parents, tokens, choices


@given(random_trees(), st.integers(0, 3))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_equals_a_plain_walk(drawn, num_padding):
    parents, tokens, choices = drawn
    accepted = follow(tree_of(parents, tokens, num_padding), torch.tensor([choices + [0] * num_padding]))
    path = walk(parents, tokens, choices)
    assert accepted.num_accepted.item() == len(path)
    assert accepted.path_nodes[0, : len(path)].tolist() == path
    assert accepted.path_nodes[0, len(path) :].unique().tolist() in ([], [path[-1]])
    assert accepted.bonus.item() == choices[path[-1]]


@given(
    st.sets(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=4).map(tuple), max_size=14),
    st.data(),
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_a_superset_tree_is_never_accepted_less(drawn, data):
    """Trees are sets of token paths; a model is a choice per path; both trees are verified with the same model."""
    paths = {path[:depth] for path in drawn for depth in range(1, len(path) + 1)}
    fewer = {path for path in paths if data.draw(st.booleans())}
    fewer = {path for path in fewer if all(path[:depth] in fewer for depth in range(1, len(path)))}
    model = {path: data.draw(st.integers(0, VOCABULARY - 1)) for path in sorted(paths | {()})}
    counts = []
    for nodes in (fewer, paths):
        ordered = sorted(nodes | {()}, key=lambda path: (len(path), path))
        parents = [ordered.index(path[:-1]) for path in ordered]
        tree = tree_of(parents, [path[-1] if path else 0 for path in ordered])
        counts.append(follow(tree, torch.tensor([[model[path] for path in ordered]])).num_accepted.item())
    assert counts[0] <= counts[1]

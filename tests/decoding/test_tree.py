"""Tree tensors against hand-drawn trees, and against a walk up the parents for random ones."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from furcate.decoding.tree import ancestors_from_parents, pack_mask, tree_from_parents, unpack_mask

# Row 0:  0 -> 1 -> 3 -> 4      Row 1:  0 -> 1, 2;  nodes 3 to 5 are padding
#           -> 2 -> 5
PARENTS = torch.tensor([[0, 0, 0, 1, 3, 2], [0, 0, 0, 0, 0, 0]])
NUM_NODES = torch.tensor([6, 3])
MASKS = torch.tensor(
    [
        [
            [1, 0, 0, 0, 0, 0],
            [1, 1, 0, 0, 0, 0],
            [1, 0, 1, 0, 0, 0],
            [1, 1, 0, 1, 0, 0],
            [1, 1, 0, 1, 1, 0],
            [1, 0, 1, 0, 0, 1],
        ],
        [
            [1, 0, 0, 0, 0, 0],
            [1, 1, 0, 0, 0, 0],
            [1, 0, 1, 0, 0, 0],
            [0, 0, 0, 0, 0, 0],
            [0, 0, 0, 0, 0, 0],
            [0, 0, 0, 0, 0, 0],
        ],
    ]
).bool()


@st.composite
def parent_lists(draw: st.DrawFn) -> list[int]:
    size = draw(st.integers(1, 70))
    return [0] + [draw(st.integers(0, node - 1)) for node in range(1, size)]


def test_hand_drawn_trees():
    tree = tree_from_parents(torch.zeros_like(PARENTS), PARENTS, NUM_NODES, max_depth=3)
    assert torch.equal(tree.ancestor_mask, MASKS)
    assert tree.depths.tolist() == [[0, 1, 1, 2, 3, 2], [0, 1, 1, 0, 0, 0]]
    assert tree.is_node.sum(1).tolist() == [6, 3]


def test_single_node():
    tree = tree_from_parents(torch.tensor([[7]]), torch.tensor([[0]]), torch.tensor([1]), max_depth=0)
    assert tree.ancestor_mask.tolist() == [[[True]]]
    assert tree.depths.tolist() == [[0]]


@given(parent_lists())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_ancestors_equal_a_walk_up_the_parents(parents):
    mask = ancestors_from_parents(torch.tensor([parents]), max_depth=len(parents) - 1)[0]
    for node in range(len(parents)):
        expected, above = {0, node}, node
        while above:
            above = parents[above]
            expected.add(above)
        assert set(mask[node].nonzero().flatten().tolist()) == expected


@given(parent_lists())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_unpacking_gives_the_packed_mask(parents):
    mask = ancestors_from_parents(torch.tensor([parents]), max_depth=len(parents) - 1)
    words = pack_mask(mask)
    assert words.shape == (1, len(parents), -(-len(parents) // 32))
    assert torch.equal(unpack_mask(words, len(parents)), mask)


@pytest.mark.parametrize(
    ("column", "word", "value"), [(0, 0, 1), (5, 0, 32), (31, 0, -(2**31)), (32, 1, 1), (63, 1, -(2**31))]
)
def test_packed_words_are_least_significant_bit_first(column, word, value):
    mask = torch.zeros(1, 64, 64, dtype=torch.bool)
    mask[0, 9, column] = True
    words = pack_mask(mask)
    assert words.dtype == torch.int32
    assert words[0, 9, word] == value
    assert words.count_nonzero() == 1

"""The tree of kept pages, drawn by hand: pages of 2 rows, each row made with the token after it."""

import pytest

from furcate.decoding.prefix_tree import PrefixNode, PrefixTree


@pytest.fixture
def tree() -> PrefixTree:
    """The drawing of the module's docstring: [1 2 3 4 5] and [1 2 3 9 9] on the pages 10, 11 and 12."""
    tree = PrefixTree(page_size=2, num_next=1)
    keep(tree, [1, 2, 3, 4, 5], [10, 11])
    keep(tree, [1, 2, 3, 9, 9], [20, 12])
    return tree


def keep(tree: PrefixTree, token_ids: list[int], pages: list[int]) -> list[int]:
    """Inserts a whole text as a sequence does that then ends; the pages that were of no use."""
    useless, path = [], [tree.root]
    for place, page in enumerate(pages):
        num_rows = min(2, len(token_ids) - 1 - 2 * place)
        node, unused = tree.insert(path[-1], token_ids, 2 * place, page, num_rows)
        useless += unused
        if node is not None and num_rows == 2:
            tree.use(node)
            path.append(node)
    for node in reversed(path[1:]):
        tree.let_go(node)
    return useless


def path_of(tree: PrefixTree, token_ids: list[int]) -> list[PrefixNode]:
    path: list[PrefixNode] = []
    while (child := tree.full_child(path[-1] if path else tree.root, token_ids, 2 * len(path))) is not None:
        path.append(child)
    return path


def test_a_shared_page_is_kept_once_and_texts_part_where_they_differ(tree: PrefixTree) -> None:
    assert [node.page for node in path_of(tree, [1, 2, 3, 4, 5, 6])] == [10, 11]
    assert [node.page for node in path_of(tree, [1, 2, 3, 9, 9])] == [10, 12]
    assert tree.num_pages == tree.num_idle == 3


def test_the_token_after_a_page_counts(tree: PrefixTree) -> None:
    """Row 1 was made with token 3 behind it; behind it is 7 now, and so only row 0 is the same."""
    assert path_of(tree, [1, 2, 7, 4, 5]) == []
    child, num_rows = tree.longest_child(tree.root, [1, 2, 7, 4, 5], 0)
    assert child is not None
    assert (child.page, num_rows) == (10, 1)
    assert path_of(tree, [1, 2]) == []


def test_without_a_head_that_reads_ahead_it_does_not_count() -> None:
    tree = PrefixTree(page_size=2, num_next=0)
    node, _ = tree.insert(tree.root, [1, 2, 3], 0, 10, 2)
    assert tree.full_child(tree.root, [1, 2, 7], 0) is node
    assert tree.longest_child(tree.root, [1, 8], 0) == (node, 1)
    assert tree.longest_child(tree.root, [8], 0) == (None, 0)


def test_a_page_that_is_there_already_or_shorter_is_of_no_use(tree: PrefixTree) -> None:
    assert keep(tree, [1, 2, 3, 4, 5], [30, 31]) == [30, 31]
    assert keep(tree, [1, 2, 3, 4], [30, 31]) == [30, 31]
    assert keep(tree, [7, 8], [40]) == []
    assert keep(tree, [7, 8, 9], [41]) == [40]
    assert [node.page for node in path_of(tree, [7, 8, 9])] == [41]
    assert tree.num_pages == tree.num_idle == 4


def test_the_least_recently_used_goes_first_and_children_before_parents(tree: PrefixTree) -> None:
    path = path_of(tree, [1, 2, 3, 4, 5])
    for node in path:
        tree.use(node)
    assert tree.num_idle == 1
    assert tree.evict() == 12
    for node in reversed(path):
        tree.let_go(node)
    keep(tree, [5, 6, 7], [50])
    assert [tree.evict() for _ in range(3)] == [11, 10, 50]
    assert tree.num_pages == tree.num_idle == 0
    assert not tree.root.children

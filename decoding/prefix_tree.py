"""Pages of K/V kept under the tokens that they hold: a radix tree whose edges are pages.

A node is one page: `num_rows` cache rows behind those of its parents. Its key is the rows' tokens, and where a head's row also
depends on the token after it (EAGLE: the row of position i is made of the feature at i and the token at i + 1), that next token
too. Pages of 2 rows, next token included, the texts [1 2 3 4 5] and [1 2 3 9 9]:

    root -- (1 2 3) --+-- (3 4 5)
                      +-- (3 9 9)

Nodes that no live sequence uses are idle: they are kept until their pages are needed, and go by least recent use. A node is
never less recently used than its children: a sequence uses a whole path, and lets go of it from the deepest node up.
"""

from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence as Tokens


class PrefixNode:
    """One page of the tree. The root has none."""

    __slots__ = ("children", "key", "num_rows", "num_users", "page", "parent")

    def __init__(self, parent: "PrefixNode | None", key: tuple[int, ...], num_rows: int, page: int) -> None:
        self.parent = parent
        self.key = key
        self.num_rows = num_rows
        self.page = page
        self.num_users = 0
        self.children: dict[int, dict[tuple[int, ...], PrefixNode]] = {}
        """By first token, then by key."""

    def beginning_with(self, token_id: int) -> Iterator["PrefixNode"]:
        """The children whose text begins with this token."""
        return iter(self.children.get(token_id, {}).values())


class PrefixTree:
    """The kept pages. `num_next` is 1 where rows depend on the token after them, else 0."""

    def __init__(self, page_size: int, num_next: int) -> None:
        self.page_size = page_size
        self.num_next = num_next
        self.root = PrefixNode(None, (), 0, 0)
        self.num_pages = 0
        self._idle: OrderedDict[PrefixNode, None] = OrderedDict()
        """The least recently used first."""

    @property
    def num_idle(self) -> int:
        """Pages that no live sequence uses."""
        return len(self._idle)

    def full_child(self, node: PrefixNode, token_ids: Tokens[int], start: int) -> PrefixNode | None:
        """The child whose whole page holds the tokens from `start` on."""
        key = tuple(token_ids[start : start + self.page_size + self.num_next])
        child = node.children.get(key[0], {}).get(key) if key else None
        return child if child is not None and child.num_rows == self.page_size else None

    def longest_child(self, node: PrefixNode, token_ids: Tokens[int], start: int) -> tuple[PrefixNode | None, int]:
        """The child that shares most rows with the tokens from `start` on, and how many it shares."""
        wanted = tuple(token_ids[start : start + self.page_size + self.num_next])
        best, most = None, 0
        for child in node.beginning_with(wanted[0]) if wanted else ():
            num_rows = min(_num_shared(child.key, wanted) - self.num_next, child.num_rows)
            if num_rows > most:
                best, most = child, num_rows
        return best, most

    def insert(
        self, node: PrefixNode, token_ids: Tokens[int], start: int, page: int, num_rows: int
    ) -> tuple[PrefixNode | None, list[int]]:
        """The child of `node` for these rows, and pages that are of no use any more: the one given, or shorter ones.

        A child that was there already keeps its own page. None where a longer one makes a part of a page useless.
        """
        key = tuple(token_ids[start : start + num_rows + self.num_next])
        same = node.children.get(key[0], {}).get(key)
        if same is not None and same.num_rows == num_rows:
            return same, [page]
        if num_rows < self.page_size and any(_begins(child.key, key) for child in node.beginning_with(key[0])):
            return None, [page]
        shorter = [child for child in node.beginning_with(key[0]) if child.num_users == 0 and _begins(key, child.key)]
        for child in shorter:
            del self._idle[child]
            self._remove(child)
        child = PrefixNode(node, key, num_rows, page)
        node.children.setdefault(key[0], {})[key] = child
        self._idle[child] = None
        self.num_pages += 1
        return child, [child.page for child in shorter]

    def use(self, node: PrefixNode) -> None:
        """A sequence holds the node: its page stays."""
        node.num_users += 1
        self._idle.pop(node, None)

    def let_go(self, node: PrefixNode) -> None:
        """A sequence is done with the node; children first, so that they go first."""
        node.num_users -= 1
        if node.num_users == 0:
            self._idle[node] = None

    def evict(self) -> int:
        """The page of the least recently used idle node, which is no longer in the tree. There must be one."""
        node, _ = self._idle.popitem(last=False)
        self._remove(node)
        return node.page

    def _remove(self, node: PrefixNode) -> None:
        assert node.parent is not None and not node.children, "a node goes after its children"
        siblings = node.parent.children[node.key[0]]
        del siblings[node.key]
        if not siblings:
            del node.parent.children[node.key[0]]
        self.num_pages -= 1


def _num_shared(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """Tokens at the beginning that both have."""
    for index, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return index
    return min(len(first), len(second))


def _begins(whole: tuple[int, ...], beginning: tuple[int, ...]) -> bool:
    return whole[: len(beginning)] == beginning

"""Which pages of the K/V pool live sequences hold: promised, taken, shared with others, kept for later, given back.

A sequence's first pages may be nodes of the prefix tree: full of committed rows, shared, and never written again. The others are
its own. A partly filled page is never shared: whoever goes on from it gets a copy.
"""

from torch import Tensor

from furcate.decoding.cache import PagePool
from furcate.decoding.prefix_tree import PrefixTree
from furcate.decoding.sequence import Sequence


class SequencePages:
    """The pages of one scheduler's sequences. `caches` are the K/V tensors that the pages lie in, [layers, pages, ...]."""

    def __init__(self, pool: PagePool, tree: PrefixTree | None, caches: list[Tensor]) -> None:
        """Without a tree nothing is shared or kept."""
        self.pool = pool
        self.tree = tree
        self.caches = caches
        self.num_reused = 0
        """Pages that sequences did not have to compute, over all time."""
        self.num_evicted = 0

    @property
    def num_cached(self) -> int:
        """Pages kept for later that no live sequence holds."""
        return self.tree.num_idle if self.tree is not None else 0

    @property
    def num_shared(self) -> int:
        """Pages of the prefix tree that live sequences hold."""
        return self.tree.num_pages - self.tree.num_idle if self.tree is not None else 0

    @property
    def num_allocated(self) -> int:
        """Pages that live sequences hold, a shared one counted once."""
        return self.pool.num_pages - self.pool.num_free - self.num_cached

    def promise(self, sequence: Sequence, num_tokens: int) -> bool:
        """Sets pages for so many tokens aside; False when there is no room for them now."""
        num_pages = self.pool.pages_for(num_tokens)
        if sequence.num_promised_pages is not None and num_pages <= sequence.num_promised_pages:
            return True
        promised = max(num_pages - len(sequence.pages), sequence.num_promised)
        room = self.pool.num_free + self.num_cached - self.pool.num_promised
        if promised - sequence.num_promised > room:
            return False
        sequence.num_promised_pages = max(num_pages, sequence.num_promised_pages or 0)
        self._count_promise(sequence)
        return True

    def reuse(self, sequence: Sequence, num_rows: int) -> None:
        """Gives the sequence kept rows of its tokens, `num_rows` at most, where it stands at the end of what it shares."""
        tree, size = self.tree, self.pool.page_size
        if tree is None or sequence.cache_length != len(sequence.nodes) * size:
            return
        is_beginning = sequence.cache_length == 0
        while sequence.cache_length + size <= num_rows:
            child = tree.full_child(sequence.node or tree.root, sequence.token_ids, sequence.cache_length)
            if child is None:
                break
            tree.use(child)
            sequence.nodes.append(child)
            sequence.pages.append(child.page)
            sequence.cache_length += size
            self._count_reused(sequence, size)
        if is_beginning:
            self._copy_part(sequence, num_rows)
        self._count_promise(sequence)

    def resize(self, sequence: Sequence, num_tokens: int) -> None:
        """Grows or shrinks what the sequence holds to so many tokens; what it drops is free at once."""
        num_pages = self.pool.pages_for(num_tokens)
        while len(sequence.pages) > num_pages:
            self.pool.give_back(sequence.pages.pop())
        while len(sequence.pages) < num_pages:
            sequence.pages.append(self._take())
        sequence.count_pages()
        self._count_promise(sequence)

    def keep(self, sequence: Sequence, num_rows: int) -> None:
        """Shares the sequence's pages that are full of rows before `num_rows`, none of which is written again."""
        tree, size = self.tree, self.pool.page_size
        if tree is None:
            return
        num_rows = min(num_rows, len(sequence.token_ids) - tree.num_next)
        while (len(sequence.nodes) + 1) * size <= num_rows:
            place = len(sequence.nodes)
            node, useless = tree.insert(
                sequence.node or tree.root, sequence.token_ids, place * size, sequence.pages[place], size
            )
            assert node is not None, "a whole page is never of no use"
            tree.use(node)
            sequence.nodes.append(node)
            sequence.pages[place] = node.page
            self._give_back(useless)

    def release(self, sequence: Sequence, num_rows: int) -> None:
        """Takes all pages from the sequence; those of rows before `num_rows` are kept for later, also a partly filled one."""
        tree, size = self.tree, self.pool.page_size
        self.keep(sequence, num_rows)
        place = len(sequence.nodes)
        if tree is not None and place < len(sequence.pages):
            rest = min(num_rows, len(sequence.token_ids) - tree.num_next) - place * size
            if rest > 0:
                page = sequence.pages.pop(place)
                node = sequence.node or tree.root
                self._give_back(tree.insert(node, sequence.token_ids, place * size, page, rest)[1])
        self._give_back(sequence.pages[place:])
        while tree is not None and sequence.nodes:
            tree.let_go(sequence.nodes.pop())
        sequence.pages.clear()
        sequence.num_promised_pages = None
        self._count_promise(sequence)

    def forget(self) -> None:
        """Frees every page that is only kept for later."""
        while self.num_cached:
            self.pool.give_back(self._evict())

    def _copy_part(self, sequence: Sequence, num_rows: int) -> None:
        """Goes on from a copy of the page that shares most rows with what comes next."""
        tree, start = self.tree, sequence.cache_length
        assert tree is not None
        child, most = tree.longest_child(sequence.node or tree.root, sequence.token_ids, start)
        num_copied = min(most, num_rows - start)
        if child is None or num_copied < 1:
            return
        tree.use(child)  # so that it is not the page that is taken
        page = self._take() if self.pool.num_free + self.num_cached > 0 else None
        if page is not None:
            for cache in self.caches:
                cache[:, page] = cache[:, child.page]
            sequence.pages.append(page)
            sequence.cache_length += num_copied
            self._count_reused(sequence, num_copied)
        tree.let_go(child)

    def _take(self) -> int:
        return self.pool.take() if self.pool.num_free else self._evict()

    def _evict(self) -> int:
        assert self.tree is not None, "no sequence takes more pages than it was promised"
        self.num_evicted += 1
        return self.tree.evict()

    def _give_back(self, pages: list[int]) -> None:
        for page in pages:
            self.pool.give_back(page)

    def _count_reused(self, sequence: Sequence, num_rows: int) -> None:
        """Counts what a request got; one that was put back in line gets only its own rows again."""
        if sequence.root_id is None:
            is_whole = num_rows == self.pool.page_size and len(sequence.nodes) == len(sequence.pages)
            sequence.count_reused(num_pages=int(is_whole), num_tokens=num_rows)
            self.num_reused += int(is_whole)

    def _count_promise(self, sequence: Sequence) -> None:
        promised = max((sequence.num_promised_pages or 0) - len(sequence.pages), 0)
        self.pool.num_promised += promised - sequence.num_promised
        sequence.num_promised = promised

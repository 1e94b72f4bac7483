"""The K/V pool's pages: which are free, and how many are promised. Host-side: pages change hands between steps only."""


class PagePool:
    """Hands out page numbers. What running sequences may still take is counted as promised, so that they can finish."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_promised = 0
        """Pages that sequences were promised and have not taken yet."""
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens`."""
        return -(-num_tokens // self.page_size)

    def take(self) -> int:
        """A free page; there must be one."""
        return self._free.pop()

    def give_back(self, page: int) -> None:
        """Makes a page free."""
        self._free.append(page)

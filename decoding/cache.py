"""Which pages of the K/V pool belong to whom. Host-side: pages are handed out between steps, never inside one."""

from furcate.builder.errors import RequestError


class PagePool:
    """Hands out page numbers. Sequences first reserve the most they can ever need, so that a running one always finishes."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_reserved = 0
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_allocated(self) -> int:
        """Pages that belong to sequences now."""
        return self.num_pages - len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens`."""
        return -(-num_tokens // self.page_size)

    def reserve(self, num_pages: int) -> bool:
        """Sets pages aside for a sequence; False when the pool has promised too many already."""
        if self.num_reserved + num_pages > self.num_pages:
            return False
        self.num_reserved += num_pages
        return True

    def unreserve(self, num_pages: int) -> None:
        """Ends a reservation."""
        self.num_reserved -= num_pages

    def resize(self, pages: list[int], num_pages: int) -> None:
        """Grows or shrinks a sequence's pages in place; what it drops is free at once."""
        while len(pages) > num_pages:
            self._free.append(pages.pop())
        while len(pages) < num_pages:
            if not self._free:
                raise RequestError(
                    f"the K/V pool's {self.num_pages} pages are all in use; build with a larger --max-pool-tokens."
                )
            pages.append(self._free.pop())

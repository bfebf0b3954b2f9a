"""Which pages of a pool are free, and how many texts hold each. Pure: needs no torch."""

import re
from collections.abc import Iterable

from terrace.base.errors import ConfigError


class PageCounts:
    """Counts of holders for `num_pages` pages. Raises `ConfigError` for a pool without pages."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ConfigError(f"num_pages = {num_pages} must be at least 1")
        self._holders = [0] * num_pages
        self._used = bytearray(num_pages)  # 1 for a page with holders
        self._free = num_pages

    @property
    def num_free(self) -> int:
        return self._free

    def holders(self, page: int) -> int:
        """How many texts hold a page."""
        return self._holders[page]

    def take(self, after: int = -1) -> int:
        """A free page with one holder; the one behind page `after` if that is free.

        A text whose pages follow each other is read without a copy. So one that must begin elsewhere begins in the
        middle of the longest free run: the text before that run may go on, too.
        """
        assert self._free, "no page is free: the caller must look first"
        page = after + 1
        if after < 0 or page == len(self._holders) or self._holders[page]:
            page = self._middle()
        self._holders[page] = self._used[page] = 1
        self._free -= 1
        return page

    def share(self, pages: Iterable[int]) -> None:
        """Count one more holder of each page."""
        for page in pages:
            assert self._holders[page], f"page {page} is free and cannot be shared"
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Count one holder less of each page; a page without holders is free."""
        for page in pages:
            assert self._holders[page], f"page {page} is free already"
            self._holders[page] -= 1
            if not self._holders[page]:
                self._used[page] = 0
                self._free += 1

    def _middle(self) -> int:
        # The pages of a pool are many and asked for often: the search for runs is the interpreter's own.
        longest = max(re.findall(rb"\0+", self._used), key=len)
        begin = self._used.find(longest)
        end = begin + len(longest)
        # Nobody grows into the run at the very beginning of the pool.
        return begin + (end - begin) // 2 if begin else 0

"""Reference counts of the pages of a pool. Needs no torch."""

import re
from collections.abc import Iterable

from terrace.base.errors import ConfigError


class PageCounts:
    """Reference counts of `num_pages` pages. Raises `ConfigError` for fewer than one page."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ConfigError(f"num_pages = {num_pages} must be at least 1")
        self._holders = [0] * num_pages
        self._used = bytearray(num_pages)  # 1 for a page in use
        self._free = num_pages

    @property
    def num_free(self) -> int:
        return self._free

    def holders(self, page: int) -> int:
        return self._holders[page]

    def take(self, after: int = -1) -> int:
        """Allocate a page with a count of one, preferably page `after` + 1.

        Consecutive pages are read without a copy. If the next page is in use, the new one is in the middle of the
        longest free run, so that the sequence in front of that run can also grow.
        """
        assert self._free, "no page is free: the caller must look first"
        page = after + 1
        if after < 0 or page == len(self._holders) or self._holders[page]:
            page = self._middle()
        self._holders[page] = self._used[page] = 1
        self._free -= 1
        return page

    def share(self, pages: Iterable[int]) -> None:
        """Increment the count of each page."""
        for page in pages:
            assert self._holders[page], f"page {page} is free and cannot be shared"
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Decrement the count of each page; a page is free at zero."""
        for page in pages:
            assert self._holders[page], f"page {page} is free already"
            self._holders[page] -= 1
            if not self._holders[page]:
                self._used[page] = 0
                self._free += 1

    def _middle(self) -> int:
        # Called often on large pools, so the search for runs is left to `re`, which is written in C.
        longest = max(re.findall(rb"\0+", self._used), key=len)
        begin = self._used.find(longest)
        end = begin + len(longest)
        # No sequence can grow into a run at the start of the pool.
        return begin + (end - begin) // 2 if begin else 0

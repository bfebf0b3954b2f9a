"""What the spreads of all members of a pool are built from, and who has which of its tokens."""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property

from terrace.sequence.segments import Segment
from terrace.sequence.token_layout import Run


@dataclass(frozen=True, kw_only=True)
class GroupLayout:
    """A micro-batch on a pool of places of `ulysses` parts: the same value on every member.

    Every token that is held is in one segment, every token of a segment is held by one member. Documents begin at
    `documents` (tokens, rising) and with every segment; `window` 0 stands for none.
    """

    segments: tuple[Segment, ...]
    documents: tuple[int, ...]
    local_runs: tuple[tuple[Run, ...], ...]  # tokens of every member of the pool, member place * ulysses + part
    ulysses: int
    num_local_tokens: int  # rows of every member
    num_attention_tokens: int = 0  # rows of every place; 0: those of its shards
    window: int = 0

    def segment_of(self, token: int) -> int:
        """Return which segment has a token."""
        at = bisect_right(self._segments[0], token) - 1
        order = self._segments[1][at]
        assert self.segments[order].start <= token < self.segments[order].stop, (
            f"token {token} is held and in no segment"
        )
        return order

    def holder(self, token: int) -> tuple[int, int]:
        """Return the member that holds a token, and where its run ends."""
        at = bisect_right(self._holdings[0], token) - 1
        start, stop, member = self._holdings[1][at]
        assert start <= token < stop, f"token {token} is in a segment and held by none"
        return member, stop

    @cached_property
    def _segments(self) -> tuple[list[int], list[int]]:
        """Where segments start, rising, and which these are."""
        filled = (at for at, segment in enumerate(self.segments) if segment.start < segment.stop)
        order = sorted(filled, key=lambda at: self.segments[at].start)
        return [self.segments[at].start for at in order], order

    @cached_property
    def _holdings(self) -> tuple[list[int], list[tuple[int, int, int]]]:
        """Where runs that are held start, rising, and (start, stop, member) of each."""
        runs = sorted((*run, member) for member, runs in enumerate(self.local_runs) for run in runs if run[0] < run[1])
        return [start for start, _, _ in runs], runs

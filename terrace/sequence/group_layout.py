"""Common input of the token layouts of a context group: segments, and the member that holds each token."""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property

from terrace.sequence.segments import Segment
from terrace.sequence.token_layout import Run


@dataclass(frozen=True, kw_only=True)
class GroupLayout:
    """A micro-batch on a context group with `ulysses` Ulysses ranks per ring rank; equal on every member.

    Every held token belongs to one segment, and every token of a segment is held by one member. Documents begin at
    `documents` (ascending token indices) and at every segment. `window` 0 means none; some layers may have
    `other_windows`.
    """

    segments: tuple[Segment, ...]
    documents: tuple[int, ...]
    local_runs: tuple[tuple[Run, ...], ...]  # by member, ring_rank * ulysses + ulysses_rank
    ulysses: int
    num_local_tokens: int  # rows of every member, padding included
    num_attention_tokens: int = 0  # rows of every ring rank; 0: as many as its shards need
    window: int = 0
    other_windows: tuple[int, ...] = ()

    def segment_of(self, token: int) -> int:
        at = bisect_right(self._segments[0], token) - 1
        order = self._segments[1][at]
        assert self.segments[order].start <= token < self.segments[order].stop, (
            f"token {token} is held by a member and in no segment"
        )
        return order

    def holder(self, token: int) -> tuple[int, int]:
        """(Member that holds a token, end of its run)."""
        at = bisect_right(self._holdings[0], token) - 1
        start, stop, member = self._holdings[1][at]
        assert start <= token < stop, f"token {token} is in a segment and held by no member"
        return member, stop

    @cached_property
    def _segments(self) -> tuple[list[int], list[int]]:
        # Starts in ascending order, for bisection, and the index of the segment at each.
        filled = (at for at, segment in enumerate(self.segments) if segment.start < segment.stop)
        order = sorted(filled, key=lambda at: self.segments[at].start)
        return [self.segments[at].start for at in order], order

    @cached_property
    def _holdings(self) -> tuple[list[int], list[tuple[int, int, int]]]:
        runs = sorted((*run, member) for member, runs in enumerate(self.local_runs) for run in runs if run[0] < run[1])
        return [start for start, _, _ in runs], runs

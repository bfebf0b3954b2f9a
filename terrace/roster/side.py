"""An island's side of the roster: what it holds, what it reports, and what a reply makes it do. Pure.

The island's outer parameters change by APPLY alone, which follows a commit; its change is taken again for every
attempt, so an attempt that fails costs no step.
"""

from dataclasses import dataclass, replace
from enum import Enum

from terrace.roster.entries import NO_ATTEMPT, Attempt, Attempted, Dealt
from terrace.roster.reports import Reply


class Act(Enum):
    """What an island does now."""

    WAIT = "wait"  # report again
    TRAIN = "train"  # the steps of `Side.deal`
    EXCHANGE = "exchange"  # make the attempt `Side.trying`
    APPLY = "apply"  # the sums of the attempt that it holds: its result is `Side.version`
    BEGIN_AGAIN = "begin again"  # it was lost: drop what it has in hand, take another token
    END = "end"  # the run is finished
    LATE = "late"  # it was finished without this island


@dataclass(frozen=True)
class Side:
    """What an island holds: its version (-1: none that counts), its window and whether that is trained, its sums.

    `trying` is the newest attempt of a reply; it holds the sums of `holds`, or has failed at `failed`.
    """

    version: int = 0
    deal: Dealt | None = None
    is_trained: bool = False
    trying: Attempted | None = None
    holds: Attempt = NO_ATTEMPT
    failed: Attempt = NO_ATTEMPT
    blames: tuple[str, ...] = ()

    @property
    def window(self) -> int:
        return -1 if self.deal is None else self.deal.window

    def trained(self) -> "Side":
        """After the last step of its window."""
        return replace(self, is_trained=True)

    def held(self, key: Attempt) -> "Side":
        """After an attempt that has succeeded here, if it is still the newest."""
        return replace(self, holds=key) if self.trying is not None and self.trying.key == key else self

    def fails(self, key: Attempt, blames: tuple[str, ...]) -> "Side":
        """After an attempt that has failed here, since it did not reach `blames`."""
        return replace(self, failed=key, blames=blames) if self.trying and self.trying.key == key else self

    def follow(self, reply: Reply) -> tuple["Side", Act]:
        """The side and the act that follow from a reply to its report. The caller handles refusals."""
        if reply.is_out:
            return Side(version=-1), Act.BEGIN_AGAIN
        if reply.version != self.version and reply.commit == self.holds != NO_ATTEMPT:
            return Side(version=reply.version), Act.APPLY
        if reply.is_finished:
            return self, Act.END if reply.version == self.version >= 0 else Act.LATE
        if reply.deal is not None and reply.deal.window > self.window and reply.version == self.version:
            return replace(self, deal=reply.deal, is_trained=False), Act.TRAIN
        running = reply.running
        if running is not None and (self.trying is None or running.key > self.trying.key):
            return replace(self, trying=running, holds=NO_ATTEMPT), Act.EXCHANGE
        return self, Act.WAIT

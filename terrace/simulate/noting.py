"""A rank that notes the exchanges of islands in a program: when each is on its lane, and when it is waited for."""

from typing import TYPE_CHECKING, NamedTuple

from terrace.plan.wire import MessageClass
from terrace.program.instruction import Op
from terrace.simulate.priced_instruction import Event
from terrace.simulate.rank import Moment, Rank

if TYPE_CHECKING:
    from terrace.program.program import Program

WAIT_OUTER = f"wait {MessageClass.OUTER.value}"
_SENDS = (Op.OUTER_COUNT, Op.OUTER_START)


class Notes(NamedTuple):
    """Notes of one run of a program, in seconds since it began.

    `moments` are (seconds of the rank's clock, of the link's, of the wall): where messages share cores or a bus, the
    clock stands still, and exchanges go on (terrace.simulate.rank). The last one is the program's end.
    """

    sent: tuple[tuple[float, float], ...]  # (start, end) of each message, by the link's clock
    waits: tuple[tuple[float, float], ...]  # by the rank's clock
    moments: tuple[tuple[float, float, float], ...]


class NotingRank(Rank):
    """The clocks of a rank, with notes."""

    __slots__ = ("moments", "sent", "waits")

    def __init__(self, program: "Program") -> None:
        super().__init__(program)
        self.begin()

    def begin(self) -> None:
        """A program begins."""
        self.sent: list[tuple[float, float]] = []
        self.waits: list[tuple[float, float]] = []
        self.moments: list[tuple[float, float, float]] = []

    def notes(self) -> Notes:
        """Of the program that has ended."""
        self._mark()
        return Notes(tuple(self.sent), tuple(self.waits), tuple(self.moments))

    def issue(self, event: Event, ready: Moment) -> Moment:
        """Puts a message on its lane, as `Rank.issue`."""
        found = super().issue(event, ready)
        if event.op in _SENDS and event.seconds:
            self._mark()
            end_s = found[0] + self.ahead_s
            self.sent.append((end_s - event.seconds, end_s))
        return found

    def wait(self, moment: Moment, category: str) -> None:
        """Let the compute stream wait for a message, as `Rank.wait`."""
        begin_s = self.now_s
        if category == WAIT_OUTER:
            self._mark()
        super().wait(moment, category)
        if category == WAIT_OUTER and self.now_s > begin_s:
            self.waits.append((begin_s, self.now_s))
            self._mark()

    def _mark(self) -> None:
        self.moments.append((self.now_s, self.now_s + self.ahead_s, sum(self.time_s.values())))

"""A rank that notes the exchanges of islands: when each occupies its lane, and when compute waits for it."""

from typing import TYPE_CHECKING, NamedTuple

from terrace.plan.wire import MessageClass
from terrace.program.instruction import Op
from terrace.simulate.below import Moment
from terrace.simulate.priced_instruction import Event
from terrace.simulate.rank import Rank

if TYPE_CHECKING:
    from terrace.program.program import Program

WAIT_OUTER = f"wait {MessageClass.OUTER.value}"
_SENDS = (Op.OUTER_COUNT, Op.OUTER_START)


class Notes(NamedTuple):
    """Notes of one run of a program, in seconds since its start.

    `moments` are (rank clock, link clock, wall time) in seconds: where messages share cores or a bus, the rank's clock
    stands still while exchanges go on (terrace.simulate.rank). The last one is the program's end.
    """

    sent: tuple[tuple[float, float], ...]  # (start, end) of each message, by the link's clock
    waits: tuple[tuple[float, float], ...]  # by the rank's clock
    moments: tuple[tuple[float, float, float], ...]


class NotingRank(Rank):
    __slots__ = ("moments", "sent", "waits")

    def __init__(self, program: "Program") -> None:
        super().__init__(program)
        self.begin()

    def begin(self) -> None:
        """Discard the notes at the start of a program."""
        self.sent: list[tuple[float, float]] = []
        self.waits: list[tuple[float, float]] = []
        self.moments: list[tuple[float, float, float]] = []

    def notes(self) -> Notes:
        """Notes of the program that has ended."""
        self._mark()
        return Notes(tuple(self.sent), tuple(self.waits), tuple(self.moments))

    def issue(self, event: Event, ready: Moment) -> Moment:
        found = super().issue(event, ready)
        if event.op in _SENDS and event.seconds:
            self._mark()
            end_s = found[0] + self.ahead_s
            self.sent.append((end_s - event.seconds, end_s))
        return found

    def wait(self, moment: Moment, category: str) -> None:
        begin_s = self.now_s
        if category == WAIT_OUTER:
            self._mark()
        super().wait(moment, category)
        if category == WAIT_OUTER and self.now_s > begin_s:
            self.waits.append((begin_s, self.now_s))
            self._mark()

    def _mark(self) -> None:
        self.moments.append((self.now_s, self.now_s + self.ahead_s, sum(self.time_s.values())))

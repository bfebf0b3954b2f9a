"""Seconds of states that are kept below the device: the clocks of the lanes of each medium.

Parameters and gradients are read and written one after the other. Optimizer states follow the runtime's ring
(terrace.runtime.kept.ring): a slot is read into when its last piece is written, and an update waits for its piece. So
n pieces of r seconds to read, w to write and u to update take about n max(r, w, u), less what the ring holds when they
begin: it fills while the passes before them run.
"""

from collections import deque
from typing import TYPE_CHECKING

from terrace.plan.wire import MessageClass
from terrace.simulate.priced_instruction import NO_STREAM, Stream

if TYPE_CHECKING:
    from terrace.program.program import Program

STATES = (MessageClass.KEEP_READ, MessageClass.KEEP_WRITE)
ROWS = (MessageClass.ROW_READ, MessageClass.ROW_WRITE)  # of a table
BELOW = (*STATES, *ROWS)
WAITS = WAIT, WAIT_WRITE, WAIT_ROWS, WAIT_ROWS_WRITTEN = tuple(f"wait {message.value}" for message in BELOW)
# What is read and written as wholes, without the ring.
PARAMS, GRADS, ACTIVATIONS, TABLE = "params", "grads", "activations", "table"
Moment = tuple[float, int]  # when a message will be there; for a recording, the number of its span
START: Moment = (0.0, -1)  # before anything
_EXACT = 6  # times the slots: pieces of one instruction that are played one by one; the rest repeat the last ones


def row_stream(program: "Program", block: int) -> Stream:
    """Seconds of rows below the device: read by one forward of a block, written behind its update, and read for that.

    An update reads of the host's memory alone. `NO_STREAM` for a block without rows below.
    """
    rows, keep = program.rows_below(block), program.plan.keep
    if not rows.looked_up:
        return NO_STREAM
    medium = program.cluster.device.below[keep.table]
    return Stream(
        0,
        medium.pages_read_s(rows.pages_read, rows.looked_up) / program.num_micros,
        medium.pages_written_s(rows.pages_written, rows.written),
        medium.read_s(rows.read),
    )


def updates_on_cores(program: "Program", block: int) -> bool:
    """Whether the host's cores update a block. Rows of a table are updated on the device."""
    trained = [flat for flat in program.model.flats[block] if flat.trainable]
    return program.plan.keep.updates_on_host and not (trained and all(flat.is_spread for flat in trained))


class Lanes:
    """The two lanes of a medium, and the moments from which they are free."""

    __slots__ = ("read_s", "write_s")

    def __init__(self) -> None:
        self.read_s = self.write_s = 0.0

    @property
    def busy_s(self) -> float:
        """When both are free."""
        return max(self.read_s, self.write_s)

    def read(self, seconds: float, after_s: float) -> float:
        """Queue a read that is issued at `after_s`. Returns when it ends."""
        self.read_s = max(after_s, self.read_s) + seconds
        return self.read_s

    def write(self, seconds: float, after_s: float) -> float:
        """Queue a write that is issued at `after_s`. Returns when it ends."""
        self.write_s = max(after_s, self.write_s) + seconds
        return self.write_s


class Slots:
    """The ring of a rank, and the lanes of all media; moments are those of the rank's clock."""

    def __init__(self, program: "Program") -> None:
        keep = program.plan.keep
        media = {medium: Lanes() for medium in keep.media}
        self.ring = media.get(keep.optimizer, Lanes())  # of optimizer states
        self.wholes = {
            PARAMS: media.get(keep.params, Lanes()),
            GRADS: media.get(keep.grads, Lanes()),
            ACTIVATIONS: media.get(keep.activations, Lanes()),
            TABLE: media.get(keep.table, Lanes()),
        }
        self._number = min(keep.ring, program.num_kept_pieces)
        self._there_s = deque[float]()  # when each piece that is read ahead is there
        self.cores_s = 0.0  # when the host's cores are free
        self.grads_ahead = deque[Moment]()  # when the gradients of the next update are

    def passed_s(self, stream: Stream, now_s: float) -> float:
        """When the last piece of a stream is updated, less the seconds of computing."""
        return max(now_s, self._play(stream, now_s) - stream.number * stream.update_s) if stream.number else now_s

    def _play(self, stream: Stream, now_s: float) -> float:
        while len(self._there_s) < self._number:  # in the first step
            self._read(stream, now_s)
        exactly, before_s = min(stream.number, _EXACT * self._number), now_s
        for index in range(exactly):
            if index == exactly - self._number:
                before_s = now_s
            now_s = self._pass(stream, now_s)
        if exactly < stream.number:
            left_s = (stream.number - exactly) * (now_s - before_s) / self._number
            self._there_s = deque(moment_s + left_s for moment_s in self._there_s)
            self.ring.read_s, self.ring.write_s = self.ring.read_s + left_s, self.ring.write_s + left_s
            now_s += left_s
        return now_s

    def _pass(self, stream: Stream, now_s: float) -> float:
        now_s = max(now_s, self._there_s.popleft()) + stream.update_s
        self._read(stream, self.ring.write(stream.write_s, now_s))  # into the slot that was written
        return now_s

    def _read(self, stream: Stream, after_s: float) -> None:
        self._there_s.append(self.ring.read(stream.read_s, after_s))

"""A priced instruction, as played on a rank's clocks (terrace.simulate.rank)."""

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from terrace.program.instruction import Op


class Doing(IntEnum):
    """The action of a step of a pass."""

    COMPUTE = 0
    SEND = 1
    WAIT = 2
    GAP = 3


class Stream(NamedTuple):
    """Equal pieces that pass in one instruction, and the seconds of one.

    A GATHER, REFRESH or SYNC has `number` 0, and the seconds in which all its parameters or gradients are read or
    written.
    """

    number: int = 0
    read_s: float = 0.0
    write_s: float = 0.0
    update_s: float = 0.0


NO_STREAM = Stream()


class PassStep(NamedTuple):
    """A step of a pass with messages on lanes.

    `number`: for a SEND, the index of the pass's message that must arrive first, or -1; for a WAIT, of the message
    waited for; for a GAP, the gap's.
    """

    does: Doing
    event: "Event"
    number: int = -1


@dataclass(slots=True, eq=False)
class Event:
    """A distinct instruction to play: its seconds, its lane and the blocks it reads."""

    op: Op
    block: int
    seconds: float  # on the compute stream or the lane
    lane: int  # -1: the compute stream
    category: str  # of its compute, or of waiting for it
    needs: tuple[int, ...] = ()  # blocks whose parameters it reads
    opens: bool = False  # whether it needs a gradient buffer
    inside: tuple[tuple[str, float], ...] = ()  # exposed messages inside the block: category, seconds
    penalty: float = 0.0  # of a message: slow-down of compute, as a share of the shared time
    message: str = ""  # its class
    steps: tuple[PassStep, ...] = ()  # of a pass with messages on lanes: all behind its first computing
    parts: "tuple[Event, ...]" = ()  # of a message in gaps, by gap; of OUTER_COUNT, its computing
    stream: Stream = NO_STREAM  # of states that are kept below the device
    rows: Stream = NO_STREAM  # of rows of a table that are, as `row_stream` has it
    grads_s: float = 0.0  # seconds in which an update's gradients are read from below the device
    next_grads_s: float = 0.0  # those of the next update, which are read from when this one asks for its own
    most_writing: int = 0  # a backward begins when gradients of fewer blocks are being written below; 0: at once

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

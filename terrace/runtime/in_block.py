"""Messages inside a block, on any axis, and the interface of an axis that sends them: tensor, context, experts.

Messages of tensor and context ranks have a lane of their own. Routed messages cross tiers that messages between
blocks cross too, so they share those lanes: all ranks of a stage issue all of them in the same order.

Waits happen in the middle of a pass, and the clock counts them separately from it. The order of sends, waits and the
computation between them is the block's own program (terrace.program.block_program), which the simulator plays; tests
compare it with a recording of a step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from terrace.comm.lane import Lane, Ticket
from terrace.plan.wire import MessageClass
from terrace.program.block_program.steps import Await, BlockStep, Compute, ComputeKind, Gap, InBlockMessage, Send
from terrace.runtime.clock import Clock
from terrace.runtime.linear import WeightGradients

if TYPE_CHECKING:
    from terrace.runtime.batch import Batch


def _ignore(ranks: tuple[int, ...]) -> None:
    """No-op progress callback."""


def _nothing(gap: int) -> None:
    """No-op gap callback."""


@dataclass
class InFlight:
    ticket: Ticket
    send: Send


@dataclass
class InBlockComm:
    """Sends messages inside blocks on `lanes`, and runs deferred weight gradients while they travel."""

    lanes: Mapping[int, Lane]
    clock: Clock
    weights: WeightGradients
    waiting_on: Callable[[tuple[int, ...]], None] = _ignore  # called with awaited ranks, with () after the wait
    at_gap: Callable[[int], None] = _nothing  # called where parts of gradients leave
    recording: list[BlockStep] | None = field(default=None, repr=False)  # steps as they are issued, if a list is given

    def submit(self, work: Callable[[], None], *messages: InBlockMessage, after: InFlight | None = None) -> InFlight:
        """Submit `work`, which carries `messages` of one axis, to their lane. It starts when `after` has arrived."""
        send, lane = Send(messages), self.lanes[messages[0].lane]
        if self.recording is not None:
            self.recording.append(send)

        def when_ready() -> None:
            # On its lane: over the tier before, the rows must have arrived.
            if after is not None:
                after.ticket.wait()
            work()

        return InFlight(lane.submit(when_ready), send)

    def wait(self, flight: InFlight, ranks: tuple[int, ...], *, computes: bool = False) -> None:
        """Wait for messages from `ranks`.

        The clock counts the time as waiting for the messages' class or, if `computes`, as part of the pass.
        """
        # Computing up to here belongs to the pass around the message.
        self.clock.mark(self.clock.doing)
        self.waiting_on(ranks)
        flight.ticket.wait()
        self.waiting_on(())
        waited = f"wait {flight.send.messages[0].message_class.value}"
        self.clock.mark(self.clock.doing if computes else waited)
        if self.recording is not None:
            self.recording.append(Await(flight.send))

    def computes(self, kind: ComputeKind, number: int = 0) -> None:
        """Record a piece of computation that messages can overlap with."""
        if self.recording is not None:
            self.recording.append(Compute(kind, number))

    def gap(self, number: int) -> None:
        """Send the parts of earlier gradients that are due at this gap of the backward."""
        if self.recording is not None:
            self.recording.append(Gap(number))
        self.at_gap(number)

    def fill(self, kind: ComputeKind, number: int) -> None:
        """Run the weight gradients deferred so far, recorded as `kind`, unless a BACKWARD_WEIGHT will."""
        if self.weights.current is not None and self.weights.current.fills:
            self.computes(kind, number)
            self.weights.current.run()

    def compute_weight_gradients(self) -> None:
        """Run the deferred weight gradients while a message travels."""
        self.computes(ComputeKind.WEIGHT_GRADIENTS)
        # Outside a step no queue exists.
        if self.weights.current is not None:
            self.weights.current.run()


class EdgeComm(Protocol):
    """Splits an activation before it is sent to another stage, and gathers a received one."""

    @property
    def index(self) -> int:
        """Index of the part that this rank sends and receives."""

    def all_gather(self, x: Tensor) -> Tensor:
        """Gather x (m) from all ranks, (n m)."""


class InBlockAxis:
    """An axis that has replaced modules or attention in the blocks of a rank.

    An axis overrides only the methods that it needs. The step runner calls them on every axis, in order of
    application, and knows nothing else about it.
    """

    in_block: InBlockComm

    @property
    def declared(self) -> Mapping[tuple[MessageClass, str], int]:
        """Bytes sent so far by (message class, tier), for messages whose size the plan alone does not give."""
        return {}

    @property
    def edge(self) -> EdgeComm | None:
        """Collectives for activations that cross stages, if this axis splits them."""
        return None

    def take(self, batches: "Sequence[Batch]", *, trains: bool = True) -> "Sequence[Batch]":
        """This rank's part of the micro-batches of a training step, or of an evaluation if not `trains`."""
        return batches

    def begin(self, micro: int, batch: "Batch", recomputed: bool) -> None:
        """Prepare for a block to run on a micro-batch; `recomputed` if its forward runs again in the backward."""

    def remove(self) -> None:
        """Undo changes that would keep the blocks from running without the engine."""

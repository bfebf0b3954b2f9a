"""Messages inside a block, whichever axis they are of, in the order in which computing issues them.

Messages of tensor and context ranks have a lane of their own. Routed messages cross tiers that messages between
blocks cross too, so they take the lanes of those: all ranks of a stage issue all of them in one order.

They are part of computing: while one is awaited, the clock counts its seconds apart from the pass around it. The order
of sends, waits and the computing between them is the block's own program (terrace.program.block_program), which the
simulator plays; a recording of a step is compared with it in tests.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from terrace.comm.lane import Lane, Ticket
from terrace.program.block_program.steps import Await, BlockStep, Compute, ComputeKind, Gap, InBlockMessage, Send
from terrace.runtime.clock import Clock
from terrace.runtime.linear import WeightGradients


def _ignore(ranks: tuple[int, ...]) -> None:
    """No-op progress callback."""


def _nothing(gap: int) -> None:
    """No gradients leave."""


@dataclass
class InFlight:
    ticket: Ticket
    send: Send


@dataclass
class InBlockComm:
    """The lanes of messages inside blocks, the clock, and the weight gradients that are held back."""

    lanes: Mapping[int, Lane]
    clock: Clock
    weights: WeightGradients
    waiting_on: Callable[[tuple[int, ...]], None] = _ignore  # called with awaited ranks, with () after the wait
    at_gap: Callable[[int], None] = _nothing  # called where parts of gradients leave
    recording: list[BlockStep] | None = field(default=None, repr=False)  # steps as they are issued, if a list is given

    def submit(self, work: Callable[[], None], *messages: InBlockMessage, after: InFlight | None = None) -> InFlight:
        """Put `work`, which carries `messages` of one axis, on their lane; it starts when `after` has arrived."""
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

        The clock counts the seconds as waiting for the messages' class, or with `computes` as part of the pass.
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
        """Record a piece of computing behind which messages may hide."""
        if self.recording is not None:
            self.recording.append(Compute(kind, number))

    def gap(self, number: int) -> None:
        """Let parts of the gradients before this backward leave."""
        if self.recording is not None:
            self.recording.append(Gap(number))
        self.at_gap(number)

    def fill(self, kind: ComputeKind, number: int) -> None:
        """Compute the weight gradients held back so far, which are `kind`, unless the other half of a backward does."""
        if self.weights.current is not None and self.weights.current.fills:
            self.computes(kind, number)
            self.weights.current.run()

    def compute_weight_gradients(self) -> None:
        """Compute the weight gradients that are held back, while a message travels."""
        self.computes(ComputeKind.WEIGHT_GRADIENTS)
        # Outside a step no queue exists.
        if self.weights.current is not None:
            self.weights.current.run()

"""What messages inside a block have in common, whichever axis they are of: they are part of computing, in its order."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from terrace.comm import Lane
from terrace.plan import MessageClass
from terrace.runtime.clock import Clock
from terrace.runtime.linear import WeightGradients


def _nobody_asks(ranks: tuple[int, ...]) -> None:
    """Nobody is told."""


@dataclass
class Means:
    """A lane, the clock, and the weight gradients that wait."""

    lane: Lane
    clock: Clock
    weights: WeightGradients
    waiting_on: Callable[[tuple[int, ...]], None] = _nobody_asks  # told for whom the rank waits; () when it goes on

    @contextmanager
    def message(self, message: MessageClass, ranks: tuple[int, ...]) -> Iterator[None]:
        """Time the body, a message among `ranks`, apart from the computing before it; tell that they are awaited."""
        self.clock.mark(self.clock.doing)
        self.waiting_on(ranks)
        yield
        self.waiting_on(())
        self.clock.mark(f"wait {message.value}")

    def use_wait(self) -> None:
        """Compute the weight gradients that wait, while a message travels."""
        queue = self.weights.current
        if queue is not None:
            queue.run()

"""Messages between islands on one rank's lanes: unlike others, they may be under way over the end of a program."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from terrace.comm.collectives import Collectives
from terrace.program.instruction import Instruction
from terrace.program.program import Program
from terrace.runtime.gap_messages import Carry, Work

if TYPE_CHECKING:
    from terrace.runtime.activations import Pending
    from terrace.runtime.islands import Island


class Exchanges:
    """Carries out OUTER_COUNT and OUTER_START and waits for both; `submit`, `each` and `wait` are the step runner's."""

    def __init__(
        self,
        island: "Island | None",
        collectives: Collectives,
        submit: "Callable[[Work, Pending | None], Pending]",
        each: Callable[[Instruction, Carry], Work],
        wait: "Callable[[Pending, str], None]",
    ) -> None:
        self._island, self._collectives = island, collectives
        self._submit, self._each, self._wait = submit, each, wait
        self._heard: dict[int, Pending] = {}  # fragment -> the numbers of its newest exchange
        self._changes: dict[int, Pending] = {}  # block -> its change

    @property
    def island(self) -> "Island":
        """This rank's island; only under a plan with several."""
        assert self._island is not None, "the plan has one island"
        return self._island

    def count(self, program: Program, now: Instruction) -> None:
        """Tell the numbers of the exchanges that start."""
        exchange, (transfer,) = program.exchange, program.message(now).transfers
        assert exchange is not None, "an exchange begins"
        self._await_heard(exchange.arrives)  # their results are read now
        heard = self._submit(self.island.telling(program, self._collectives, transfer), None)
        self._heard |= dict.fromkeys(exchange.starts, heard)

    def start(self, now: Instruction) -> None:
        """Send the change of a block."""
        after = self._heard[self.island.outer.fragment(now.block)]
        self._changes[now.block] = self._submit(
            self._each(now, self.island.sending(now.block, self._collectives)), after
        )

    def arrived(self, block: int) -> None:
        """Wait for the mean of a block's changes; one that is not under way arrived before the run was resumed."""
        if block in self._changes:
            self._wait(self._changes.pop(block), "wait outer")

    def ended(self, program: Program) -> None:
        """Wait for the numbers of the exchanges that a program has applied, which it tells next."""
        exchange = program.exchange
        # A stage without a block in their fragments has waited for none of their messages.
        if exchange is not None and (exchange.waits or not exchange.starts):
            self._await_heard(exchange.applies)

    def drain(self) -> None:
        """Wait for all that is under way, and leave it to be applied."""
        self._await_heard(list(self._heard))
        for pending in self._changes.values():
            self._wait(pending, "wait outer")

    def _await_heard(self, fragments: Iterable[int]) -> None:
        for fragment in fragments:
            if fragment in self._heard:
                self._wait(self._heard.pop(fragment), "wait outer")

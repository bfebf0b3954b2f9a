"""Messages between islands on one rank's lanes. Unlike others they may be in flight when a program ends."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from terrace.comm.collectives import Collectives
from terrace.comm.lane import Ticket
from terrace.program.instruction import Instruction
from terrace.program.program import Program
from terrace.runtime.gap_messages import Carry, Work
from terrace.runtime.pending import Pending

if TYPE_CHECKING:
    from terrace.runtime.islands import Island


@dataclass(frozen=True)
class AwaitedExchange:
    """The exchange that a rank waits for, in words. It crosses the slow link, so it may take long."""

    instruction: Instruction
    fragment: int
    tier: str
    begun: int  # the step that sent it, counted from 0 as a watchdog does

    def __str__(self) -> str:
        return (
            f"{self.instruction}, in the exchange of fragment {self.fragment} between islands over tier {self.tier}, "
            f"sent in step {self.begun}"
        )


@dataclass(kw_only=True)
class _UnderWay(Pending):
    fragment: int
    tier: str
    begun: int

    @property
    def doing(self) -> AwaitedExchange:
        return AwaitedExchange(self.instruction, self.fragment, self.tier, self.begun)


class _OnHost(Ticket):
    """Blocks the host, on a GPU too, so that a watchdog sees where a rank waits for a late exchange."""

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket

    def wait(self) -> None:
        self._ticket.wait_on_host()
        self._ticket.wait()

    @property
    def is_done(self) -> bool:
        return self._ticket.is_done


class Exchanges:
    """Runs OUTER_COUNT and OUTER_START, and waits for both. `submit`, `each` and `wait` are the step runner's."""

    def __init__(
        self,
        island: "Island",
        collectives: Collectives,
        submit: Callable[[Work, Pending | None], Pending],
        each: Callable[[Instruction, Carry], Work],
        wait: Callable[[Pending, str], None],
    ) -> None:
        self._island, self._collectives = island, collectives
        self._submit, self._each, self._wait = submit, each, wait
        self._heard: dict[int, _UnderWay] = {}  # fragment -> the numbers of its newest exchange
        self._changes: dict[int, _UnderWay] = {}  # block -> its change

    def count(self, program: Program, now: Instruction, counter: int) -> None:
        """Send the figures of the exchanges that start in this program."""
        exchange, (transfer,) = program.exchange, program.message(now).transfers
        self._await_heard(exchange.arrives, counter)  # their results are read now
        heard = self._submit(self._island.telling(program, self._collectives, transfer), None)
        self._heard |= {fragment: self._under_way(heard, fragment) for fragment in exchange.starts}

    def start(self, now: Instruction) -> None:
        """Send a block's change."""
        fragment = self._island.outer.fragment(now.block)
        work = self._each(now, self._island.sending(now.block, self._collectives))
        self._changes[now.block] = self._under_way(self._submit(work, self._heard[fragment]), fragment)

    def arrived(self, block: int, counter: int) -> None:
        """Wait for the mean of a block's changes. Returns at once if none is in flight (it arrived before a resume)."""
        if block in self._changes:
            self._await(self._changes.pop(block), counter)

    def ended(self, program: Program, counter: int) -> None:
        """Wait for the figures of the exchanges that a program has applied: its results report them."""
        exchange = program.exchange
        # A stage without a block in their fragments has waited for none of their messages.
        if exchange.waits or not exchange.starts:
            self._await_heard(exchange.applies, counter)

    def drain(self, counter: int) -> None:
        """Wait for everything in flight; the results can be applied later."""
        self._await_heard(list(self._heard), counter)
        for pending in self._changes.values():
            self._await(pending, counter)

    def _await_heard(self, fragments: Iterable[int], counter: int) -> None:
        for fragment in fragments:
            if fragment in self._heard:
                self._await(self._heard.pop(fragment), counter)

    def _await(self, pending: _UnderWay, counter: int) -> None:
        # Its own counter is of the program that sent it.
        late = replace(pending, ticket=_OnHost(pending.ticket), counter=counter)
        self._wait(late, "wait outer")

    def _under_way(self, sent: Pending, fragment: int) -> _UnderWay:
        return _UnderWay(
            ticket=sent.ticket,
            counter=sent.counter,
            instruction=sent.instruction,
            fragment=fragment,
            tier=self._island.outer.tier,
            begun=self._island.numbers.num_steps - 1,
        )

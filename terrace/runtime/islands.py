"""One island among the others: when it exchanges, its messages, and the figures that travel with its changes.

Only exchanges cross the outer tier. Tokens, losses, norms of changes and digests of the anchor therefore travel with
them (terrace.plan.routes.OUTER_FIGURES), summed over the island first.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from terrace.base.errors import TrainingError
from terrace.comm.collectives import Collectives
from terrace.comm.lane import Ticket
from terrace.plan.outer import Exchange, closing
from terrace.plan.routes import OUTER_FIGURES
from terrace.program.exchange import OuterResult, exchanged
from terrace.program.instruction import Instruction
from terrace.program.message import Transfer
from terrace.program.program import Program
from terrace.runtime.block_messages import ParameterMessages
from terrace.runtime.flat_param import FlatParam
from terrace.runtime.messages import Carry, Messages, Pending
from terrace.runtime.model_state import ModelState
from terrace.runtime.outer_numbers import CHANGE, MEAN, MEANWHILE


class DivergedError(TrainingError):
    """Islands that must hold the same bits differ."""


class Island:
    """This rank's island. A single island never exchanges."""

    def __init__(self, state: ModelState) -> None:
        self.outer, self.numbers, self._flats = state.program.plan.outer, state.outer_numbers, state.trainable
        self._digests: dict[int, Tensor] = {}  # block in flight -> digests of its anchor on all islands
        self._ended: list[OuterResult] = []

    def next(self) -> Exchange:
        return self.outer.exchange(self.numbers.num_steps, self.numbers.under_way)

    def closing(self) -> list[Exchange]:
        """The exchanges that complete all pending ones now, at the end of a run."""
        return closing(self.numbers.under_way, self.numbers.changed)

    def telling(self, program: Program, collectives: Collectives, transfer: Transfer) -> Callable[[], None]:
        """Take the changes of an exchange that starts. Returns the lane work that gathers its figures."""
        numbers = self.take(program)
        return lambda: self.hear(program, collectives.gather_islands(transfer, numbers))

    def sending(self, block: int, collectives: Collectives) -> Carry:
        """The lane work that exchanges a block's change, once the figures have arrived."""

        def exchange(flat: FlatParam, transfer: Transfer) -> None:
            flat.exchange(collectives, transfer, self.numbers.weight(self.outer.fragment(block)))

        return exchange

    def apply(self, program: Program, block: int) -> None:
        """Take the outer step of a block whose mean change has arrived."""
        fragment, exchange = self.outer.fragment(block), program.exchange
        self._check(program, outer_blocks(program, fragment))
        stretch = self.numbers.stretch(fragment) if self.outer.penalty else None
        waits, moved = fragment not in exchange.arrives, fragment in self.numbers.changed
        for flat in self._flats(block):
            squares = flat.outer_state.apply(stretch, waits=waits, moved=moved)
            if flat.is_first(flat.layout.optimizer):  # of the ranks of this island with this slice
                self.numbers.own_figures[fragment, MEANWHILE : MEAN + 1] += squares

    def take(self, program: Program) -> Tensor:
        """Take the changes of the exchange that starts. Returns this rank's part of its figures, fp64."""
        starts, figures, digests = program.exchange.starts, list[Tensor](), list[Tensor]()
        self._end(program.exchange.arrives)  # before a lane hears of the next exchange of the same fragments
        for fragment in starts:
            own, none = exchanged(program, [fragment]), self.numbers.own_figures.new_zeros(())
            for block in outer_blocks(program, fragment):
                digests.append(self._taken(block, fragment) if block in own else none)
            figures.append(self.numbers.begin(fragment))
        return torch.cat([*figures, *(digest.view(1) for digest in digests)])

    def _taken(self, block: int, fragment: int) -> Tensor:
        """Take a block's change: add its squared norm to the figures, return the digest of the anchor."""
        digest = self.numbers.own_figures.new_zeros(())
        for flat in self._flats(block):
            state = flat.outer_state
            change = state.take()
            if flat.is_first(flat.layout.optimizer):
                self.numbers.own_figures[fragment, CHANGE] += change
                digest += state.digest()
        return digest

    def hear(self, program: Program, numbers: Tensor) -> None:
        """Store the figures (islands, n) of an exchange. Runs on a lane, so it must not synchronize with the host."""
        starts, size = program.exchange.starts, len(OUTER_FIGURES)
        blocks = [block for fragment in starts for block in outer_blocks(program, fragment)]
        self._digests |= zip(blocks, numbers[:, size * len(starts) :].unbind(1), strict=True)
        for index, fragment in enumerate(starts):
            self.numbers.hear(fragment, numbers[:, size * index : size * (index + 1)])

    def _check(self, program: Program, blocks: Sequence[int]) -> None:
        """Raise `DivergedError` if islands hold different anchors of a block."""
        # Others were looked at already, or are from before the checkpoint that the run was resumed from.
        heard = {block: self._digests.pop(block) for block in blocks if block in self._digests}
        if not heard:
            return
        digests = torch.stack([*heard.values()])  # (blocks, islands)
        # One copy of all: the host waits for it.
        for block, same in zip(heard, (digests == digests[:, :1]).tolist(), strict=True):
            if not all(same):
                raise DivergedError(
                    f"block {program.blocks[block].name!r} has other outer parameters on island {same.index(False)} "
                    "than on island 0, and all islands apply the same mean to the same: the memory of a rank or a "
                    "message was damaged; resume from the last checkpoint"
                )

    def applied(self, exchange: Exchange) -> list[OuterResult]:
        """Results of the fragments that `exchange` applies, after its program has run and its figures have arrived."""
        self._end((() if exchange.starts else exchange.arrives) + (exchange.starts if exchange.waits else ()))
        ended, self._ended = self._ended, []
        return ended

    def _end(self, fragments: Sequence[int]) -> None:
        for fragment in fragments:
            self.numbers.end(fragment)
            self._ended.append(self.numbers.result(fragment))


def outer_blocks(program: Program, fragment: int) -> list[int]:
    outer, blocks = program.plan.outer, enumerate(program.blocks)
    return [index for index, block in blocks if block.num_trainable and outer.fragment(index) == fragment]


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
    """OUTER_COUNT, OUTER_START and OUTER_APPLY on one rank, whose messages may be in flight when a program ends."""

    def __init__(self, island: Island, messages: Messages, parameters: ParameterMessages) -> None:
        self._island, self._messages, self._parameters = island, messages, parameters
        self._figures: dict[int, _UnderWay] = {}  # fragment -> the figures of its newest exchange
        self._changes: dict[int, _UnderWay] = {}  # block -> its change

    def count(self, now: Instruction) -> None:
        """OUTER_COUNT: send the figures of the exchanges that start in this program."""
        program = self._messages.program
        exchange, (transfer,) = program.exchange, program.message(now).transfers
        self._await_figures(exchange.arrives)  # their results are read now
        work = self._island.telling(program, self._messages.comm.collectives, transfer)
        sent = self._messages.submit(work)
        self._figures |= {fragment: self._under_way(sent, fragment) for fragment in exchange.starts}
        self._messages.clock.mark("update")

    def start(self, now: Instruction) -> None:
        """OUTER_START: send a block's change."""
        fragment = self._island.outer.fragment(now.block)
        work = self._messages.of_block(self._island.sending(now.block, self._messages.comm.collectives))
        sent = self._messages.submit(work, self._figures[fragment].ticket)
        self._changes[now.block] = self._under_way(sent, fragment)

    def apply(self, now: Instruction) -> None:
        """OUTER_APPLY: take a block's outer step, once the mean of its changes has arrived."""
        if now.block in self._changes:  # else it arrived before a resume
            self._await(self._changes.pop(now.block))
        self._parameters.await_refresh(now.block)  # it still reads what this writes
        self._island.apply(self._messages.program, now.block)
        self._messages.clock.mark("update")

    def ended(self) -> None:
        """Wait for the figures of the exchanges that the program has applied: its results report them."""
        exchange = self._messages.program.exchange
        # A stage without a block in their fragments has waited for none of their messages.
        if exchange.waits or not exchange.starts:
            self._await_figures(exchange.applies)

    def drain(self) -> None:
        """Wait for everything in flight; the results can be applied later."""
        self._await_figures(list(self._figures))
        for pending in self._changes.values():
            self._await(pending)

    def _await_figures(self, fragments: Iterable[int]) -> None:
        for fragment in fragments:
            if fragment in self._figures:
                self._await(self._figures.pop(fragment))

    def _await(self, pending: _UnderWay) -> None:
        # Its own counter is of the program that sent it.
        late = replace(pending, ticket=_OnHost(pending.ticket), counter=self._messages.counter)
        self._messages.wait(late, "wait outer")

    def _under_way(self, sent: Pending, fragment: int) -> _UnderWay:
        return _UnderWay(
            ticket=sent.ticket,
            counter=sent.counter,
            instruction=sent.instruction,
            fragment=fragment,
            tier=self._island.outer.tier,
            begun=self._island.numbers.num_steps - 1,
        )

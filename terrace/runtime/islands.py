"""An island among the others: the exchanges that are due, and the numbers that travel with its changes.

Nothing crosses the outer tier in a step but an exchange. Tokens, losses, norms of changes and digests of the anchor
therefore ride with it (terrace.plan.routes.OUTER_FIGURES), summed over the island first.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from terrace.base.errors import TrainingError
from terrace.comm.collectives import Collectives
from terrace.plan.outer import Exchange, closing
from terrace.plan.routes import OUTER_FIGURES
from terrace.program.exchange import exchanged
from terrace.program.message import Transfer
from terrace.program.outer_result import OuterResult
from terrace.program.program import Program
from terrace.runtime.flat_param import FlatParam
from terrace.runtime.gap_messages import Carry
from terrace.runtime.model_state import ModelState
from terrace.runtime.outer_numbers import CHANGE, MEAN, MEANWHILE


class DivergedError(TrainingError):
    """Islands that must hold the same bits do not."""


class Island:
    """This rank's island among all; a single one never exchanges."""

    def __init__(self, state: ModelState) -> None:
        self.outer, self.numbers, self._flats = state.program.plan.outer, state.outer_numbers, state.trainable
        self._digests: dict[int, Tensor] = {}  # block -> digests of its anchor on all islands, of exchanges under way
        self._ended: list[OuterResult] = []

    def next(self) -> Exchange:
        """The exchange at the end of the next step."""
        return self.outer.exchange(self.numbers.num_steps, self.numbers.under_way)

    def closing(self) -> list[Exchange]:
        """The exchanges that end the run here."""
        return closing(self.numbers.under_way, self.numbers.changed)

    def telling(self, program: Program, collectives: Collectives, transfer: Transfer) -> Callable[[], None]:
        """Take the changes of an exchange that begins; the work on its lane that tells and hears their numbers."""
        numbers = self.take(program)
        return lambda: self.hear(program, collectives.gather_islands(transfer, numbers))

    def sending(self, block: int, collectives: Collectives) -> Carry:
        """The work of an exchange's lane on the change of a block, once its numbers are heard."""

        def exchange(flat: FlatParam, transfer: Transfer) -> None:
            flat.exchange(collectives, transfer, self.numbers.weight(self.outer.fragment(block)))

        return exchange

    def apply(self, program: Program, block: int) -> None:
        """Take the outer step of a block whose mean has arrived."""
        fragment, exchange = self.outer.fragment(block), program.exchange
        self._check(program, outer_blocks(program, fragment))
        stretch = self.numbers.stretch(fragment) if self.outer.penalty else None
        waits, moved = fragment not in exchange.arrives, fragment in self.numbers.changed
        for flat in self._flats(block):
            squares = flat.outer_state.apply(stretch, waits=waits, moved=moved)
            if flat.is_first(flat.layout.optimizer):  # of the ranks of this island with this slice
                self.numbers.told[fragment, MEANWHILE : MEAN + 1] += squares

    def take(self, program: Program) -> Tensor:
        """This rank's part of the numbers of the exchange that begins, fp64; changes are then in their messages."""
        starts, figures, digests = program.exchange.starts, list[Tensor](), list[Tensor]()
        self._end(program.exchange.arrives)  # before a lane hears of the next exchange of the same fragments
        for fragment in starts:
            own, none = exchanged(program, [fragment]), self.numbers.told.new_zeros(())
            for block in outer_blocks(program, fragment):
                digests.append(self._taken(block, fragment) if block in own else none)
            figures.append(self.numbers.begin(fragment))
        return torch.cat([*figures, *(digest.view(1) for digest in digests)])

    def _taken(self, block: int, fragment: int) -> Tensor:
        """Adds the squared norm of a block's change to the numbers; its digest."""
        digest = self.numbers.told.new_zeros(())
        for flat in self._flats(block):
            state = flat.outer_state
            change = state.take()
            if flat.is_first(flat.layout.optimizer):
                self.numbers.told[fragment, CHANGE] += change
                digest += state.digest()
        return digest

    def hear(self, program: Program, numbers: Tensor) -> None:
        """Keep the `numbers` (islands, n) of an exchange. Runs on a lane, so nothing of them goes to the host here."""
        starts, size = program.exchange.starts, len(OUTER_FIGURES)
        blocks = [block for fragment in starts for block in outer_blocks(program, fragment)]
        self._digests |= zip(blocks, numbers[:, size * len(starts) :].unbind(1), strict=True)
        for place, fragment in enumerate(starts):
            self.numbers.hear(fragment, numbers[:, size * place : size * (place + 1)])

    def _check(self, program: Program, blocks: Sequence[int]) -> None:
        """Raise `DivergedError` where islands do not hold the same anchor of a block."""
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
        """The results of the fragments that `exchange` applies, once its program has run and its numbers are heard."""
        self._end((() if exchange.starts else exchange.arrives) + (exchange.starts if exchange.waits else ()))
        ended, self._ended = self._ended, []
        return ended

    def _end(self, fragments: Sequence[int]) -> None:
        for fragment in fragments:
            self.numbers.end(fragment)
            self._ended.append(self.numbers.result(fragment))


def outer_blocks(program: Program, fragment: int) -> list[int]:
    """The blocks of the whole model, of all stages, that train in a fragment."""
    outer, blocks = program.plan.outer, enumerate(program.blocks)
    return [index for index, block in blocks if block.num_trainable and outer.fragment(index) == fragment]

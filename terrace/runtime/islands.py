"""An island among the others: its place in the cycle, the numbers that travel with its changes, and what all say.

Nothing crosses the outer tier in a step but an exchange. Tokens, losses, norms of changes and digests of the anchor
therefore ride with it (terrace.plan.routes.OUTER_FIGURES), summed over the island first.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from terrace.base.errors import TrainingError
from terrace.comm.collectives import Collectives
from terrace.plan.outer import Exchange, closing
from terrace.plan.routes import OUTER_FIGURES
from terrace.program.exchange import exchanged
from terrace.program.message import Transfer
from terrace.program.program import Program
from terrace.runtime.comm import Comm
from terrace.runtime.flat_param import FlatParam
from terrace.runtime.gap_messages import Carry
from terrace.runtime.model_state import ModelState


class DivergedError(TrainingError):
    """Islands that must hold the same bits do not."""


@dataclass(frozen=True, kw_only=True)
class OuterResult:
    """One exchange of a fragment, as it is applied.

    `loss` is the mean over the valid tokens of all islands since the fragment's last exchange began, `change` the root
    mean square over islands of the norms of their changes. `agreement` is the norm of the mean over `change`, of the
    exchange before: 1 where all islands changed alike, near the root of 1 / islands where they share no direction, and
    then `every` is long.
    """

    fragment: int
    loss: float
    num_tokens: int
    change: float
    agreement: float | None


@dataclass(frozen=True)
class _Heard:
    """Numbers of all islands for a fragment, on the device: (islands,) each, and a digest of every block."""

    tokens: Tensor
    loss: Tensor
    changes: Tensor
    agreement: Tensor | None
    digests: dict[int, Tensor]

    def result(self, fragment: int) -> OuterResult:
        """The figures on the host."""
        tokens = float(self.tokens.sum())
        return OuterResult(
            fragment=fragment,
            loss=float(self.loss.sum()) / max(1.0, tokens),
            num_tokens=int(tokens),
            change=float(self.changes.square().mean().sqrt()),
            agreement=None if self.agreement is None else float(self.agreement),
        )


class Island:
    """This rank's island among all: where the cycle stands, tokens by fragment, and the last numbers of all islands.

    `number` is among islands, the innermost outer tier fastest.
    """

    def __init__(self, state: ModelState, comm: Comm) -> None:
        outer, layout, rank = comm.program.plan.outer, comm.program.world_layout, comm.rank
        assert outer is not None, "the plan has islands"
        self.outer, self._flats = outer, state.trainable
        places, self.number = layout.coordinates(rank), 0
        for degree, place in reversed(list(zip(layout.degrees, places, strict=True))[layout.island + 1 :]):
            self.number = self.number * degree + place
        # One rank tells the tokens of its island, which all its ranks know.
        self._counts = not any(places[: layout.island + 1])
        self.num_steps = 0  # of the run
        self.under_way: set[int] = set()
        self.changed: set[int] = set()  # fragments with steps since their last exchange began
        self.sums = torch.zeros(
            outer.fragments, 2, dtype=torch.float64, device=comm.device
        )  # tokens, loss, by fragment
        self.changes: dict[int, Tensor] = {}  # fragment -> norms of the last change of every island
        self._weights: dict[int, Tensor] = {}
        self._stretch: dict[int, Tensor] = {}
        self._heard: dict[int, _Heard] = {}
        self._ended: list[OuterResult] = []

    def next(self) -> Exchange | None:
        """The exchange at the end of the next step."""
        return self.outer.exchange(self.num_steps, self.under_way)

    def closing(self) -> list[Exchange]:
        """The exchanges that end the run here."""
        return closing(self.under_way, self.changed)

    def stepped(self, loss: Tensor, num_tokens: Tensor) -> None:
        """A step of the island has a mean `loss` over `num_tokens`, both fp64 scalars."""
        self.sums += torch.stack([num_tokens, loss * num_tokens])
        self.num_steps += 1
        self.changed.update(range(self.outer.fragments))

    def telling(self, program: Program, collectives: Collectives, transfer: Transfer) -> Callable[[], None]:
        """Take the changes of an exchange that begins; the work on its lane that tells and hears their numbers."""
        numbers = self.take(program)
        return lambda: self.hear(program, collectives.gather_islands(transfer, numbers))

    def sending(self, block: int, collectives: Collectives) -> Carry:
        """The work of an exchange's lane on the change of a block, once its numbers are heard."""

        def exchange(flat: FlatParam, transfer: Transfer) -> None:
            flat.exchange(collectives, transfer, self._weights[self.outer.fragment(block)][self.number])

        return exchange

    def apply(self, program: Program, block: int) -> None:
        """Take the outer step of a block whose mean has arrived."""
        fragment, exchange = self.outer.fragment(block), program.exchange
        assert exchange is not None, "an exchange ends"
        self._check(program, self._heard[fragment].digests)
        self._heard[fragment].digests.clear()
        for flat in self._flats(block):
            flat.outer_state.apply(self._stretch.get(fragment), waits=fragment not in exchange.arrives)

    def take(self, program: Program) -> Tensor:
        """This rank's part of the numbers of the exchange that begins, fp64; changes are then in their messages."""
        assert program.exchange is not None, "an exchange begins"
        starts, figures, digests = program.exchange.starts, list[Tensor](), list[Tensor]()
        for fragment in starts:
            squares, own = self.sums.new_zeros(3), exchanged(program, [fragment])
            for block in outer_blocks(program, fragment):
                digests.append(self._taken(block, squares) if block in own else torch.zeros_like(squares[0]))
            figures += [self.sums[fragment] * self._counts, squares]
            self.sums[fragment] = 0
        self._end(program.exchange.arrives)  # before a lane hears of the next exchange of the same fragments
        self.changed -= set(starts)
        self.under_way |= set(starts)
        return torch.cat([*figures, *(digest.view(1) for digest in digests)])

    def _taken(self, block: int, squares: Tensor) -> Tensor:
        """Adds squared norms of a block to `squares` (3); its digest."""
        digest = torch.zeros_like(squares[0])
        for flat in self._flats(block):
            state = flat.outer_state
            change = state.take()
            if flat.is_first(flat.layout.optimizer):  # of the ranks of this island with this slice
                squares += torch.stack([change, state.meanwhile, state.mean])
                digest += state.digest()
        return digest

    def hear(self, program: Program, numbers: Tensor) -> None:
        """Keep the `numbers` (islands, n) of an exchange. Runs on a lane, so nothing of them goes to the host here."""
        assert program.exchange is not None, "an exchange begins"
        starts, size = program.exchange.starts, len(OUTER_FIGURES)
        blocks = [block for fragment in starts for block in outer_blocks(program, fragment)]
        digests = dict(zip(blocks, numbers[:, size * len(starts) :].unbind(1), strict=True))
        for place, fragment in enumerate(starts):
            tokens, loss, change, meanwhile, mean = numbers[:, size * place : size * (place + 1)].unbind(1)
            self._weights[fragment] = tokens / tokens.sum().clamp(min=1.0)
            before, self.changes[fragment] = self.changes.get(fragment), change.sqrt()
            if self.outer.penalty:
                gaps = torch.zeros_like(tokens) if before is None else meanwhile.sqrt() / before.clamp(min=1e-300)
                self._stretch[fragment] = 1.0 + gaps.mean()
            agreement = None if before is None else mean[0].sqrt() / before.square().mean().sqrt().clamp(min=1e-300)
            own = {block: digests[block] for block in outer_blocks(program, fragment)}
            self._heard[fragment] = _Heard(tokens, loss, self.changes[fragment], agreement, own)

    def _check(self, program: Program, digests: Mapping[int, Tensor]) -> None:
        """Raise `DivergedError` where islands do not hold the same anchor of a block."""
        for block, row in digests.items():
            same = (row == row[0]).tolist()
            if not all(same):
                raise DivergedError(
                    f"block {program.blocks[block].name!r} has other outer parameters on island {same.index(False)} "
                    "than on island 0, and all islands apply the same mean to the same: the memory of a rank or a "
                    "message was damaged; resume from the last checkpoint"
                )

    def applied(self, exchange: Exchange) -> list[OuterResult]:
        """The results of the fragments that `exchange` applies, once its program has run."""
        self._end((() if exchange.starts else exchange.arrives) + (exchange.starts if exchange.waits else ()))
        ended, self._ended = self._ended, []
        return ended

    def _end(self, fragments: Sequence[int]) -> None:
        self.under_way -= set(fragments)
        self._ended += [self._heard.pop(fragment).result(fragment) for fragment in fragments]


def outer_blocks(program: Program, fragment: int) -> list[int]:
    """The blocks of the whole model, of all stages, that train in a fragment."""
    outer, blocks = program.plan.outer, enumerate(program.blocks)
    return [index for index, block in blocks if block.num_trainable and outer and outer.fragment(index) == fragment]

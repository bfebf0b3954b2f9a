"""States of linear layers between the ring ranks of a context group: a scan over the tiers, of fixed size.

A ring rank has two chunks of each row, an early and a late one (terrace.plan.context). What is before them is not on
this rank: for the convolutions the last tokens of the chunk before, and for the gated delta rule a state. Each chunk
maps the state before it by S' = M S + B (terrace.model.delta_rule), and maps compose:

    (M, B) after (M1, B1), then (M2, B2)  =  (M2 M1, M2 B1 + B2)

So the ranks that a tier joins exchange the maps of their early and of their late chunks, compose them to those of their
unit, and the next tier exchanges these. Each then applies the maps before its chunks to a state of zeros, from the
outermost tier inwards. A link carries the same bytes for any length of a row.

The gradient of a state goes the other way, by G = M^T G' + H: the same scan of (M^T, H), with late and early chunks in
each other's place. So do the gradients of the tokens before a chunk.

Shape legend: b rows of a micro-batch, 2 chunks of a row on a rank (early, late), c tokens of a chunk, R = 2 b runs (row
by row), G key heads, r value heads of a key head, K and V elements of a key and a value, P taps, F features, n ranks or
units that a tier joins.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from itertools import accumulate
from operator import mul
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from terrace.model.attention import document_begins
from terrace.model.kinds import MOST_TAPS
from terrace.plan.in_block_messages import ContextLeg, ContextMessage
from terrace.plan.wire import MessageClass
from terrace.runtime.context.peer_exchange import PeerComm

_Levels = list[tuple[int, list[Tensor]]]  # by tier, innermost first: this rank's place, what each unit gave (2, b, ...)


class RingRuns:
    """The runs of a ring rank: `terrace.model.delta_net.Runs` of its linear layers, and `States` between them."""

    def __init__(self, comm: PeerComm, degrees: Sequence[int], micro_batch: int) -> None:
        self.comm, self.degrees, self.num_runs = comm, tuple(degrees), 2 * micro_batch

    @property
    def states(self) -> "RingRuns":
        """Itself: maps are exchanged by the same ranks as tokens."""
        return self

    def cut(self, x: Tensor) -> Tensor:
        """The runs (R, c, ...) of local tokens x (1, R c, ...)."""
        return x.reshape(self.num_runs, -1, *x.shape[2:])

    def begins(self, positions: Tensor | None) -> Tensor | None:
        """Where documents begin, bool (R, c), from positions (1, R c)."""
        assert positions is not None, "local tokens come with their positions"
        runs = self.cut(positions)
        begins = document_begins(runs)
        begins[:, 0] = runs[:, 0] == 0
        return begins

    def ages(self, positions: Tensor | None, begins: Tensor | None) -> Tensor | None:
        """Tokens of the same document before each token, those on other ranks too."""
        assert positions is not None, "local tokens come with their positions"
        return self.cut(positions).clamp(max=MOST_TAPS - 1).to(torch.int8)

    def halo(self, tails: Tensor) -> Tensor:
        """The last P - 1 inputs (R, P - 1, F) before each run, from the last ones of each run."""
        result: Tensor = _Halo.apply(tails, self)  # type: ignore[no-untyped-call]
        return result

    def before(self, maps: Tensor) -> Tensor:
        return self._runs(self._scanned(self._pairs(maps), backward=False))

    def after(self, maps: Tensor) -> Tensor:
        size = maps.shape[-2]
        turned = torch.cat([maps[..., :size].mT, maps[..., size:]], -1)
        return self._runs(self._scanned(self._pairs(turned).flip(0), backward=True).flip(0))

    def neighbours(self, tails: Tensor, *, backward: bool) -> Tensor:
        """What is next to each run of `tails` (R, ...): the run before it, or in a `backward` the run after it."""
        pair = self._pairs(tails).flip(0) if backward else self._pairs(tails)
        levels = self._levels(pair, ContextLeg.HALO, lambda units: torch.stack([units[-1][0], units[0][1]]), backward)
        first = next((units[place - 1][0] for place, units in levels if place), torch.zeros_like(pair[0]))
        # The middle of a row is on one rank, the last: there the first half is next to the second.
        second = next((units[place + 1][1] for place, units in levels if place + 1 < len(units)), pair[0])
        found = torch.stack([first, second])
        return self._runs(found.flip(0) if backward else found)

    def _scanned(self, pair: Tensor, *, backward: bool) -> Tensor:
        """States before the first and the second half (2, b, G, r, K, V), from their maps in the order of travel."""
        levels = self._levels(pair, ContextLeg.STATE, _composed, backward)
        size = pair.shape[-2]
        nothing = torch.zeros_like(pair[0][..., size:])
        outermost = levels[-1][1]
        states = [nothing, reduce(_applied, (unit[0] for unit in outermost), nothing)]
        for place, units in reversed(levels):
            states[0] = reduce(_applied, (unit[0] for unit in units[:place]), states[0])
            states[1] = reduce(_applied, (unit[1] for unit in reversed(units[place + 1 :])), states[1])
        return torch.stack(states)

    def _levels(
        self, pair: Tensor, leg: ContextLeg, unite: Callable[[list[Tensor]], Tensor], backward: bool
    ) -> _Levels:
        """Exchange `pair` over each tier, innermost first; `unite` makes the pair of a unit from those of its parts."""
        levels: _Levels = []
        strides = accumulate(self.degrees, mul, initial=1)
        for tier, (degree, stride) in enumerate(zip(self.degrees, strides, strict=False)):
            if degree > 1:
                place = self.comm.member // stride % degree
                units = self._exchanged(pair, ContextMessage(leg, tier, backward), place, degree, stride)
                levels.append((place, units))
                pair = unite(units)
        return levels

    def _exchanged(self, own: Tensor, message: ContextMessage, place: int, degree: int, stride: int) -> list[Tensor]:
        own = own.contiguous()  # and so are the tensors like it, which receive
        units = [own if other == place else torch.empty_like(own) for other in range(degree)]
        first = self.comm.member - place * stride
        others = [(first + other * stride, units[other]) for other in range(degree) if other != place]
        sends = [(member, units[place]) for member, _ in others]
        in_block, members = self.comm.in_block, self.comm.group.members
        flight = in_block.submit(lambda: self.comm.among.exchange(MessageClass.CONTEXT, sends, others), message)
        in_block.wait(flight, tuple(sorted(members[first + other * stride] for other in range(degree))))
        return units

    def _pairs(self, x: Tensor) -> Tensor:
        return x.view(-1, 2, *x.shape[1:]).transpose(0, 1)  # (R, ...) to (2, b, ...)

    def _runs(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1).flatten(0, 1)


def _applied(state: Tensor, maps: Tensor) -> Tensor:
    size = maps.shape[-2]
    return maps[..., :size] @ state + maps[..., size:]


def _composed(units: list[Tensor]) -> Tensor:
    """Maps of a unit: those of its first halves in order, and of its second halves in reverse order."""

    def then(first: Tensor, second: Tensor) -> Tensor:
        size = first.shape[-2]
        whole = second[..., :size] @ first
        return torch.cat([whole[..., :size], whole[..., size:] + second[..., size:]], -1)

    return torch.stack([reduce(then, (unit[0] for unit in units)), reduce(then, (unit[1] for unit in reversed(units)))])


class _Halo(Function):
    @staticmethod
    def forward(ctx: Any, tails: Tensor, runs: RingRuns) -> Tensor:
        ctx.runs = runs
        return runs.neighbours(tails, backward=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.runs.neighbours(grad.contiguous(), backward=True), None

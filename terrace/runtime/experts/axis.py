"""The expert axis of a rank: it brings the tokens of every mixture to the ranks that hold their experts."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor, nn

from terrace.comm.collectives import Collectives
from terrace.comm.rounding import Origin
from terrace.model.experts.gates import Choice
from terrace.model.experts.mixture import Mixture
from terrace.plan.expert_traffic import uncoded_bytes
from terrace.plan.hops import Hop, number_bytes
from terrace.plan.in_block_messages import ExpertMessage
from terrace.plan.layout import Layout
from terrace.plan.wire import MessageClass, WireFormat
from terrace.program.block_program.steps import ComputeKind
from terrace.program.message import Transfer
from terrace.program.program import Program
from terrace.runtime.experts.route import HopRows, count_prefixes, route_of
from terrace.runtime.experts.way import Way, back, toward
from terrace.runtime.in_block import InBlockAxis
from terrace.runtime.in_block_comm import InBlockComm


class ExpertAxis(InBlockAxis):
    """Puts itself into the mixtures of a rank's blocks."""

    def __init__(
        self,
        in_block: InBlockComm,
        program: Program,
        rank: int,
        collectives: Collectives,
        blocks: Iterable[nn.Module],
        origin: Origin,
    ) -> None:
        self.in_block, self._rank, self._collectives, self._origin = in_block, rank, collectives, origin
        self._lines = self._experts, self._rows = program.expert_lines
        self._transfers = {(each.message_class, each.ranks.axes, each.lane): each for each in program.expert_transfers}
        self._tiers = [[t for t in reversed(range(len(line.tiers))) if line.degrees[t] > 1] for line in self._lines]
        self._degrees = [_taken(line.degrees, tiers) for line, tiers in zip(self._lines, self._tiers, strict=True)]
        places = [line.coordinates(rank) for line in self._lines]
        self._places = [_taken(place, tiers) for place, tiers in zip(places, self._tiers, strict=True)]
        self._newest = MessageClass.ROUTE
        self._declared = Counter[tuple[MessageClass, str]]()
        self._mixtures = [module for block in blocks for module in block.modules() if isinstance(module, Mixture)]
        for mixture in self._mixtures:
            mixture.spread = self._spread
        self._num_choices = max((mixture.router.config.num_choices for mixture in self._mixtures), default=0)

    @property
    def declared(self) -> Mapping[tuple[MessageClass, str], int]:
        """Bytes of all batches so far, as the counts of their tokens say."""
        return self._declared

    def remove(self) -> None:
        """Leave each mixture the experts that it holds."""
        for mixture in self._mixtures:
            mixture.spread = None

    def _spread(self, mixture: Mixture, tokens: Tensor, choice: Choice) -> Tensor:
        num_experts = mixture.router.config.num_experts
        way = Way(self._hops(choice.experts, num_experts), self._units(num_experts), self)
        rows, weights, experts = toward(tokens, choice.weights, choice.experts, way)
        if mixture.tally is not None:
            mixture.tally.move(sum(hop.sent for hop in way.hops), sum(hop.returned for hop in way.hops))
        held = num_experts // math.prod(self._degrees[0])
        experts = experts - _index(self._places[0], self._degrees[0]) * held
        here = Choice(experts.masked_fill((experts < 0) | (experts >= held), -1), weights, is_whole=False)
        return back(mixture.pass_through(rows, here), way)

    def _units(self, num_experts: int) -> tuple[tuple[tuple[int, int], ...], ...]:
        """The experts of each unit of every hop, by peer; the units outside are this rank's."""
        degrees, first, found = self._degrees[0], 0, list[tuple[tuple[int, int], ...]]()
        for units, degree, place in zip(accumulate(degrees, mul), degrees, self._places[0], strict=True):
            size = num_experts // units
            found.append(tuple((first + unit * size, first + (unit + 1) * size) for unit in range(degree)))
            first += place * size
        return (*found, *[()] * len(self._degrees[1]))

    def _hops(self, experts: Tensor, num_experts: int) -> tuple[HopRows, ...]:
        """The route of choices (T, k), after every rank has learnt the counts of all."""
        numbers = count_prefixes(experts, num_experts, self._degrees[0]).int()
        table, num_bytes = numbers, numbers.nbytes
        for line in (self._rows, self._experts):
            if line.degree == 1:
                continue
            tier = max(tier for tier, degree in enumerate(line.degrees) if degree > 1)
            transfer = self._transfers[MessageClass.ROUTE, line.axes, tier]
            for hop in transfer.gathering:
                self._declared[MessageClass.ROUTE, line.tiers[hop.tier]] += (hop.degree - 1) * num_bytes
                num_bytes *= hop.degree
            table = self._gathered(transfer, table)
        # The one read of a layer: from here on, all sizes are known on the host.
        tiers, degrees, places = self._tiers, self._degrees, self._places
        return route_of(table.view(-1, len(numbers)).cpu().long(), tiers, degrees, places)

    def _gathered(self, transfer: Transfer, table: Tensor) -> Tensor:
        found = list[Tensor]()
        line, flat = transfer.ranks, table.flatten()
        message = ExpertMessage(transfer.message_class, transfer.lane, copies=line is self._rows)
        flight = self.in_block.submit(lambda: found.append(self._collectives.gather_numbers(transfer, flat)), message)
        ranks = [self._rank]
        for hop in transfer.gathering:
            ranks = [peer for rank in ranks for peer in line.peers(rank, hop.tier)]
        self.in_block.wait(flight, tuple(sorted(ranks)))
        return found[0]

    def wire(self, message: ExpertMessage) -> WireFormat:
        """The format in which the rows of a message cross its tier."""
        return self._over(message)[1].wire

    def code(self, message: ExpertMessage, rows: Tensor) -> Tensor:
        """Rows (n, H) in the format of their message, each by itself: (n, bytes)."""
        return self._collectives.code_rows(message.message_class, self._over(message)[1], rows, self._origin)

    def read(self, message: ExpertMessage, coded: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows (n, H) of their codes (n, bytes)."""
        return self._collectives.read_rows(self._over(message)[1], coded, dtype)

    def exchange(
        self, message: ExpertMessage, hop: HopRows, sent: Tensor, sends: Sequence[int], receives: Sequence[int]
    ) -> Tensor:
        """Bytes received from the peers of a hop for `sent` (n, bytes)."""
        line, (transfer, over) = self._line(message), self._over(message)
        rows = hop.sent if message.message_class is MessageClass.DISPATCH else hop.returned
        row_bytes = over.part_bytes + uncoded_bytes(message, self._num_choices, number_bytes(self._collectives.plan))
        self._declared[message.message_class, line.tiers[hop.tier]] += rows * row_bytes
        received = sent.new_empty(sum(receives), sent.shape[1])
        # Products stand between the last hop there and the first one back.
        if message.message_class is MessageClass.COMBINE and self._newest is MessageClass.DISPATCH:
            self.in_block.computes(ComputeKind.EXPERT_GRADIENTS if message.backward else ComputeKind.EXPERTS)
        self._newest = message.message_class
        flight = self.in_block.submit(
            lambda: self._collectives.exchange_rows(transfer, over, sent, sends, received, receives),
            message,
        )
        self.in_block.wait(flight, line.peers(self._rank, hop.tier))
        return received

    def _line(self, message: ExpertMessage) -> Layout:
        return self._rows if message.copies else self._experts

    def _over(self, message: ExpertMessage) -> tuple[Transfer, Hop]:
        transfer = self._transfers[message.message_class, self._line(message).axes, message.tier]
        (hop,) = transfer.gathering
        return transfer, hop


def _taken(values: Sequence[int], tiers: Sequence[int]) -> list[int]:
    return [values[tier] for tier in tiers]


def _index(places: Sequence[int], degrees: Sequence[int]) -> int:
    """Number of a unit among all, the outermost tier counting slowest."""
    index = 0
    for place, degree in zip(places, degrees, strict=True):
        index = index * degree + place
    return index

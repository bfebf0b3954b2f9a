"""The expert axis of a rank: it sends the tokens of every mixture to the ranks that hold their experts."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import mul
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from terrace.comm.collectives import Collectives
from terrace.comm.rounding import Origin
from terrace.model.experts.gates import Choice
from terrace.model.experts.gating import Kept
from terrace.model.experts.mixture import Mixture, here
from terrace.plan.expert_traffic import spans_of, uncoded_bytes
from terrace.plan.hops import number_bytes
from terrace.plan.in_block_messages import RoutedMessage
from terrace.plan.wire import MessageClass
from terrace.program.block_program.steps import Steps, moves_rows
from terrace.program.program import Program
from terrace.runtime.comm import Comm
from terrace.runtime.in_block import InBlockAxis, InBlockComm
from terrace.runtime.routing.crossing import Crossing
from terrace.runtime.routing.look_up import TableAxis
from terrace.runtime.routing.route import HopRows, Route, count_prefixes, route_of
from terrace.runtime.routing.routed_axis import RoutedAxis
from terrace.runtime.routing.way import Way


def routed_axes(blocks: Sequence[nn.Module], comm: Comm, in_block: InBlockComm) -> list[InBlockAxis]:
    """The axes of a rank that route rows: one of experts and one of tables, where the plan spreads these over ranks."""
    program, routed, found = comm.program, comm.program.model.routed, list[InBlockAxis]()
    declared = Counter[tuple[MessageClass, str]]()  # shared by both axes, whose messages have the same classes
    held = {index: blocks[index] for index in program.stage.held}
    if routed.of_experts:
        origin = Origin("experts", comm.device, comm.meter)
        found.append(ExpertAxis(in_block, program, comm.rank, comm.collectives, held, origin, declared))
    if routed.of_tables:
        origin = Origin("tables", comm.device, comm.meter)
        found.append(TableAxis(in_block, program, comm.rank, comm.collectives, held.values(), origin, declared))
    return found


class ExpertAxis(RoutedAxis):
    """Installs itself in the mixtures of a rank's `blocks`, by block index."""

    def __init__(
        self,
        in_block: InBlockComm,
        program: Program,
        rank: int,
        collectives: Collectives,
        blocks: Mapping[int, nn.Module],
        origin: Origin,
        declared: Counter[tuple[MessageClass, str]],
    ) -> None:
        routed = program.model.routed
        super().__init__(in_block, rank, collectives, origin, routed.of_experts, routed.lines, declared)
        self._experts, self._rows = self._lines
        self._tiers = [[t for t in reversed(range(len(line.tiers))) if line.degrees[t] > 1] for line in self._lines]
        self._degrees = [_taken(line.degrees, tiers) for line, tiers in zip(self._lines, self._tiers, strict=True)]
        coordinates = [line.coordinates(rank) for line in self._lines]
        self._coordinates = [_taken(own, tiers) for own, tiers in zip(coordinates, self._tiers, strict=True)]
        # Of recomputed blocks between their two forwards, piece by piece.
        self._routes = WeakKeyDictionary[Kept, list[Route]]()
        self._programs: dict[Mixture, tuple[tuple[Steps, Steps], int]] = {}  # steps behind the table, pieces of tokens
        for index, block in blocks.items():
            traffic, (forward, backward) = routed.traffic(index), program.model.block_program(index).routed
            for mixture in (module for module in block.modules() if isinstance(module, Mixture)):
                steps = tuple(filter(moves_rows, forward)), backward
                self._programs[mixture] = steps, traffic.pieces
                mixture.spread, mixture.overlaps_shared = self._spread, traffic.shares
        self._num_choices = max((mixture.router.config.num_choices for mixture in self._programs), default=0)

    def remove(self) -> None:
        for mixture in self._programs:
            mixture.spread, mixture.overlaps_shared = here, False

    def _spread(
        self, mixture: Mixture, tokens: Tensor, choice: Choice, all_tokens: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        num_experts, (steps, pieces) = mixture.router.config.num_experts, self._programs[mixture]
        gating, size = mixture.router.gating, num_experts // math.prod(self._degrees[0])
        kept = None if gating is None else gating.kept
        routes = None if kept is None else self._routes.get(kept)
        if routes is None:
            routes = self._gathered_routes(choice.experts, num_experts, pieces)
            if kept is not None:
                self._routes[kept] = routes
        spans, units = spans_of(len(tokens), pieces), self._units(num_experts)
        ways = [Way(stop - start, hops, units) for (start, stop), hops in zip(spans, routes, strict=True)]
        first = _index(self._coordinates[0], self._degrees[0]) * size
        hops = [hop for way in ways for hop in way.hops]
        mixture.tally.move(sum(hop.sent for hop in hops), sum(hop.returned for hop in hops))
        crossing = Crossing(self, mixture, steps, ways, (first, first + size))
        passed, shared = crossing.through(tokens, choice, all_tokens)
        return passed, shared if mixture.overlaps_shared else None

    def _gathered_routes(self, experts: Tensor, num_experts: int, pieces: int) -> list[Route]:
        """Gather the counts of all ranks, and compute the route of each piece of the choices (T, k)."""
        degrees = self._degrees[0]
        each = [
            count_prefixes(experts[start:stop], num_experts, degrees) for start, stop in spans_of(len(experts), pieces)
        ]
        numbers = torch.cat(each).int()
        table, num_bytes = numbers, numbers.nbytes
        for line in (self._rows, self._experts):
            if line.degree == 1:
                continue
            tier = max(tier for tier, degree in enumerate(line.degrees) if degree > 1)
            transfer = self._transfers[MessageClass.ROUTE, line.axes, tier]
            for hop in transfer.gathering:
                self._declared[MessageClass.ROUTE, line.tiers[hop.tier]] += (hop.degree - 1) * num_bytes
                num_bytes *= hop.degree
            table = self.gather(transfer, table)
        # On CUDA the host waits: from here on, it knows the sizes of all messages.
        counts = table.view(-1, pieces, len(each[0])).cpu().long()
        return [route_of(counts[:, piece], self._tiers, self._degrees, self._coordinates) for piece in range(pieces)]

    def _units(self, num_experts: int) -> tuple[tuple[tuple[int, int], ...], ...]:
        """The range of experts of each peer's unit, by hop and peer, within this rank's units of the tiers outside."""
        degrees, first, found = self._degrees[0], 0, list[tuple[tuple[int, int], ...]]()
        for units, degree, coordinate in zip(accumulate(degrees, mul), degrees, self._coordinates[0], strict=True):
            size = num_experts // units
            found.append(tuple((first + unit * size, first + (unit + 1) * size) for unit in range(degree)))
            first += coordinate * size
        return (*found, *[()] * len(self._degrees[1]))

    def declare(self, message: RoutedMessage, ways: Sequence[Way]) -> None:
        """Declare the bytes of a message of some pieces, computed from their routes."""
        line, over = self._line(message), self._over(message)[1]
        hops = (_hop_of(way, message) for way in ways)
        rows = sum(hop.sent if message.message_class is MessageClass.DISPATCH else hop.returned for hop in hops)
        row_bytes = over.part_bytes + uncoded_bytes(message, self._num_choices, number_bytes(self._collectives.plan))
        self._declared[message.message_class, line.tiers[message.tier]] += rows * row_bytes


def _hop_of(way: Way, message: RoutedMessage) -> HopRows:
    return next(hop for hop in way.hops if (hop.tier, hop.copies) == (message.tier, message.copies))


def _taken(values: Sequence[int], tiers: Sequence[int]) -> list[int]:
    return [values[tier] for tier in tiers]


def _index(coordinates: Sequence[int], degrees: Sequence[int]) -> int:
    """Index of a unit among all, the outermost tier slowest."""
    index = 0
    for coordinate, degree in zip(coordinates, degrees, strict=True):
        index = index * degree + coordinate
    return index

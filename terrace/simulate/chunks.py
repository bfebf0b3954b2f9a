"""Choice of the number of chunks of expert tokens, where a plan omits it: that of the fastest layer.

More chunks hide more of the messages behind products, but smaller messages and smaller products are less efficient. The
rest of a step does not depend on the number. So a forward and a backward of the experts are simulated alone
(terrace.simulate.routed) for pairs of forward and backward numbers, one of which divides the other. The larger of the
two is the number of pieces that are multiplied. It is doubled until two doublings in a row gain nothing. FSMoE
(2501.10714, section 4) minimises closed forms of such seconds.

With several hops on the way, each pair is played in two orders: one chunk ahead, and all chunks ahead (FSMoE's). On
sampled links the faster of the two was within 2 % of any number in between.

Messages slow overlapping compute: a lane that is busy for B seconds, of which W are waited for, adds its penalty times
B - W. Over several lanes the largest counts, on a CPU the sum.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from terrace.cluster.cluster import Cluster
from terrace.plan.expert_traffic import ExpertTraffic
from terrace.plan.in_block_messages import RoutedMessage
from terrace.plan.plan import EXPERT_CHUNKS, Plan
from terrace.plan.stack_rules import MOST_CHUNKS
from terrace.plan.wire import MessageClass
from terrace.program.block_program.routed import expert_steps, most_ahead
from terrace.program.block_program.steps import Compute, ComputeKind, Gap, Steps, input_half
from terrace.simulate.inside import InBlockPrices
from terrace.simulate.links import tier_penalty
from terrace.simulate.priced_instruction import Doing
from terrace.simulate.routed import RoutedSeconds, ordered, played_s, routed_seconds
from terrace.simulate.work import Work

if TYPE_CHECKING:
    from terrace.program.program import Program

_SLOWER = 2  # numbers of pieces in a row after which no larger one is tried
_GAIN = 1e-3  # part of a layer's seconds that more pieces must save: a prediction is not exact to less


class Numbers(NamedTuple):
    """`Plan.expert_chunks`; 0 means unset."""

    forward: int = 1
    backward: int = 1
    ahead: int = 1

    @property
    def pieces(self) -> int:
        """Number of pieces of tokens that are multiplied."""
        return max(self.forward, self.backward)

    @property
    def table(self) -> dict[str, int]:
        return dict(zip(EXPERT_CHUNKS, self, strict=True))


_Item = Compute | RoutedMessage
_Order = tuple[tuple[_Item, ...], tuple[tuple[Doing, int, int, int], ...]]
Orders = dict[tuple[object, ...], _Order]


_LEFT_OUT = Numbers(0, 0, 0)


class Layer:
    """The experts of a layer in any number of chunks, on one micro-batch, with the links to themselves.

    `seconds_of` gives the compute seconds for a traffic's number of pieces. Layers that share `orders` compute the
    order of their steps once.
    """

    def __init__(
        self,
        cluster: Cluster,
        traffic: ExpertTraffic,
        seconds_of: Callable[[ExpertTraffic], RoutedSeconds],
        orders: Orders | None = None,
    ) -> None:
        self._cluster, self.traffic, self._seconds_of = cluster, traffic, seconds_of
        self._orders: Orders = {} if orders is None else orders
        self._own: dict[int, RoutedSeconds] = {}
        self._passes: dict[tuple[bool, bool, int, int, int], tuple[float, float]] = {}
        self._prices: dict[int, InBlockPrices] = {}
        self._sent: dict[tuple[RoutedMessage, int], float] = {}
        self._penalties = [tier_penalty(cluster, tier) for tier in range(len(cluster.tiers))]

    @property
    def has_orders(self) -> bool:
        """Whether the number of chunks ahead is free; over a single hop all go ahead."""
        return len(self.traffic.way) > 1

    def allows(self, pieces: int) -> bool:
        """Whether tokens can be cut into this many pieces: none empty, and with all experts in each if routing is
        even.
        """
        traffic = self.traffic
        return not traffic.tokens % (traffic.num_experts * pieces) if traffic.is_even else pieces <= traffic.tokens

    def of(self, numbers: Numbers) -> tuple[float, float]:
        forward_s, backward_s = (self._pass(back, numbers)[0] for back in (False, True))
        return forward_s, backward_s

    def waits_s(self, numbers: Numbers, *, halves: bool = False) -> tuple[float, float]:
        """Seconds that a forward and a backward wait for messages, without penalties.

        With `halves`, weight gradients are a separate pass and hide no messages.
        """
        return self._pass(False, numbers)[1], self._pass(True, numbers, halves)[1]

    def tables_s(self, numbers: Numbers) -> float:
        """Seconds of a forward's routing tables, which are sent first and exposed; a recomputed forward sends none."""
        forward, pieces = numbers.forward, numbers.pieces
        items, _ = self._order(False, forward, pieces, numbers.ahead)
        messages = (item for item in items if isinstance(item, RoutedMessage))
        return sum(
            self._message_s(item, forward, pieces) for item in messages if item.message_class is MessageClass.ROUTE
        )

    def least_s(self) -> tuple[float, float, float]:
        """Lower bounds for any numbers: seconds of a forward's tables, and of the rows of a forward and of a backward.

        Rows are counted on their busiest lane, without compute. Chunking sends the same bytes in more messages, so one
        chunk is the minimum.
        """
        whole, rows_s = Numbers(), [0.0, 0.0]
        for backward in (False, True):
            items, order = self._order(backward, *whole)
            lanes_s = [0.0] * len(self._penalties)
            for does, number, lane, _ in order:
                item = items[number]
                if does is not Doing.SEND or not isinstance(item, RoutedMessage):
                    continue
                if item.message_class is not MessageClass.ROUTE:
                    lanes_s[lane] += self._message_s(item, *whole[:2])
            rows_s[backward] = max(lanes_s)
        return self.tables_s(whole), rows_s[False], rows_s[True]

    def _pass(self, backward: bool, numbers: Numbers, halves: bool = False) -> tuple[float, float]:
        number, pieces = numbers[backward], numbers.pieces
        ahead = most_ahead(numbers.ahead, number)
        key = (backward, halves, number, pieces, ahead)
        found = self._passes.get(key)
        if found is None:
            items, order = self._order(backward, number, pieces, ahead, halves)
            own = self._seconds(pieces)._replace(chunks=number)
            each_s = [
                own.of(item) if isinstance(item, Compute) else self._message_s(item, number, pieces) for item in items
            ]
            total_s, waited_s = played_s((does, each_s[item], lane, other) for does, item, lane, other in order)
            busy_s = [0.0] * len(self._penalties)
            for does, item, lane, _ in order:
                if does is Doing.SEND:
                    busy_s[lane] += each_s[item]
            slowed = [
                penalty * max(0.0, busy - waited_s) for penalty, busy in zip(self._penalties, busy_s, strict=True)
            ]
            slowed_s = sum(slowed) if self._cluster.device.type == "cpu" else max(slowed)
            found = self._passes[key] = total_s + slowed_s, waited_s
        return found

    def _order(self, backward: bool, number: int, pieces: int, ahead: int, halves: bool = False) -> _Order:
        traffic = self.traffic
        degrees = tuple(degree > 1 for line in (traffic.expert, traffic.rows) for degree in line)
        key = (degrees, traffic.shares, backward, halves, number, pieces, ahead)
        found = self._orders.get(key)
        if found is None:
            chunks = (pieces, number) if backward else (number, pieces)
            steps = expert_steps(replace(traffic, chunks=chunks, ahead=ahead))[backward]
            found = self._orders[key] = _order_of(input_half(steps) if halves else steps)
        return found

    def _seconds(self, pieces: int) -> RoutedSeconds:
        found = self._own.get(pieces)
        if found is None:
            found = self._own[pieces] = self._seconds_of(replace(self.traffic, chunks=(pieces, pieces)))
        return found

    def _message_s(self, message: RoutedMessage, number: int, pieces: int) -> float:
        # A table has one part per piece; a message of rows has one chunk.
        number = pieces if message.message_class is MessageClass.ROUTE else number
        found = self._sent.get((message, number))
        if found is None:
            if number not in self._prices:
                traffic = replace(self.traffic, chunks=(number, number))
                self._prices[number] = InBlockPrices(self._cluster, experts=traffic)
            found = self._sent[message, number] = self._prices[number].seconds(message)
        return found


def _order_of(steps: Steps) -> _Order:
    # Items of a kind cost the same as the first, except weight gradients (`RoutedSeconds.of`).
    numbers: dict[_Item, int] = {}
    order = []
    for does, item, other in ordered(steps):
        if isinstance(item, Gap):
            continue
        alike: _Item
        if isinstance(item, Compute):
            later = item.kind is ComputeKind.EXPERT_WEIGHTS and item.number > 0
            alike, lane = item._replace(number=int(later)), -1
        else:
            alike, lane = item._replace(chunk=0), item.tier
        order.append((does, numbers.setdefault(alike, len(numbers)), lane, other))
    return tuple(numbers), tuple(order)


def plan_with_chunks(program: "Program", work: Work) -> Plan:
    """The plan of `program` with its missing numbers of chunks chosen for a rank's `work`."""
    plan, layers = program.plan, list[tuple[int, Layer]]()
    for kind, times in Counter(program.model.block_kinds).items():
        first = program.model.block_kinds.index(kind)
        traffic = program.model.routed.traffic(first)
        if traffic.way:
            layers.append((times, Layer(program.cluster, traffic, partial(_computing, program, first, work))))
    if not layers:
        return plan
    # `expert_gaps` fix the number of chunks of the backward.
    given = {"backward": 1, **plan.expert_chunks} if plan.expert_gaps else plan.expert_chunks
    numbers = best_chunks(layers, Numbers(*(given.get(name, 0) for name in EXPERT_CHUNKS)))
    return replace(plan, expert_chunks=numbers.table)


def _computing(program: "Program", block: int, work: Work, traffic: ExpertTraffic) -> RoutedSeconds:
    return routed_seconds(program, block, work, traffic)[0]


def best_chunks(layers: Sequence[tuple[int, Layer]], given: Numbers = _LEFT_OUT) -> Numbers:
    """Fastest numbers of chunks for the layers, each counted `times` times; given numbers are kept.

    A number that is not given stays 1 where tokens cannot be cut.
    """
    best, least_s, slower = Numbers(*(number or 1 for number in given)), math.inf, 0
    for pieces in _doubled(max(1, given.pieces)):
        if not all(layer.allows(pieces) for _, layer in layers):
            break
        found = [_ordered_best(layers, numbers, given.ahead) for numbers in _with_pieces(pieces, given)]
        slower += 1
        for seconds, _, numbers in sorted(found)[:1]:
            if seconds < least_s * (1 - _GAIN):
                best, least_s, slower = numbers, seconds, 0
        if slower == _SLOWER:
            break
    return best


def _ordered_best(layers: Sequence[tuple[int, Layer]], numbers: Numbers, ahead: int) -> tuple[float, int, Numbers]:
    """(Seconds, sum, numbers) of a pair in its best order, or in that of `ahead` if it is not 0."""

    def seconds(each: Numbers) -> float:
        return sum(times * sum(layer.of(each)) for times, layer in layers)

    one = numbers._replace(ahead=ahead or 1)
    found, found_s = one, seconds(one)
    if not ahead and numbers.pieces > 2 and any(layer.has_orders for _, layer in layers):
        every = numbers._replace(ahead=numbers.pieces - 1)
        every_s = seconds(every)
        if every_s < found_s * (1 - _GAIN):
            found, found_s = every, every_s
    return found_s, sum(found), found


def _doubled(pieces: int) -> Iterator[int]:
    while pieces <= MOST_CHUNKS:
        yield pieces
        pieces *= 2


def _with_pieces(pieces: int, given: Numbers) -> Iterator[Numbers]:
    divisors = [number for number in range(1, pieces + 1) if pieces % number == 0]
    forwards, backwards = ([number] if number else divisors for number in given[:2])
    for forward in forwards:
        for backward in backwards:
            if max(forward, backward) == pieces and pieces % min(forward, backward) == 0:
                yield Numbers(forward, backward)

"""FSMoE's 1458 layers on bed B: its closed forms, and the orders of messages that they stand for, played.

A layer's mixture passes in `r` chunks. D, G, P, R, C are the seconds of a chunk's dispatch between nodes, gather
inside, products, reduction inside, combine between nodes; X those of gradients sent meanwhile, between nodes:

    between nodes   D D .. D X C C .. C       a message starts when its lane is free and its rows are there
    inside            G G .. G R R .. R
    compute             P P .. P

`chunked_s` plays this with the clocks of a rank of the simulator (terrace.simulate.rank). With weight gradients as
fillers a backward's P are input gradients alone, and a weight gradient runs whenever the next chunk is not there. On
one bus messages inside and between nodes each take twice as long while the other is under way.
"""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product

from bench.validation.fsmoe import BED_B, BETWEEN, INSIDE, Layer
from bench.validation.rows import Row, Table
from terrace.model.params import ParamSpec
from terrace.model.spec import BlockSpec
from terrace.plan.presets import preset
from terrace.plan.wire import MessageClass
from terrace.program.instruction import Op
from terrace.program.lowering import build
from terrace.program.program import Program
from terrace.simulate.below import Moment
from terrace.simulate.priced_instruction import Event
from terrace.simulate.rank import Rank

DEGREES = (1, 2, 4, 8)
_TEXT = """
Means over the 1458 layers of the paper's sweep on bed B, forward and backward: attention, its messages, the mixture and
the all-reduce of attention's gradients, played with the clocks of a rank of the simulator. PipeMoE has one lane for all
messages, one degree for both directions, and sends gradients after the layer. "No drop" is taken as an even load.

The paper's closed forms of a mixture's seconds are those of the play on all layers, in both directions, to {error:.0e},
and the degree that they choose costs at most {loss:.2%} more than the best: here a reduction takes as long as a gather.

Bed B has no NVLink, so messages inside and between nodes share PCIe: the published gain of both at once lies between
that on links of their own and that on one bus, where each takes twice as long while the other is under way. With one
lane for all messages, nothing shares a bus. Two tiers on one bus are not two links: a cluster says so with the key
`bus` of a tier, and `terrace probe` measures it.

With weight gradients as fillers (a backward of the mixture waits for input gradients alone; weight gradients run in the
waits of the mixture and of attention) the gain on links of their own is {fillers:.2f}: {more:.1%} more than the
paper's order in the mean, {least:.1%} on the layer that gains least, and {bus:.2f} on one bus.
"""


Play = Callable[..., float]
_START: Moment = (0.0, -1)


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Seconds of a chunk's parts; `weight_s` of a weight gradient, which may run at any time after the products."""

    dispatch_s: float
    gather_s: float
    products_s: float
    reduce_s: float
    combine_s: float
    weight_s: float = 0.0
    num_weights: int = 0  # pieces of `weight_s`

    @property
    def whole_backward(self) -> "Chunk":
        """The chunk of a backward whose weight gradients are part of the products."""
        return replace(self, products_s=2 * self.products_s)

    def fillers(self, products: int) -> "Chunk":
        """The chunk of a backward whose weight gradients, one for each of the products, run in waits."""
        return replace(self, weight_s=self.products_s / products, num_weights=products)


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Seconds of the backward of attention, of a message before and one behind it, and of gradients sent beside it."""

    backward_s: float
    message_s: float
    gradient_s: float


def layers() -> list[Layer]:
    """The 1458 layers of the paper's sweep on bed B; "no drop" with an even load is a capacity of 1."""
    grid = product((1, 2, 4), (8, 16, 32), (256, 512, 1024), (1024, 2048, 4096), (2, 3, 4), (1.2, 2.4, 1.0), (2, 3))
    return [
        Layer(
            sequences=sequences,
            sequence=sequence,
            hidden=hidden,
            heads=heads,
            kv_heads=heads,
            inner=times * hidden,
            products=products,
            capacity=capacity,
        )
        for sequences, heads, sequence, hidden, times, capacity, products in grid
    ]


def chunk_of(layer: Layer, degree: int) -> Chunk:
    """One of `degree` equal chunks of a forward."""
    there, back = MessageClass.DISPATCH, MessageClass.COMBINE
    return Chunk(
        dispatch_s=layer.message_s(there, BETWEEN, degree),
        gather_s=layer.message_s(there, INSIDE, degree),
        products_s=layer.products_s(degree),
        reduce_s=layer.message_s(back, INSIDE, degree),
        combine_s=layer.message_s(back, BETWEEN, degree),
    )


def closed_s(chunk: Chunk, degree: int, gradient_s: float = 0.0) -> float:
    """Seconds of a mixture by the paper's cases (its section 4)."""
    r, both = degree, chunk.gather_s + chunk.reduce_s
    exchange = (chunk.dispatch_s + chunk.combine_s) / 2
    products, rest = r * chunk.products_s, 2 * (r - 1) * exchange
    slow_links = exchange > chunk.gather_s  # Q1
    if slow_links:
        long_products = products > rest  # Q2
        between = gradient_s > products - rest + both if long_products else gradient_s > both  # Q5, Q4
    else:
        long_products = products > (r - 1) * both  # Q3
        between = gradient_s > (both + products if long_products else r * both) - rest  # Q7, Q6
    if between:
        return 2 * r * exchange + gradient_s
    if long_products:
        return 2 * exchange + both + products
    return 2 * r * exchange + both if slow_links else 2 * exchange + r * both


@cache  # layers that differ in heads alone have the same mixtures, and systems the same forwards
def chunked_s(
    chunk: Chunk,
    degree: int,
    gradient_s: float = 0.0,
    *,
    inside: int = INSIDE,
    attention: Attention | None = None,
    share: float = 0.0,
) -> float:
    """Seconds of a mixture in `degree` chunks, and of the backward of `attention` behind it.

    `inside` is the lane of messages inside a node: `BETWEEN`, one lane for all messages. `share` is that of a bus: 1,
    one bus for both kinds of messages.
    """
    rank = Rank(_program(share))
    dispatch, combine = _message(chunk.dispatch_s, BETWEEN), _message(chunk.combine_s, BETWEEN)
    gather, reduce = _message(chunk.gather_s, inside), _message(chunk.reduce_s, inside)
    products, weights = _computing(chunk.products_s), _computing(chunk.weight_s)
    fillers = 0

    def arrived(moment: Moment) -> None:
        nonlocal fillers
        while fillers and moment[0] > rank.now_s:
            rank.compute(weights)
            fillers -= 1
        rank.wait(moment, "")

    arrivals = [rank.issue(gather, rank.issue(dispatch, _START)) for _ in range(degree)]
    rank.issue(_message(gradient_s, BETWEEN), _START)
    back = _START
    for arrival in arrivals:
        arrived(arrival)
        rank.compute(products)
        fillers += chunk.num_weights
        back = rank.issue(combine, rank.issue(reduce, _START))
    arrived(back)
    if attention is not None:
        stream = _message(attention.message_s, inside)
        gathered = rank.issue(stream, _START)
        gradients = rank.issue(_message(attention.gradient_s, BETWEEN), _START)
        arrived(gathered)
        rank.compute(_computing(attention.backward_s))
        arrived(rank.issue(stream, _START))
        arrived(gradients)
    for _ in range(fillers):
        rank.compute(weights)
    return sum(rank.time_s.values())


@cache
def _program(share: float) -> Program:
    # A rank takes its lanes and its bus from a program.
    node, system = BED_B.tiers
    cluster = replace(BED_B, tiers=(node, replace(system, bus={node.name: share})))
    block = BlockSpec(name="layer", params=(ParamSpec(name="weight", shape=(8,)),))
    return build(cluster, preset("ddp", cluster), [block], 1)


def _message(seconds: float, lane: int) -> Event:
    return Event(Op.GATHER, 0, seconds, lane, "")


def _computing(seconds: float) -> Event:
    return Event(Op.FORWARD, 0, seconds, -1, "")


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Seconds of one layer, forward and backward, by system."""

    pipemoe: float  # one lane for all messages, one degree for both directions, gradients after the layer
    tutel: float  # and gradients beside attention
    one_lane: float  # and a degree for each direction, gradients in gaps of the mixture too
    fsmoe: float  # and lanes of their own for messages inside and between nodes
    fillers: float  # and weight gradients of experts in waits
    bus: float  # as `fsmoe`, on one bus
    bus_fillers: float  # as `fillers`, on one bus


def steps_of(layer: Layer) -> Steps:
    """A layer under every system, each with its best degrees."""
    forward_s, backward_s = layer.attention_s
    chunks = {degree: chunk_of(layer, degree) for degree in DEGREES}
    whole = {degree: chunk.whole_backward for degree, chunk in chunks.items()}
    fillers = {degree: chunk.fillers(layer.products) for degree, chunk in chunks.items()}
    alone, on_bus = partial(chunked_s, inside=BETWEEN), partial(chunked_s, share=1.0)
    # Gradients hide beside attention first; the mixture's gaps take the rest. On one lane they do not travel beside
    # attention's own messages.
    room_s = {False: backward_s, True: backward_s + 2 * layer.stream_s}
    gap_s = {lanes: max(0.0, layer.gradient_s - room) for lanes, room in room_s.items()}

    def attention(gradient_s: float) -> Attention:
        return Attention(backward_s=backward_s, message_s=layer.stream_s, gradient_s=gradient_s)

    def there_s(play: Play) -> float:
        return forward_s + 2 * layer.stream_s + min(play(chunk, degree) for degree, chunk in chunks.items())

    def back_s(play: Play, backward: Mapping[int, Chunk], lanes: bool) -> float:
        beside = attention(layer.gradient_s - gap_s[lanes])
        return min(play(chunk, degree, gap_s[lanes], attention=beside) for degree, chunk in backward.items())

    def same_degree_s(gradient_s: float) -> float:
        behind = attention(gradient_s)
        both = (alone(chunks[degree], degree) + alone(whole[degree], degree, attention=behind) for degree in DEGREES)
        return forward_s + 2 * layer.stream_s + min(both)

    return Steps(
        pipemoe=same_degree_s(0.0) + layer.gradient_s,
        tutel=same_degree_s(layer.gradient_s),
        one_lane=there_s(alone) + back_s(alone, whole, False),
        fsmoe=there_s(chunked_s) + back_s(chunked_s, whole, True),
        fillers=there_s(chunked_s) + back_s(chunked_s, fillers, True),
        bus=there_s(on_bus) + back_s(on_bus, whole, True),
        bus_fillers=there_s(on_bus) + back_s(on_bus, fillers, True),
    )


@cache
def every_step() -> tuple[Steps, ...]:
    """The layers of the sweep under every system."""
    return tuple(map(steps_of, layers()))


def gain(system: str, over: str = "pipemoe") -> float:
    """Mean over the layers of the seconds under `over` over those under `system`."""
    return statistics.fmean(getattr(each, over) / getattr(each, system) for each in every_step())


def closed_errors(layer: Layer) -> tuple[float, float]:
    """(Largest error of the closed forms against the play, largest loss by the degree that they choose) of a layer."""
    errors, losses = [], []
    for backward, gradient_s in ((False, 0.0), (True, layer.gradient_s)):
        played, closed = {}, {}
        for degree in DEGREES:
            chunk = chunk_of(layer, degree)
            chunk = chunk.whole_backward if backward else chunk
            played[degree] = chunked_s(chunk, degree, gradient_s)
            closed[degree] = closed_s(chunk, degree, gradient_s)
            errors.append(abs(closed[degree] / played[degree] - 1))
        losses.append(played[min(closed, key=closed.__getitem__)] / min(played.values()) - 1)
    return max(errors), max(losses)


@cache
def every_closed_error() -> tuple[float, float]:
    """The largest of `closed_errors` over the layers of the sweep."""
    errors, losses = zip(*map(closed_errors, layers()), strict=True)
    return max(errors), max(losses)


def table() -> Table:
    """Mean gains over PipeMoE beside the published ones."""
    rows = (
        ("gradients beside attention", "one lane", "tutel", 1.08),
        ("and in gaps, degrees by direction", "one lane", "one_lane", 1.16),
        ("and both kinds of links at once", "own links", "fsmoe", 1.22),
        ("and both kinds of links at once", "one bus", "bus", 1.22),
    )
    error, loss = every_closed_error()
    least = max(0.0, min(each.fsmoe / each.fillers for each in every_step()) - 1)  # no negative zero
    more = gain("fillers", over="fsmoe") - 1
    return Table(
        title="FSMoE, gains over PipeMoE",
        text=_TEXT.format(
            error=error, loss=loss, fillers=gain("fillers"), more=more, least=least, bus=gain("bus_fillers")
        ).strip(),
        heads=("system", "messages"),
        unit="times",
        rows=[
            Row(cells=(name, links), published=figure, modelled=gain(system)) for name, links, system, figure in rows
        ],
        mean_limit=0.08,
        max_limit=0.16,
    )

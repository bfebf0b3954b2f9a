"""Chunks of tokens through experts on several ranks: ranks as threads, against one mixture that has all experts."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from queue import Queue
from threading import Thread
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from terrace.model.experts.gates import Choice
from terrace.model.experts.mixture import Mixture
from terrace.plan.expert_traffic import spans_of
from terrace.plan.in_block_messages import RoutedMessage
from terrace.plan.wire import FORMATS, MessageClass, WireFormat
from terrace.program.block_program.routed import expert_steps
from terrace.program.block_program.steps import Await, Compute, Send
from terrace.runtime.in_block import InBlockComm
from terrace.runtime.routing.crossing import Crossing
from terrace.runtime.routing.route import count_prefixes, route_of
from terrace.runtime.routing.way import Way
from terrace.simulate.chunks import Numbers
from tests.support.expert_traffic import traffic_of
from tests.support.mixtures import GROUPED, PLAIN, mixture

Place = tuple[int, ...]
HIDDEN, FP64 = 64, FORMATS["fp64"]


@dataclass
class ThreadRank:
    """A rank that carries rows between threads, as they are."""

    place: Place
    num_wide: int
    mail: "dict[tuple[Place, Place], Queue[Tensor]]"
    declared: list[tuple[RoutedMessage, int]] = field(default_factory=list)
    sent: list[tuple[RoutedMessage, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        ended = SimpleNamespace(wait=lambda: None)

        def submit(work: Any, _: RoutedMessage, after: Any = None) -> Any:
            work()
            return SimpleNamespace(ticket=ended)

        nothing = SimpleNamespace(submit=submit, wait=lambda *_: None, computes=lambda *_: None, fill=lambda *_: None)
        self.in_block = cast(InBlockComm, nothing)

    def wire(self, message: RoutedMessage) -> WireFormat:
        return FP64

    def code(self, message: RoutedMessage, rows: Tensor) -> Tensor:
        return rows.contiguous().view(torch.uint8)

    def read(self, message: RoutedMessage, coded: Tensor, dtype: torch.dtype) -> Tensor:
        return coded.view(dtype)

    def peers(self, message: RoutedMessage) -> tuple[int, ...]:
        return ()

    def declare(self, message: RoutedMessage, ways: Sequence[Way]) -> None:
        hops = [next(h for h in way.hops if (h.tier, h.copies) == (message.tier, message.copies)) for way in ways]
        there = message.message_class is MessageClass.DISPATCH
        self.declared.append((message, sum(hop.sent if there else hop.returned for hop in hops)))

    def exchange(self, message: RoutedMessage, sent: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        level = _level(self, message)
        peers = [(*self.place[:level], unit, *self.place[level + 1 :]) for unit in range(len(sends))]
        self.sent.append((message, len(sent)))
        for peer, part in zip(peers, torch.split(sent, list(sends)), strict=True):
            if peer != self.place:
                self.mail[self.place, peer].put(part)
        others = [peer for peer in peers if peer != self.place]
        received = torch.cat([self.mail[peer, self.place].get(timeout=60) for peer in others])
        assert len(received) == sum(receives)
        return received


def _level(rank: ThreadRank, message: RoutedMessage) -> int:
    # Places count from the outside, tiers from the inside; rows come behind the ranks of different experts.
    return (len(rank.place) if message.copies else rank.num_wide) - 1 - message.tier


def whole(config: Any) -> Mixture:
    torch.manual_seed(3)
    made = Mixture(mixture(config), dtype=torch.float64)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return made


def choices_of(kind: str, place: Place, tokens: int, num_experts: int, per_token: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(10**at * digit for at, digit in enumerate(place)) + 1)
    drawn = [torch.randperm(num_experts, generator=generator)[:per_token] for _ in range(tokens)]
    experts = torch.stack(drawn) if drawn else torch.zeros(0, per_token, dtype=torch.int64)
    if kind == "one expert":
        experts[:] = torch.arange(per_token) + num_experts - per_token
    return experts


CASES = [
    ((2,), (), (2, 2), "drawn", 7),
    ((2, 2), (), (1, 4), "drawn", 10),
    ((2, 2), (), (4, 2), "one expert", 9),
    ((2,), (2,), (2, 4), "drawn", 8),
    ((), (2,), (3, 1), "drawn", 8),
    ((2, 2), (), (8, 8), "drawn", 3),
    ((2, 2), (), (4, 4, 3), "drawn", 10),
    ((2,), (2,), (2, 4, 2), "drawn", 8),
    ((4,), (), (2, 1), "one rank without tokens", 6),
]


@pytest.mark.parametrize(("wide", "rows", "chunks", "kind", "num_tokens"), CASES)
@pytest.mark.parametrize("config", [PLAIN, replace(GROUPED, num_groups=1, kept_groups=1, biased=False)])
def test_chunks_compute_what_one_rank_computes(
    wide: Place, rows: Place, chunks: tuple[int, ...], kind: str, num_tokens: int, config: Any
) -> None:
    places = list(product(*map(range, (*wide, *rows))))
    tokens = {place: 0 if "without" in kind and not any(place) else num_tokens - sum(place) % 2 for place in places}
    experts = {place: choices_of(kind, place, tokens[place], config.num_experts, config.per_token) for place in places}
    numbers = Numbers(*chunks)
    traffic = traffic_of(
        num_tokens,
        (config.per_token, config.num_experts),
        HIDDEN,
        "fp64",
        expert=wide[::-1],
        rows=rows[::-1],
        chunks=(numbers.forward, numbers.backward),
        ahead=numbers.ahead,
        shares=config.shared_size > 0,
    )
    steps = tuple(tuple(step for step in half if _moves_rows(step)) for half in expert_steps(traffic))
    pieces = numbers.pieces
    spans = {place: spans_of(tokens[place], pieces) for place in places}
    table = {
        place: [count_prefixes(experts[place][start:stop], config.num_experts, wide) for start, stop in spans[place]]
        for place in places
    }
    mail: Any = {pair: Queue() for pair in product(places, places)}
    one, results = whole(config), dict[Place, Any]()

    def run(place: Place) -> None:
        tiers = [list(range(len(degrees)))[::-1] for degrees in (wide, rows)]
        coordinates = place[: len(wide)], place[len(wide) :]
        units, first, size = list[Any](), 0, config.num_experts
        for degree, here in zip(wide, place, strict=False):
            size //= degree
            units.append(tuple((first + unit * size, first + (unit + 1) * size) for unit in range(degree)))
            first += here * size
        units += [()] * len(rows)
        ways = []
        for piece, (start, stop) in enumerate(spans[place]):
            counts = torch.stack([table[each][piece] for each in places])
            ways.append(Way(stop - start, route_of(counts, tiers, (wide, rows), coordinates), tuple(units)))
        rank, own = ThreadRank(place, len(wide), mail), held(one, first, size, rows, coordinates[1])
        x, weights = inputs_of(place, tokens[place], config.per_token)
        crossing = Crossing(rank, own, cast(Any, steps), ways, (first, first + size))
        found, shared = crossing.through(x, Choice(experts[place], weights), x)
        torch.autograd.backward(found + shared if config.shared_size else found, factors(x))
        results[place] = found.detach(), shared.detach(), x.grad, weights.grad, own, rank

    threads = [Thread(target=run, args=(place,)) for place in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(results) == len(places), "no rank has failed"
    for place in places:
        found, shared, of_tokens, of_weights, _, rank = results[place]
        x, weights = inputs_of(place, tokens[place], config.per_token)
        wanted = one.pass_through(x, Choice(experts[place], weights))
        beside = one.pass_shared(x) if config.shared_size else x[:0, 0]
        torch.autograd.backward(wanted + beside if config.shared_size else wanted, factors(x))
        for each, other in ((found, wanted), (shared, beside), (of_tokens, x.grad), (of_weights, weights.grad)):
            torch.testing.assert_close(each, other, rtol=1e-12, atol=1e-12)
        assert rank.declared == rank.sent, "bytes are declared message by message"
    check_gradients(one, [results[place] for place in places], wide, rows, places)


def _moves_rows(step: Any) -> bool:
    send = step.send if isinstance(step, Await) else step
    return isinstance(step, Compute) or (
        isinstance(send, Send) and send.messages[0].message_class is not MessageClass.ROUTE
    )


def inputs_of(place: Place, tokens: int, per_token: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + sum(10**at * digit for at, digit in enumerate(place)))
    x = torch.randn(tokens, HIDDEN, dtype=torch.float64, generator=generator)
    weights = torch.rand(tokens, per_token, dtype=torch.float64, generator=generator)
    return x.requires_grad_(), weights.requires_grad_()


def factors(x: Tensor) -> Tensor:
    return torch.linspace(0.5, 2.0, x.numel(), dtype=x.dtype).view(x.shape)


def held(one: Mixture, first: int, size: int, rows: Place, row: Place) -> Mixture:
    """The part of a mixture that a rank holds: experts from `first`, cut along their inner size."""
    made = whole_like(one)
    parts, place = 1, 0
    for degree, here in zip(rows, row, strict=True):
        parts, place = parts * degree, place * degree + here
    inner = one.down.weight.shape[2] // parts
    cut = slice(place * inner, (place + 1) * inner)
    for name in ("gate", "up"):
        getattr(made, name).weight = torch.nn.Parameter(
            getattr(one, name).weight.detach()[first : first + size, cut].clone()
        )
    made.down.weight = torch.nn.Parameter(one.down.weight.detach()[first : first + size, :, cut].clone())
    return made


def whole_like(one: Mixture) -> Mixture:
    made = Mixture(mixture(one.router.config), dtype=torch.float64)
    made.load_state_dict(one.state_dict())
    return made


def check_gradients(one: Mixture, results: Sequence[Any], wide: Place, rows: Place, places: Sequence[Place]) -> None:
    """Each rank's part of the experts has the whole gradient of that part, of all ranks' tokens."""
    grads = whole_like(one)
    with torch.no_grad():
        for name in ("gate", "up", "down"):
            getattr(grads, name).weight.copy_(getattr(one, name).weight.grad)
    for place, (*_, own, _) in zip(places, results, strict=True):
        size, first = one.down.weight.shape[0], 0
        for degree, here in zip(wide, place, strict=False):
            size //= degree
            first += here * size
        wanted = held(grads, first, size, rows, place[len(wide) :])
        for name in ("gate", "up", "down"):
            torch.testing.assert_close(
                getattr(own, name).weight.grad, getattr(wanted, name).weight.detach(), rtol=1e-11, atol=1e-12
            )

"""Rows to experts and back in wire formats: ranks as threads, against bounds computed here from the rows alone."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from queue import Queue
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor

from terrace.comm import codecs
from terrace.plan.in_block_messages import RoutedMessage
from terrace.plan.wire import FORMATS, MessageClass, WireFormat, parse_format
from terrace.runtime.routing.route import count_prefixes, route_of
from terrace.runtime.routing.way import Chunk, Way
from tests.support.expert_traffic import traffic_of

Place = tuple[int, ...]
HIDDEN, NUM_EXPERTS, PER_TOKEN, BLOCK = 40, 8, 2, 16  # the last block of a row is short
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


def largest_errors(rows: Tensor, wire: str) -> Tensor:
    """Bound of every element's rounding error, from the largest magnitude of its block of a row."""
    if wire == "bf16":
        return rows.abs() / 256
    blocks = [part.abs().amax(1, keepdim=True).expand_as(part) for part in torch.split(rows, BLOCK, 1)]
    largest = torch.cat(blocks, 1)
    if wire.startswith("fp8"):
        return torch.maximum(rows.abs() / 16, largest / 448 / 1000)
    return largest / (127 if wire.startswith("int8") else 7) * 0.505


@dataclass
class ThreadCarrier:
    """Carries rows between threads of one process, in one format for both classes."""

    place: Place
    wires: Sequence[WireFormat]  # by tier
    mail: dict[tuple[Place, Place], "Queue[Tensor]"]
    num_coded: int = 0
    sent: dict[int, int] = field(default_factory=dict)  # bytes by tier

    def wire(self, message: RoutedMessage) -> WireFormat:
        return self.wires[message.tier]

    def code(self, message: RoutedMessage, rows: Tensor) -> Tensor:
        self.num_coded += 1
        wire = self.wire(message)
        if not wire.block:
            return rows.to(DTYPES[wire.codec]).contiguous().view(torch.uint8)
        coded = torch.empty(len(rows), wire.message_bytes(HIDDEN), dtype=torch.uint8)
        codecs.encode(rows, wire, coded)
        return coded

    def read(self, message: RoutedMessage, coded: Tensor, dtype: torch.dtype) -> Tensor:
        wire = self.wire(message)
        if not wire.block:
            return coded.view(DTYPES[wire.codec]).to(dtype)
        rows = torch.empty(len(coded), HIDDEN, dtype=dtype)
        codecs.decode(coded, wire, rows)
        return rows

    def exchange(self, message: RoutedMessage, sent: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        level = len(self.place) - 1 - message.tier
        peers = [(*self.place[:level], unit, *self.place[level + 1 :]) for unit in range(len(sends))]
        self.sent[message.tier] = self.sent.get(message.tier, 0) + sent.nbytes
        for peer, part in zip(peers, torch.split(sent, list(sends)), strict=True):
            if peer != self.place:
                self.mail[self.place, peer].put(part)
        parts = [self.mail[peer, self.place].get(timeout=60) for peer in peers if peer != self.place]
        received = torch.cat(parts)
        assert len(received) == sum(receives)
        return received


@dataclass
class Passed:
    """One rank after its tokens have gone to their experts and back, and gradients the same way."""

    rows: Tensor  # as they arrived, with the number of their token
    numbers: Tensor
    result: Tensor
    gradient: Tensor
    carrier: ThreadCarrier


def tokens_of(place: Place) -> tuple[Tensor, Tensor]:
    """Tokens (T, H) of a rank, of magnitudes that differ, and their choices (T, k)."""
    generator = torch.Generator().manual_seed(sum(10**at * digit for at, digit in enumerate(place)) + 1)
    tokens = torch.randn(12, HIDDEN, generator=generator) * torch.logspace(-3, 3, HIDDEN)
    return tokens, torch.stack([torch.randperm(NUM_EXPERTS, generator=generator)[:PER_TOKEN] for _ in tokens])


def factor(place: Place) -> float:
    """The experts of a rank multiply a row by this."""
    return 1.0 + sum(place)


def gone(chunk: Chunk, tiers: Sequence[int], message_class: MessageClass, *, backward: bool) -> tuple[Tensor, ...]:
    """The parts of a chunk after a message over each of `tiers`."""
    for tier in tiers:
        chunk.go(RoutedMessage(message_class, tier, backward=backward))
    return chunk.parts


def passed(wide: Place, wires: Sequence[str], num_tokens: int = 12) -> dict[Place, Passed]:
    """All ranks of the degrees `wide`, the outermost tier first; `wires` by tier, the innermost first."""
    places: list[Place] = list(product(*map(range, wide)))
    cut = {place: tuple(part[:num_tokens] for part in tokens_of(place)) for place in places}
    table = torch.stack([count_prefixes(cut[place][1], NUM_EXPERTS, wide) for place in places])
    tiers = list(range(len(wide)))[::-1]
    mail: Any = {pair: Queue() for pair in product(places, places)}
    found: dict[Place, Passed] = {}

    def rank(place: Place) -> None:
        carrier = ThreadCarrier(place, [parse_format(name) for name in wires], mail)
        units, first, size = [], 0, NUM_EXPERTS
        for degree, here in zip(wide, place, strict=True):
            size //= degree
            units.append(tuple((first + unit * size, first + (unit + 1) * size) for unit in range(degree)))
            first += here * size
        way = Way(num_tokens, route_of(table, (tiers, []), (wide, ()), (place, ())), tuple(units))
        tokens, choices = cut[place]
        numbers = torch.arange(num_tokens).float() + 100 * (1 + places.index(place))
        there = Chunk(carrier, [way], (tokens, numbers.unsqueeze(1).expand(-1, PER_TOKEN), choices))
        rows, weights, _ = gone(there, tiers, MessageClass.DISPATCH, backward=False)
        there.turn([rows * factor(place)])
        (result,) = gone(there, tiers[::-1], MessageClass.COMBINE, backward=False)
        back = Chunk(carrier, [way], [tokens.flip(1).contiguous()])
        (gradients,) = gone(back, tiers, MessageClass.DISPATCH, backward=True)
        back.turn([gradients * factor(place), torch.zeros(len(rows), PER_TOKEN)])
        gradient, _ = gone(back, tiers[::-1], MessageClass.COMBINE, backward=True)
        found[place] = Passed(rows, weights[:, 0], result, gradient, carrier)

    threads = [Thread(target=rank, args=(place,)) for place in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(found) == len(places)
    return {place: found[place] for place in places}


def holders(choices: Tensor, wide: Place) -> list[set[Place]]:
    """The ranks with an expert of each token."""
    places = list(product(*map(range, wide)))
    each = NUM_EXPERTS // len(places)
    return [{places[int(expert) // each] for expert in row} for row in choices]


@pytest.mark.parametrize("wire", ["bf16", "fp8:16", "int8:16", "int4:16"])
@pytest.mark.parametrize("wide", [(2,), (2, 2)])
def test_rows_arrive_and_return_within_the_bound_of_their_format(wide: Place, wire: str) -> None:
    ranks = passed(wide, [wire] * len(wide))
    places = list(ranks)
    for each in ranks.values():
        for row, number in zip(each.rows, each.numbers.tolist(), strict=True):
            source = places[int(number) // 100 - 1]
            exact = tokens_of(source)[0][int(number) % 100 : int(number) % 100 + 1]
            assert bool(((row - exact).abs() <= largest_errors(exact, wire)).all()), (source, number)
    for place, each in ranks.items():
        tokens, choices = tokens_of(place)
        weight = torch.tensor([[sum(map(factor, of))] for of in holders(choices, wide)])
        for found, exact in ((each.result, tokens * weight), (each.gradient, tokens.flip(1) * weight)):
            # Rounded toward the experts, then once on each tier on the way back.
            bound = (1 + len(wide)) * largest_errors(1.1 * exact, wire) + 1e-5 * exact.abs()
            assert bool(((found - exact).abs() <= bound).all())
            assert not torch.equal(found, exact)


def test_an_exact_format_changes_no_bit() -> None:
    for place, each in passed((2, 2), ["fp32", "fp32"]).items():
        tokens, choices = tokens_of(place)
        for row, number in zip(each.rows, each.numbers.tolist(), strict=True):
            source = list(product(range(2), range(2)))[int(number) // 100 - 1]
            assert torch.equal(row, tokens_of(source)[0][int(number) % 100])
        weight = torch.tensor([[sum(map(factor, of))] for of in holders(choices, (2, 2))])
        assert torch.allclose(each.result, tokens * weight, rtol=1e-6)


@pytest.mark.parametrize("wire", ["fp8:16", "int8:16", "int4:16"])
def test_rounding_knows_no_neighbours_and_no_rank(wire: str) -> None:
    """The same bits with half of the tokens, and wherever an expert is: neighbouring tiers pass codes on."""
    whole, half = passed((2, 2), [wire, wire]), passed((2, 2), [wire, wire], num_tokens=6)
    seen: dict[float, Tensor] = {}
    for ranks in (whole, half):
        for each in ranks.values():
            for row, number in zip(each.rows, each.numbers.tolist(), strict=True):
                assert torch.equal(row, seen.setdefault(number, row))
    # Toward them once in a forward and once in a backward; back on each of two tiers, in both.
    assert {each.carrier.num_coded for each in whole.values()} == {6}
    assert {each.carrier.num_coded for each in passed((2, 2), [wire, "fp32"]).values()} == {8}


WIRES = [("fp32", "fp32"), ("fp32", "fp8"), ("int8:16", "bf16"), ("fp8", "fp8")]


@pytest.mark.parametrize("wires", WIRES)
def test_bytes_are_rows_times_the_bytes_of_a_row(wires: tuple[str, str]) -> None:
    formats = tuple(map(parse_format, wires))
    choices = PER_TOKEN, NUM_EXPERTS
    traffic = traffic_of(1000, choices, HIDDEN, dispatch=formats, combine=formats[::-1], expert=(2, 2))
    exact = replace(traffic, dispatch=(FORMATS["fp32"],) * 2, combine=(FORMATS["fp32"],) * 2)
    # A scale of two bytes for each block, then the codes, in whole 16 bytes.
    row = {"fp32": 160, "bf16": 80, "fp8": 48, "int8:16": 48}
    for tier, message_class, backward in product((0, 1), (MessageClass.DISPATCH, MessageClass.COMBINE), (False, True)):
        message = RoutedMessage(message_class, tier, backward=backward)
        dispatch = message_class is MessageClass.DISPATCH
        beside = PER_TOKEN * (8 if not backward else 0) if dispatch else PER_TOKEN * (4 if backward else 0)
        name = wires[tier if dispatch else 1 - tier]
        ((_, plain),), ((_, found),) = exact.sends(message), traffic.sends(message)
        assert found == pytest.approx(plain / (160 + beside) * (row[name] + beside), rel=1e-3)
        assert (traffic.coding_bytes(message) > 0) == (name in ("fp8", "int8:16"))
    # Two tiers of one format code once and decode once: as much as the outer one codes and the inner one decodes.
    both = [traffic.coding_bytes(RoutedMessage(MessageClass.DISPATCH, tier)) for tier in (0, 1)]
    if wires == ("fp8", "fp8"):
        tokens, arrived = 1000, 1000 * traffic.units_of(4)
        assert sum(both) == pytest.approx((tokens + arrived) * (160 + 48))

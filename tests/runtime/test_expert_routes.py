"""Routes of rows to experts: against tokens moved one by one, between nodes, and against the formula."""

import math
from collections.abc import Sequence
from itertools import product

import pytest
import torch
from torch import Tensor

from terrace.plan.in_block_messages import RoutedMessage
from terrace.plan.wire import MessageClass
from terrace.runtime.routing.route import HopRows, count_prefixes, route_of
from tests.support.expert_traffic import traffic_of

Place = tuple[int, ...]


def routes(
    choices: dict[Place, Tensor], num_experts: int, wide: Sequence[int], rows: Sequence[int]
) -> dict[Place, tuple[HopRows, ...]]:
    """The route of every rank; `wide` and `rows` are degrees, the outermost tier first."""
    table = torch.stack([count_prefixes(experts, num_experts, wide) for experts in choices.values()])
    tiers = [list(range(len(degrees)))[::-1] for degrees in (wide, rows)]
    return {place: route_of(table, tiers, (wide, rows), (place[: len(wide)], place[len(wide) :])) for place in choices}


def moved(
    choices: dict[Place, Tensor], num_experts: int, wide: Sequence[int], rows: Sequence[int]
) -> list[dict[tuple[Place, Place], int]]:
    """Rows that go from one rank to another in each hop, itself included, found by moving every token."""
    held = {place: [set(row) for row in experts.tolist()] for place, experts in choices.items()}
    hops = []
    for level, degree in enumerate((*wide, *rows)):
        sent: dict[tuple[Place, Place], int] = {}
        after: dict[Place, list[set[int]]] = {place: [] for place in held}
        for place, tokens in held.items():
            for unit in range(degree):
                peer = (*place[:level], unit, *place[level + 1 :])
                going = tokens
                if level < len(wide):
                    size = num_experts // math.prod(wide[: level + 1])
                    number = 0
                    for here, of in zip(peer[: level + 1], wide, strict=False):
                        number = number * of + here
                    there = set(range(number * size, number * size + size))
                    going = [row & there for row in tokens if row & there]
                sent[place, peer] = len(going)
                after[peer] += going
        held = after
        hops.append(sent)
    return hops


DIVISIONS = [
    ((2,), ()),
    ((2, 4), ()),
    ((), (2,)),
    ((2,), (3,)),
    ((2, 2, 2), ()),
    ((4,), (2, 2)),
    ((2, 3), (2,)),
    ((), (2, 2)),
]


@pytest.mark.parametrize(("wide", "rows"), DIVISIONS)
@pytest.mark.parametrize("skewed", [False, True])
def test_counts_are_those_of_tokens_moved_one_by_one(wide: Place, rows: Place, skewed: bool) -> None:
    num_experts, per_token = 24, 3
    generator = torch.Generator().manual_seed(len(wide) + 7 * len(rows))
    likely = torch.ones(num_experts)
    if skewed:
        likely[3:] = 1e-9  # three experts have every token
    choices = {
        place: torch.multinomial(likely.expand(number, -1), per_token, generator=generator)
        for number, place in enumerate(product(*map(range, (*wide, *rows))), start=1)
    }
    hops = moved(choices, num_experts, wide, rows)
    for place, found in routes(choices, num_experts, wide, rows).items():
        for level, (hop, sent) in enumerate(zip(found, hops, strict=True)):
            peers = [(*place[:level], unit, *place[level + 1 :]) for unit in range((*wide, *rows)[level])]
            assert hop.sends == tuple(sent[place, peer] for peer in peers)
            assert hop.receives == tuple(sent[peer, place] for peer in peers)
            assert hop.copies == (level >= len(wide))
            assert hop.position == place[level]


def drawn(num_ranks: int, tokens: int, num_experts: int, per_token: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    even = torch.ones(tokens, num_experts)
    return [torch.multinomial(even, per_token, generator=generator) for _ in range(num_ranks)]


def test_a_quarter_of_an_all_to_all_between_two_nodes() -> None:
    """Two nodes of 4 ranks, 64 experts, 8 of a token: a row crosses once, not once for each expert."""
    wide, tokens = (2, 4), 1024
    places: list[Place] = list(product(range(2), range(4)))
    choices = dict(zip(places, drawn(8, tokens, 64, 8), strict=True))
    crossed = sum(hops[0].sent for hops in routes(choices, 64, wide, ()).values())
    of_choices = sum(int((experts // 32).ne(place[0]).sum()) for place, experts in choices.items())
    assert crossed / of_choices < 0.27


@pytest.mark.parametrize(("wide", "rows"), [((2, 4), ()), ((2, 2), (2,)), ((4,), ()), ((2,), (2, 2))])
def test_the_formula_is_the_average(wide: Place, rows: Place) -> None:
    tokens, num_experts, per_token, hidden = 2048, 16, 3, 10
    places = list(product(*map(range, (*wide, *rows))))
    choices = dict(zip(places, drawn(len(places), tokens, num_experts, per_token), strict=True))
    found = list(routes(choices, num_experts, wide, rows).values())
    # Tiers count from the inside: rows on the innermost here, in the plan's order.
    traffic = traffic_of(tokens, (per_token, num_experts), hidden, expert=wide[::-1], rows=rows[::-1])
    for number, (tier, copies) in enumerate(traffic.way):
        mean = sum(hops[number].sent for hops in found) / len(found)
        ((at, num_bytes),) = traffic.sends(RoutedMessage(MessageClass.DISPATCH, tier, copies, backward=True))
        assert at == tier
        assert num_bytes == pytest.approx(mean * hidden * 4, rel=0.02)

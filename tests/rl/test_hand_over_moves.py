"""Moves that hand parameters over, held against sets of elements: all that is needed, once, and nothing else."""

from collections import Counter
from itertools import pairwise
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from terrace.base.boxes import Box, cut, numel, whole
from terrace.base.errors import PlanError
from terrace.rl.hand_over.moves import Move, Parts, cells_of, crossing, missing, moves_of
from tests.support.hand_overs import Elements, elements, moved, units

SHAPES = {"matrix": (5, 4), "vector": (7,), "scalar": ()}


@st.composite
def handovers(draw: st.DrawFn) -> tuple[list[Parts], list[Parts], list[int]]:
    """Ranges dealt to ranks of a small cluster, boxes that some hold beside them, and boxes that they need."""
    tiers = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3).filter(lambda sizes: prod(sizes) <= 9))
    ranks = st.integers(0, prod(tiers) - 1)
    holds: list[dict[str, list[Box]]] = [{} for _ in range(prod(tiers))]
    needs: list[dict[str, list[Box]]] = [{} for _ in range(prod(tiers))]
    wanting = st.sampled_from(["", "needs", "needs", "both"])
    for name, shape in SHAPES.items():
        size = prod(shape)
        ends = sorted({0, size, *draw(st.lists(st.integers(1, size), max_size=4))})
        for start, stop in pairwise(ends):
            for rank in draw(st.sets(ranks, min_size=1)):
                holds[rank].setdefault(name, []).extend(cut(shape, start, stop))
        for rank in range(prod(tiers)):
            which = draw(wanting)
            for parts in [needs][: which != ""] + [holds][: which == "both"]:
                parts[rank].setdefault(name, []).append(draw(boxes_in(shape)))
    return [*holds], [*needs], tiers


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    if draw(st.booleans()):
        return whole(shape)
    ends = [sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
    return tuple((start, stop) for start, stop in ends)


def joined(sets: list[Elements], ranks: range) -> Elements:
    return Elements().union(*(sets[rank] for rank in ranks))


@given(handovers())
def test_every_need_is_met_once_by_whom_has_it(case: tuple[list[Parts], list[Parts], list[int]]) -> None:
    holds, needs, tiers = case
    own, needed = [*map(elements, holds)], [*map(elements, needs)]
    have = [set(each) for each in own]
    moves = moves_of(cells_of(holds, needs), tiers)
    assert [move.tier for move in moves] == sorted((move.tier for move in moves), reverse=True)
    for tier in reversed(range(len(tiers))):
        before = [set(each) for each in have]
        for move in moves:
            if move.tier != tier:
                continue
            box = moved(move)
            # It had the box before, or over an outer tier.
            assert box <= before[move.source]
            assert box <= needed[move.target]
            assert not box & have[move.target]
            have[move.target] |= box
            together = [
                any({move.source, move.target} <= {*unit} for unit in units(tiers, t)) for t in (tier, tier + 1)
            ]
            assert together == [False, True]
    assert have == [mine | wanted for mine, wanted in zip(own, needed, strict=True)]


@given(handovers())
def test_a_unit_receives_what_it_misses_once(case: tuple[list[Parts], list[Parts], list[int]]) -> None:
    holds, needs, tiers = case
    own, needed = [*map(elements, holds)], [*map(elements, needs)]
    cells = cells_of(holds, needs)
    moves, sent = moves_of(cells, tiers), crossing(cells, tiers)
    for tier in range(len(tiers) + 1):
        missed = [len(joined(needed, unit) - joined(own, unit)) for unit in units(tiers, tier)]
        assert missing(cells, tiers, tier) == missed
        entered = [
            sum(numel(move.box) for move in moves if move.target in unit and move.source not in unit)
            for unit in units(tiers, tier)
        ]
        assert entered == missed
        assert sum(sent[tier:]) == sum(missed)
    over = Counter[int]()
    for move in moves:
        over[move.tier] += numel(move.box)
    assert sent == tuple(over[tier] for tier in range(len(tiers)))


@given(handovers())
def test_a_rank_finds_its_own_moves_alone(case: tuple[list[Parts], list[Parts], list[int]]) -> None:
    holds, needs, tiers = case
    cells = cells_of(holds, needs)
    moves = moves_of(cells, tiers)
    for rank in range(prod(tiers)):
        assert moves_of(cells, tiers, rank) == [move for move in moves if rank in (move.source, move.target)]


def by_rank(moves: list[Move], tier: int, end: str) -> Counter[int]:
    """Elements over `tier` by source or target."""
    found = Counter[int]()
    for move in moves:
        if move.tier == tier:
            found[getattr(move, end)] += numel(move.box)
    return found


SHAPE = (24, 2)


@pytest.mark.parametrize(
    ("tiers", "holders", "sent", "received"),
    [
        # One holder sends each of four receivers a quarter, and they send it on.
        ((4, 2), (0,), {0: 48}, dict.fromkeys(range(4, 8), 12)),
        # Each receiver has a holder of its own.
        ((4, 2), (0, 1, 2, 3), dict.fromkeys(range(4), 12), dict.fromkeys(range(4, 8), 12)),
        # Three holders of four receivers.
        ((4, 2), (0, 1, 3), dict.fromkeys((0, 1, 3), 16), dict.fromkeys(range(4, 8), 12)),
        # More holders than receivers, and units take turns.
        ((2, 6), (0, 1, 2, 3), dict.fromkeys(range(4), 48), dict.fromkeys(range(4, 12), 24)),
        ((1, 4), (0, 1), dict.fromkeys(range(2), 48), dict.fromkeys(range(2, 4), 48)),
        ((3, 1, 2), (0,), {0: 48}, dict.fromkeys(range(3, 6), 16)),
    ],
)
def test_outer_messages_are_shared_evenly(
    tiers: tuple[int, ...], holders: tuple[int, ...], sent: dict[int, int], received: dict[int, int]
) -> None:
    parts: Parts = {"weight": [whole(SHAPE)]}
    holds: list[Parts] = [parts if rank in holders else {} for rank in range(prod(tiers))]
    cells = cells_of(holds, [parts] * prod(tiers))
    moves = moves_of(cells, tiers)
    outermost = len(tiers) - 1
    assert by_rank(moves, outermost, "source") == sent
    assert by_rank(moves, outermost, "target") == received
    # Inside, who received something sends it to all others.
    for rank, count in received.items():
        assert by_rank(moves, 0, "source")[rank] == count * (tiers[0] - 1)


def test_shards_of_another_unit_arrive_in_even_parts() -> None:
    """Eight ranks each have an eighth, flat, and all need the whole: every rank sends and receives alike."""
    shape, tiers = (6, 4), (4, 2)
    holds: list[Parts] = [{"weight": [*cut(shape, 3 * rank, 3 * rank + 3)]} for rank in range(8)]
    moves = moves_of(cells_of(holds, [{"weight": [whole(shape)]}] * 8), tiers)
    for tier, count in ((1, 3), (0, 18)):
        for end in ("source", "target"):
            assert by_rank(moves, tier, end) == dict.fromkeys(range(8), count)
    # No more pieces than the shards have boxes.
    assert len([move for move in moves if move.tier == 1]) <= 2 * sum(len(part["weight"]) for part in holds)


def test_the_innermost_unit_that_has_it_serves() -> None:
    parts: Parts = {"weight": [whole((4, 4))]}
    holds: list[Parts] = [parts, {}, {}, {}, parts, {}, {}, {}]
    needs: list[Parts] = [{}, parts, parts, {}, {}, {}, {}, parts]
    moves = moves_of(cells_of(holds, needs), (2, 2, 2))
    assert {(move.source, move.target, move.tier) for move in moves} == {(0, 1, 0), (0, 2, 1), (4, 7, 1)}


def test_what_nobody_holds_is_named() -> None:
    holds: list[Parts] = [{"weight": [((0, 3), (0, 4))]}, {}]
    needs: list[Parts] = [{}, {"weight": [((1, 4), (0, 2))]}]
    with pytest.raises(PlanError, match=r"no rank holds weight\[3:4,0:2\], which is needed"):
        cells_of(holds, needs)

"""Rows of offers: what they cost, which are within the limits, on the frontier, and too close to call."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from terrace.base.errors import ConfigError
from terrace.planner.rent import Market, Offer, Offers, Rented, priced, ties_with
from terrace.simulate.bands import tie_share

ONE, TWO = Offer(cluster="one", price=2.0), Offer(cluster="two", price=3.0, days=5)


def row(days: float, cost: float, offer: Offer = ONE, share: float = 0.1) -> Rented:
    return Rented(offer=offer, name=offer.cluster, num_nodes=1, num_devices=8, days=days, cost=cost, share=share)


def test_days_cost_and_energy_of_a_row() -> None:
    plain = Rented(offer=ONE, name="one", num_nodes=2, num_devices=16, step_s=3.0, goodput=0.8)
    found = priced(plain, num_steps=48_000, num_spares=8, power_watts=500)
    hours = 48_000 * 3 / 0.8 / 3600  # 50
    assert found.days == pytest.approx(hours / 24)
    assert found.cost == pytest.approx(hours * (16 + 8) * 2.0)
    assert found.energy_kwh == pytest.approx(hours * 16 * 0.5)
    assert "fail too often" in priced(replace(plain, goodput=0.0), num_steps=1, num_spares=0, power_watts=0).reason


_POINTS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12)


@given(_POINTS, st.integers(1, 10), st.integers(1, 10))
def test_the_frontier_is_what_nothing_beats(points: list[tuple[int, int]], days: int, money: int) -> None:
    market = Market(rows=tuple(row(*each) for each in points), days=days, money=money)
    within = [each for each in points if each[0] <= days and each[1] <= money]
    assert [(each.days, each.cost) for each in market.allowed] == within

    def is_beaten(point: tuple[int, int]) -> bool:
        return any(one <= point[0] and two <= point[1] and (one, two) != point for one, two in within)

    best = sorted({point for point in within if not is_beaten(point)})
    assert [(each.days, each.cost) for each in market.frontier] == best
    ends = (market.soonest, market.cheapest)
    assert [each and (each.days, each.cost) for each in ends] == ([best[0], best[-1]] if best else [None, None])


def test_limits_and_rows_that_do_not_run() -> None:
    late, dear, gone = row(11, 1), row(1, 11), row(6, 1, TWO)
    none = Rented(offer=ONE, name="one", num_nodes=1, num_devices=8, reason="too little memory")
    market = Market(rows=(late, dear, gone, none), days=10, money=10)
    assert [market.excess(each) for each in market.rows[:3]] == ["days", "money", "offer"]
    assert not market.allowed
    assert market.cheapest is market.soonest is None
    assert math.isinf(none.cost)


def test_costs_tie_within_the_bands_of_two_offers_and_the_tie_of_one() -> None:
    cheap = row(1, 100.0, ONE, 0.1)
    near, far = row(1, 115.0, TWO, 0.05), row(1, 116.0, TWO, 0.05)  # 110 to 95 x 1.05
    assert ties_with(cheap, [cheap, near, far]) == [near]
    assert ties_with(near, [cheap]) == [cheap]
    other = row(2, 100.0 * (1 + 1.1 * tie_share()))  # another size of one offer
    assert ties_with(cheap, [other]) == []
    assert ties_with(cheap, [replace(other, cost=100.0 * (1 + 0.9 * tie_share()))]) != []


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: Offers(offers=()), "give 1 to 100"),
        (lambda: Offers(offers=(replace(ONE, price=0.0),)), "item 1: price = 0 must be positive"),
        (lambda: Offers(offers=(replace(ONE, price=math.nan),)), "price = nan must be positive"),
        (lambda: Offers(offers=(ONE, replace(ONE, nodes=(4, 0)))), "item 2: nodes = [4, 0]"),
        (
            lambda: Offers(offers=(replace(ONE, nodes=(4, 4)),)),
            "item 1: nodes has 2 items: give at most 50, and each size once",
        ),
        (lambda: Offers(offers=(ONE,), days=-1.0), "days = -1 must be positive"),
        (lambda: Offers(offers=(replace(ONE, days=0.0),)), "item 1: days = 0 must be positive"),
    ],
)
def test_offers_that_nobody_makes(made: object, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        made()  # type: ignore[operator]
    assert said in str(caught.value)

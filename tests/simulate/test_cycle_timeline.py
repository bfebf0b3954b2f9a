"""The cycle over time: its steps, the messages on the link, and the waits for them."""

from typing import Literal

import pytest

from terrace.plan.outer import Outer
from terrace.simulate.cycle import Cycle
from terrace.simulate.cycle_timeline import CycleTimeline, cycle_timeline, in_cycle
from terrace.simulate.noting import WAIT_OUTER
from terrace.simulate.step import predict_step
from tests.support.cycles import islands, loops, step_of


def drawn(outer: Outer, rate: float, **more: object) -> tuple[Cycle, CycleTimeline]:
    cycle = predict_step(step_of(islands(rate, **more), outer)).cycle  # type: ignore[arg-type]
    assert cycle is not None
    return cycle, cycle_timeline(cycle)


@pytest.mark.parametrize("seed", range(12))
def test_steps_and_waits_are_those_of_the_cycle(seed: int) -> None:
    outer = loops(seed)
    backend, penalty = ("cpu", "cuda")[seed % 2], 0.3 * (seed % 3 > 0)
    cycle, found = drawn(outer, 10.0 ** -(seed % 7), backend=backend, penalty=penalty)
    assert found.cycle_s == pytest.approx(cycle.cycle_s, rel=1e-9)
    assert len(found.steps) == len(found.ends_s) == outer.every
    assert list(found.ends_s) == sorted(found.ends_s)
    ends = [0.0, *found.ends_s]
    for times, begin_s, end_s in zip(found.steps, ends, ends[1:], strict=False):
        assert end_s - begin_s == pytest.approx(sum(times.values()), rel=1e-9)
    waited_s = outer.every * cycle.mean_times_s[0].get(WAIT_OUTER, 0.0)
    assert sum(end_s - start_s for start_s, end_s in found.waits) == pytest.approx(waited_s, rel=1e-6, abs=1e-9)
    # One exchange of each fragment in a cycle, in the order of turns.
    turn = outer.every // outer.fragments
    assert [(each.fragment, each.sent) for each in found.crossings] == [
        (fragment, (fragment + 1) * turn) for fragment in range(outer.fragments)
    ]
    for each in found.crossings:
        assert each.applied == (each.sent + outer.delay - 1) % outer.every + 1
        assert each.end_s > each.start_s
        assert each.sent_bytes["system"] > 0
    total = sum(each.sent_bytes["system"] for each in found.crossings)
    assert total == sum(size for (_, tier), size in cycle.sent_bytes.items() if tier == "system")


def test_a_hidden_exchange_is_on_its_link_behind_the_step_that_sends_it() -> None:
    outer = Outer(tier="system", every=10, delay=5)
    cycle, found = drawn(outer, 1e-4)
    (crossing,) = found.crossings
    assert found.waits == ()
    assert crossing.start_s == pytest.approx(found.cycle_s, rel=1e-9)
    assert crossing.end_s - crossing.start_s == pytest.approx(cycle.exchange_s, rel=1e-9)
    assert list(in_cycle(crossing.start_s, crossing.end_s, found.cycle_s))[-1][1] < found.ends_s[4]


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
@pytest.mark.parametrize("delay", [0, 2])
def test_a_wait_ends_where_the_exchange_arrives(backend: Literal["cpu", "cuda"], delay: int) -> None:
    """Also where messages take cores from computing, so that the clock stands still while they are under way."""
    outer = Outer(tier="system", every=6, delay=delay)
    _, found = drawn(outer, 1e-7, backend=backend, penalty=0.3)
    (crossing,) = found.crossings
    last_s = max(end_s for _, end_s in found.waits)
    assert crossing.end_s % found.cycle_s == pytest.approx(last_s, rel=1e-9)
    assert found.ends_s[delay - 1] == pytest.approx(last_s, rel=1e-2)
    length_s = 0.0 if delay else crossing.end_s - crossing.start_s
    assert crossing.start_s == pytest.approx(found.cycle_s - length_s, rel=1e-2)


def test_a_folded_cycle_is_drawn_with_its_exchanges_at_the_ends_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("terrace.simulate.step.WHOLE_PASSES_ALONE", 100)
    predicted = predict_step(step_of(islands(1e-7), Outer(tier="system", every=4, delay=1), num_micros=64))
    assert not predicted.is_whole
    assert predicted.cycle is not None
    found = cycle_timeline(predicted.cycle)
    assert found.cycle_s == pytest.approx(predicted.cycle.cycle_s, rel=1e-9)
    (crossing,) = found.crossings
    assert crossing.start_s == pytest.approx(found.cycle_s, rel=1e-2)


def test_a_stretch_goes_on_in_the_next_cycle() -> None:
    assert list(in_cycle(1.0, 2.0, 4.0)) == [(1.0, 2.0)]
    assert list(in_cycle(3.0, 5.0, 4.0)) == [(3.0, 4.0), (0.0, 1.0)]
    assert list(in_cycle(4.0, 5.0, 4.0)) == [(0.0, 1.0)]
    assert list(in_cycle(3.0, 9.0, 4.0)) == [(3.0, 4.0), (0.0, 3.0)]

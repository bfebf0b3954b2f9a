"""Played cycles of islands: as a slow play on one clock has them, free where hidden, few plays however long."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import pytest

from terrace.plan.outer import NO_EXCHANGE, OUTERS, Outer
from terrace.plan.plan import Plan
from terrace.plan.wire import MessageClass
from terrace.planner.evaluate import step_of as planned_step
from terrace.program.program import Program
from terrace.simulate import carried
from terrace.simulate.carried import Times
from terrace.simulate.noting import WAIT_OUTER
from terrace.simulate.stages import Pipeline
from terrace.simulate.step import predict_step
from tests.support.cycles import islands, loops, of_plan, step_of
from tests.support.nightly import in_turns
from tests.support.pipelines import INNER, pipelined
from tests.support.planner_cases import sized, small_task
from tests.support.slow_simulator import slow_cycle_s
from tests.support.toys import cluster_of

PLANS = ["ddp", "zero1", "zero3", "three-level", "hsdp"]


def mean(turns: Sequence[Times], every: int) -> dict[str, float]:
    names = dict.fromkeys(name for times in turns for name in times)
    return {name: sum(times.get(name, 0.0) for times in turns) / every for name in names}


@pytest.mark.parametrize("seed", range(20))
def test_a_cycle_is_its_steps_one_after_the_other(seed: int) -> None:
    draw = random.Random(1000 + seed)
    rate = 10 ** draw.uniform(-6, 0)
    cluster = islands(rate, backend="cuda" if seed % 2 else "cpu", penalty=draw.choice((0.0, 0.3)))
    found = predict_step(step_of(cluster, loops(seed), draw.choice(PLANS)))
    assert found.cycle is not None
    slow = slow_cycle_s(found.cycle.period, found.costs[0], 6)
    assert found.times_s[0] == pytest.approx(mean(slow, found.cycle.outer.every), rel=1e-7, abs=1e-11)
    for turn, other in zip(found.cycle.turns_s, slow, strict=True):
        assert turn[0] == pytest.approx(other, rel=1e-7, abs=1e-10)


def test_an_exchange_may_end_in_the_middle_of_a_run_of_equal_steps() -> None:
    found = predict_step(step_of(islands(1.7e-7, penalty=0.3), Outer(tier="system", every=12, delay=12)))
    assert found.cycle is not None
    assert 9 < found.cycle.exchange_s / found.cycle.plain_s < 10
    slow = slow_cycle_s(found.cycle.period, found.costs[0], 6)
    assert found.times_s[0] == pytest.approx(mean(slow, 12), rel=1e-4)


def test_a_hidden_exchange_costs_nothing_and_one_waited_for_its_seconds() -> None:
    """Without an overlap penalty: only its own computing beside steps, and all of it at their end."""
    cluster = islands(1e-4)
    hidden, waited = (predict_step(step_of(cluster, Outer(tier="system", every=10, delay=delay))) for delay in (5, 0))
    assert hidden.cycle is not None
    assert waited.cycle is not None
    exchange_s, plain_s = waited.cycle.exchange_s, waited.cycle.plain_s
    assert hidden.cycle.exchange_s == exchange_s
    assert 0 < exchange_s < 5 * plain_s
    own_s = {name: 10 * (hidden.times_s[0][name] - waited.times_s[0][name]) for name in ("forward", "backward")}
    assert list(own_s.values()) == pytest.approx([0.0, 0.0], abs=1e-9)
    assert hidden.times_s[0].get(WAIT_OUTER, 0.0) == 0.0
    (program,) = hidden.programs
    assert program.exchange == NO_EXCHANGE
    computing_s = 10 * (hidden.step_s - plain_s)
    assert 0 < computing_s < 1e-3 * exchange_s
    # Blocks are applied while later ones are on their way.
    assert waited.cycle.waited_s == pytest.approx(exchange_s, rel=1e-3)
    assert waited.cycle.cycle_s == pytest.approx(10 * plain_s + exchange_s, rel=1e-3)


def test_an_exchange_that_outlasts_its_delay_is_waited_for_by_the_rest() -> None:
    cluster = islands(3e-7)
    found = predict_step(step_of(cluster, Outer(tier="system", every=12, delay=2))).cycle
    assert found is not None
    assert found.waited_s == pytest.approx(found.exchange_s - 2 * found.plain_s, rel=1e-2)
    assert found.waited_s > found.plain_s


@pytest.mark.parametrize("preset_name", list(OUTERS))
def test_bytes_of_a_mean_step_are_the_cycles(preset_name: str) -> None:
    outer = OUTERS[preset_name]("system")
    outer = replace(outer, fragments=min(outer.fragments, 2), every=2 * (outer.every // 2))
    found = predict_step(step_of(islands(), outer))
    assert found.cycle is not None
    sent, period = found.reports[0].sent_bytes, found.cycle.period
    assert {key: size for key, size in sent.items() if size} == {
        key: round(size / outer.every) for key, size in period.sent_bytes().items() if size
    }
    assert {key for key, size in sent.items() if key[1] == "system" and size} == {(MessageClass.OUTER, "system")}
    assert found.reports[0].memory_bytes == period.state_bytes()
    assert found.reports[0].memory_bytes["outer"] > 0


def test_a_long_cycle_is_a_few_plays(monkeypatch: pytest.MonkeyPatch) -> None:
    played: list[Program] = []
    step = Pipeline.step

    def counted(self: Pipeline) -> None:
        played.extend(self.programs)
        step(self)

    monkeypatch.setattr(Pipeline, "step", counted)
    for rate, delay in ((1e-7, 400), (1e-2, 0), (1e-8, 500)):
        played.clear()
        found = predict_step(step_of(islands(rate, penalty=0.3), Outer(tier="system", every=500, delay=delay)))
        assert found.cycle is not None
        assert found.cycle.period.num_steps == 500
        assert len(played) <= 25


@pytest.mark.parametrize(("rate", "shares"), in_turns(2, [1e-7, 1e-4], [0.0, 0.7]))
def test_stages_play_a_cycle_as_if_every_step_were_played(
    rate: float, shares: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, tier = (*INNER.sizes, 2), "system"
    cluster = cluster_of(*sizes)
    slow = replace(cluster.tiers[-1], bandwidth_bytes_per_s=rate * cluster.tiers[-1].bandwidth_bytes_per_s)
    slow = replace(slow, bus={"node": shares} if shares else {})
    cluster = replace(cluster, tiers=(*cluster.tiers[:-1], slow))
    outer = Outer(tier=tier, every=12, fragments=2, delay=3)
    plan = replace(pipelined("zero1", INNER, "1f1b"), optimizer="node", outer=outer)
    step = of_plan(cluster, plan, 4)
    found = predict_step(step)
    assert len(found.reports) > 1
    assert all(sum(times.values()) == pytest.approx(found.step_s, rel=1e-9) for times in found.times_s)
    monkeypatch.setattr(carried._Play, "_equal", lambda *_: 0)
    monkeypatch.setattr(carried, "_rounded", lambda state: (object(),))
    every = predict_step(step)
    for one, other in zip(found.times_s, every.times_s, strict=True):
        assert one == pytest.approx(other, rel=1e-9, abs=1e-11)


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_a_folded_cycle_is_within_half_a_percent_of_the_whole(
    backend: Literal["cpu", "cuda"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few micro-batches are played, but an exchange has the time of all to hide behind."""
    outer = Outer(tier="system", every=8, delay=2)
    for rate in (1e-7, 1e-8):
        described = step_of(islands(rate, backend=backend, penalty=0.2), outer, num_micros=64)
        whole = predict_step(described)
        monkeypatch.setattr("terrace.simulate.step.WHOLE_PASSES_ALONE", 100)
        folded = predict_step(described)
        monkeypatch.undo()
        assert (whole.is_whole, folded.is_whole) == (True, False)
        assert folded.step_s == pytest.approx(whole.step_s, rel=5e-3)
        for name, seconds in whole.times_s[0].items():
            assert folded.times_s[0][name] == pytest.approx(seconds, rel=2e-2, abs=1e-3 * whole.step_s)
        assert folded.sent_bytes == whole.sent_bytes
        assert folded.cycle is not None
        assert folded.cycle.cycle_s == pytest.approx(8 * folded.step_s, rel=1e-9)


def test_a_stage_with_shorter_exchanges_waits_for_the_one_with_the_longest() -> None:
    """Where the link has always something to carry, no cycle is shorter than its messages of one stage."""
    cluster = sized("frontier", 2, 4, 2)
    slow = replace(cluster.tiers[-1], bandwidth_bytes_per_s=1e7)
    task = small_task(replace(cluster, tiers=(*cluster.tiers[:-1], slow)), 16)
    plan = Plan(
        params="device",
        grads="device",
        optimizer="device",
        mapping={"package": {"tensor": 2}, "node": {"pipeline": 4}},
        compute="bf16",
        micro_batch=8,
        stages=(2, 1, 1, 2),
        outer=Outer(tier="system", every=3, delay=3),
    )
    found = predict_step(planned_step(task, plan))
    assert found.cycle is not None
    assert found.cycle.busy_s <= found.cycle.cycle_s * (1 + 1e-9)
    assert all(sum(times.values()) == pytest.approx(found.step_s, rel=1e-9) for times in found.times_s)
    assert found.cycle.cycle_s == pytest.approx(3 * found.step_s, rel=1e-9)


@pytest.mark.parametrize("num_micros", [2, 64])
def test_links_inside_an_island_do_not_hold_up_an_exchange(num_micros: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their messages want all cores; the exchange wants few, and its link carries on by the wall's clock."""
    monkeypatch.setattr("terrace.simulate.step.WHOLE_PASSES_ALONE", 100)
    cluster = islands(6e-7 / num_micros)
    inner = (replace(tier, overlap_penalty=1.0) for tier in cluster.tiers[:-1])
    cluster = replace(cluster, tiers=(*inner, replace(cluster.tiers[-1], overlap_penalty=0.05)))
    found = predict_step(step_of(cluster, Outer(tier="system", every=40, delay=2), num_micros=num_micros))
    assert found.is_whole == (num_micros == 2)
    assert found.cycle is not None
    plain_s, waited_s = found.cycle.plain_s, found.cycle.waited_s
    assert waited_s > plain_s
    # Beside two steps, which are longer by the cores that it takes, nothing but these cores holds it up.
    passed_s = 2 * plain_s * (1 + 0.05) + waited_s
    assert found.cycle.exchange_s == pytest.approx(passed_s, rel=5e-3)

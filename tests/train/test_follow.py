"""Speeds of members from measured micro-batches, the shares dealt by them, and runs that cannot follow."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from terrace.base.errors import ConfigError, PlanError, TerraceError
from terrace.cli.overrides import parse_overrides
from terrace.cluster.cluster import Cluster
from terrace.cluster.members import Member
from terrace.plan.outer import diloco
from terrace.plan.presets import preset
from terrace.planner import members
from terrace.planner.evaluate import step_of
from terrace.planner.members import dealt_anew
from terrace.planner.task import Task
from terrace.simulate.members import member_step
from terrace.simulate.step import Step, predict_alike, predict_step
from terrace.train import follow
from terrace.train.deals import Deals, Dealt, read_deals
from terrace.train.follow import Following, Played, computing_s, speeds_of, with_speeds
from terrace.train.job import RunJob
from terrace.train.prepare import _with_deals
from terrace.train.resolve import resolve
from tests.support.member_cases import partitions, unequal
from tests.support.nightly import nightly
from tests.support.planner_cases import gpt
from tests.support.tiny_runs import write_run

MODEL = gpt(2, 64, 2, vocab=257, positions=64)
SPEEDS = (0.9, 0.5, 0.3, 0.3)
SHARES = (5, 3, 2, 2)


def step_on(islands: bool) -> Step:
    cluster = unequal(*SPEEDS)
    plan = replace(preset("ddp", cluster), micro_batch=1)
    if islands:
        plan = replace(plan, outer=replace(diloco("node"), every=4))
    task = Task(model=MODEL, cluster=cluster, batch=12, sequence=16, compute="fp32")
    return replace(step_of(task, plan), plan=replace(plan, shares=SHARES), num_micros=max(SHARES))


@pytest.mark.parametrize("islands", [False, *nightly(True)])
def test_shares_dealt_by_measured_speeds_are_the_best_of_all_played(islands: bool) -> None:
    """A member that has become slow, measured exactly; all shares of 12 micro-batches are predicted."""
    step, slower = step_on(islands), (1.0, 0.4, 1.0, 1.3)
    true = replace(step, cluster=with_speeds(step.cluster, slower))
    assert [each.speed / own for each, own in zip(true.cluster.tiers[-1].members, SPEEDS, strict=True)] == (
        pytest.approx(slower, rel=0.011)
    )
    measured_s = [
        computing_s(predict_alike(member_step(true, member)).times_s[0]) / share for member, share in enumerate(SHARES)
    ]
    speeds = speeds_of(step, measured_s, {})
    assert speeds == pytest.approx(slower, rel=0.07)  # what a launch takes is in both
    shares, now_s, dealt_s = dealt_anew(replace(step, cluster=with_speeds(step.cluster, speeds)))
    played = {
        each: predict_step(replace(true, plan=replace(step.plan, shares=each), num_micros=max(each))).step_s
        for each in partitions(12, 4)
    }
    assert now_s == pytest.approx(played[SHARES], rel=0.05)
    assert dealt_s == pytest.approx(played[shares], rel=0.05)
    assert played[shares] <= 1.05 * min(played.values())
    assert dealt_s < now_s


def test_a_member_is_as_fast_as_its_slowest_rank() -> None:
    step = step_on(False)
    cluster = replace(step.cluster, tiers=(replace(step.cluster.tiers[0], size=2), *step.cluster.tiers[1:]))
    step = replace(step, cluster=replace(cluster, tiers=cluster.tiers), plan=replace(step.plan, shares=SHARES))
    own_s = [
        computing_s(predict_alike(member_step(step, rank // 2)).times_s[0]) / SHARES[rank // 2] for rank in range(8)
    ]
    own_s[3] *= 2  # of member 1
    assert speeds_of(step, own_s, {}) == pytest.approx([1.0, 0.5, 1.0, 1.0])


def test_members_alike_are_played_once_in_a_run() -> None:
    """Else all ranks would wait for as many predictions as there are members, at each comparison."""
    plan = replace(step_on(False).plan, shares=(3, 3, 3, 3))
    step, played = replace(step_on(False), cluster=unequal(0.5, 0.5, 0.5, 0.25), plan=plan, num_micros=3), Played()
    found = speeds_of(step, [1.0, 2.0, 4.0, 4.0], played)
    assert found[0] == pytest.approx(2 * found[1])
    assert len(played) == 2
    before = dict(played)
    assert speeds_of(step, [1.0, 2.0, 4.0, 4.0], played) == found
    assert all(played[kind] is times_s for kind, times_s in before.items())


def test_many_speeds_are_played_as_few() -> None:
    speeds = [0.5 * 1.02**member for member in range(64)]
    played = with_speeds(unequal(*[1.0] * 64), speeds).tiers[-1].members
    assert 8 < len({each.speed for each in played}) <= 16
    assert [each.speed for each in played] == pytest.approx(speeds, rel=0.05)


def following_of(monkeypatch: pytest.MonkeyPatch, cluster: Cluster, shares: tuple[int, ...], **rank: Any) -> Any:
    """The hook of rank 0 in a run of a second a step, whose window is 4 steps; `rank` replaces what a rank has."""
    run = SimpleNamespace(
        plan=SimpleNamespace(outer=SimpleNamespace(every=rank.pop("every", 1))),
        train=SimpleNamespace(slow_steps=4, follow=True, steps=rank.pop("steps", 999)),
    )
    program = SimpleNamespace(cluster=cluster, plan=SimpleNamespace(shares=shares), num_micros=max(shares))
    fields = {
        "run": run,
        "engine": SimpleNamespace(rank=0, program=program, comm=SimpleNamespace(exchange=lambda value: [value])),
        "job": SimpleNamespace(resume=None),
        "dog": SimpleNamespace(idle=lambda what: None),
    }
    monkeypatch.setattr(follow, "_may_deal", lambda rank: True)
    return Following(cast(Any, SimpleNamespace(**(fields | rank))), cluster, 0)


def stepped(following: Any, number: int, begin_s: float = 0.0) -> None:
    result = SimpleNamespace(time_s={"forward": 0.4, "backward": 0.6, "wait sync": 9.0})
    following.stepped(SimpleNamespace(problem=None, result=result, started_s=begin_s, number=number))


@pytest.mark.parametrize(("every", "looks"), [(1, [4, 56, 108]), (3, [6, 60, 114])])
def test_comparisons_take_a_fiftieth_of_a_run(every: int, looks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 1 s, and comparisons of 1 s: the next is 50 steps later, where all islands exchange."""
    now, found = [0.0], list[int]()

    def search(_: Following, measured_s: Sequence[float]) -> None:
        assert measured_s == [0.5]
        found.append(number)
        now[0] += 1.0

    monkeypatch.setattr(follow, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(Following, "_found", search)
    following = following_of(monkeypatch, unequal(1.0, 1.0), (2, 2), every=every)
    for number in range(1, looks[-1] + 1):
        now[0] += 1.0
        stepped(following, number, now[0] - 1.0)
    assert found == looks


def test_steps_before_new_shares_are_not_measured_with_those_after(monkeypatch: pytest.MonkeyPatch) -> None:
    found = list[int]()
    monkeypatch.setattr(Following, "_compare", lambda _, number: found.append(number))
    following = following_of(monkeypatch, unequal(1.0, 1.0), (2, 2), deal=lambda step: step == 3)
    for number in range(1, 8):
        following.before(number - 1)
        stepped(following, number)
    assert found == [7]


@pytest.mark.parametrize(("steps", "dealt"), [(7, []), (8, [0, 7])])
def test_shares_that_no_step_would_have_are_not_dealt(
    steps: int, dealt: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told = {"speeds": [1.0, 0.3], "shares": [3, 1], "now_s": 2.0, "dealt_s": 1.5}
    notes, deals = list[str](), Deals((2, 2))
    monkeypatch.setattr(Following, "_found", lambda _, measured_s: told)
    observer, job = SimpleNamespace(note=notes.append), SimpleNamespace(resume=None, folder=tmp_path)
    following = following_of(
        monkeypatch, unequal(1.0, 1.0), (2, 2), steps=steps, deals=deals, observer=observer, job=job
    )
    for number in range(1, 5):
        stepped(following, number)
    assert [each.step for each in deals.dealt] == dealt
    assert len(notes) == bool(dealt)
    assert read_deals(tmp_path) == tuple(deals.dealt)


@pytest.mark.parametrize(("faster", "is_dealt"), [(1.05, False), (1.25, True)])
def test_speeds_that_measurements_of_the_same_members_have_deal_nothing(
    faster: float, is_dealt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, dealt = step_on(False), list[Step]()
    measured_s = [
        computing_s(predict_alike(member_step(step, member)).times_s[0]) / share for member, share in enumerate(SHARES)
    ]
    measured_s[2] /= faster

    def search(step: Step) -> tuple[tuple[int, ...], float, float]:
        dealt.append(step)
        return (5, 3, 3, 1), 1.0, 0.9

    monkeypatch.setattr(follow, "step_of", lambda run, cluster: step)
    monkeypatch.setattr(members, "dealt_anew", search)
    following = following_of(monkeypatch, step.cluster, SHARES)
    following._rank.engine.program.plan = step.plan
    found = following._found(measured_s)
    assert len(dealt) == is_dealt
    assert (found or {}).get("shares") == ((5, 3, 3, 1) if is_dealt else None)


def test_speeds_multiply_those_of_the_members_tables() -> None:
    cluster = unequal(0.5, 0.5, 0.5)
    *inner, tier = cluster.tiers
    cluster = replace(cluster, tiers=(*inner, replace(tier, members=(Member(count=2, speed=0.5), Member(speed=0.25)))))
    found = with_speeds(cluster, (1.0, 2.0, 1.0)).tiers[-1].members
    assert [each.count for each in found] == [1, 1, 1]
    assert [each.speed for each in found] == pytest.approx([0.5, 1.0, 0.25], rel=0.011)


SHARED = ("--plan.shares", "[5, 3]")
REFUSED: tuple[tuple[type[TerraceError], tuple[str, ...], str], ...] = (
    (PlanError, (), r"train.follow = true deals .* 'node', and the plan has no shares: give it plan.shares, such as"),
    (
        PlanError,
        (*SHARED, "--plan.grads", "node", "--plan.optimizer", "node", "--plan.unit", "5"),
        r"train.follow = true: grads = 'node' are reduced across tier 'node' for every unit of 5 micro-batches, so",
    ),
    (
        PlanError,
        ("--plan.shares", "[4, 4]", *(f"--plan.{state}=node" for state in ("params", "grads", "optimizer"))),
        r"train.follow = true: (params|grads) = 'node' are (gathered|reduced) across tier 'node'",
    ),
    (PlanError, ("--cluster.tiers.node.size", "1", "--plan.shares", "[8]"), r"tier 'node' has 1 member"),
    (
        PlanError,
        (*SHARED, "--plan.keep.grads", "disk", "--plan.unit", "5"),
        r"keep.grads = 'disk' reserves its memory for the first shares",
    ),
    (
        PlanError,
        (*SHARED, "--cluster.tiers.package.size", "2", "--plan.mapping.package.context", "2", "--train.batch", "8"),
        r"a context axis divides them",
    ),
    (ConfigError, ("--train.follow", "maybe"), r"train.follow = 'maybe'"),
    (PlanError, ("--plan.shares", "[1, 1]", "--train.batch", "2"), r"\[1, 1\] are one micro-batch a member, and there"),
    (ConfigError, SHARED, r"no effect in train.steps = 6: after train.slow_steps = 20, shares could change in step 24"),
    (ConfigError, (*SHARED, "--train.slow_steps", "4", "--train.steps", "7"), r"could change in step 8 first"),
)


@pytest.mark.parametrize(("kind", "words", "why"), REFUSED)
def test_a_run_that_cannot_follow_is_refused_in_a_line(
    tmp_path: Path, kind: type[TerraceError], words: tuple[str, ...], why: str
) -> None:
    file = write_run(tmp_path, 1, 2, plan="ddp")
    with pytest.raises(kind, match=why) as refused:
        resolve(str(file), {}, parse_overrides(("--train.follow", "true", *words)))
    assert "\n" not in str(refused.value)


def test_a_run_that_names_no_slow_ranks_may_follow_by_its_own_window(tmp_path: Path) -> None:
    file = write_run(tmp_path, 1, 2, plan="ddp")
    words = ("--train.follow", "true", *SHARED, "--train.slow_factor", "0", "--train.slow_steps", "4")
    run = resolve(str(file), {}, parse_overrides((*words, "--train.steps", "8")))
    assert (run.train.slow_steps, run.train.follow) == (4, True)


def test_shares_that_a_changed_plan_cannot_have_are_refused_before_the_ranks_start(tmp_path: Path) -> None:
    file, said = write_run(tmp_path, 1, 2, plan="ddp"), list[str]()
    words = ["--plan.shares", "[4, 4]"]
    deals = Deals((4, 4))
    deals.add(Dealt(step=2, shares=(6, 2)))
    deals.write(tmp_path)

    def resumed(step: int, *more: str) -> RunJob:
        run = resolve(str(file), {}, parse_overrides((*words, *more)))
        job = RunJob(run=run, folder=tmp_path, sources=(), tokenizer_fingerprint="")
        return _with_deals(job, step, {"plan": {"shares": [4, 4]}}, said.append)

    assert resumed(1).run.plan.shares == (4, 4)
    assert said == []
    assert resumed(4).run.plan.shares == (6, 2)
    assert said == ["shares = [6, 2], as the run has dealt them in deals.jsonl, and not plan.shares = [4, 4]"]
    for step in (1, 4):
        with pytest.raises(PlanError, match=r"the run has dealt these shares itself, in .*deals.jsonl: restore"):
            resumed(step, "--plan.grads", "node", "--plan.optimizer", "node", "--plan.unit", "4")

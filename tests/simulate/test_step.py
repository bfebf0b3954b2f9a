"""The predicted step: exact when it is short, within half a percent when it is folded, the best split of blocks, and
the best next change, with fewer plays than there are candidates."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from terrace.base.errors import PlanError
from terrace.model.block_operations import layer_operations
from terrace.model.blocks import block_specs
from terrace.plan.layout import Layout
from terrace.plan.plan import Plan
from terrace.plan.validate import num_micro_batches
from terrace.planner import advice as room
from terrace.planner.advice import best_changes, changes
from terrace.program.instruction import PASSES
from terrace.program.recording import Recording
from terrace.simulate import step
from terrace.simulate.critical import critical_path, exposed_by_axis
from terrace.simulate.footprint import work_of
from terrace.simulate.stages import record_stages, simulate_stages
from terrace.simulate.step import Step, play_whole, predict_step, resolved
from tests.support.nightly import in_turns
from tests.support.planner_cases import CLUSTERS, gpt

DGX = CLUSTERS["dgx 4x2"]
MODEL = gpt(22, 512, 4, vocab=8000, positions=512)


def step_of(batch: int, schedule: str | None = "1f1b", stages: int = 4, **changes: object) -> Step:
    mapping = {"node": {"data": 4 // stages, "pipeline": stages}} if stages > 1 else {}
    places = {"params": "system", "grads": "system", "optimizer": "system"}
    values: dict[str, object] = {**places, "compute": "bf16", "mapping": mapping, "schedule": schedule, **changes}
    plan = Plan(**values)  # type: ignore[arg-type]
    return Step(
        cluster=DGX,
        plan=plan,
        blocks=block_specs(MODEL),
        num_micros=num_micro_batches(plan, Layout.of(DGX, plan), batch),
        sequence=256,
        work=work_of(DGX, plan, layer_operations(MODEL), 256),
    )


FOLDED = ["1f1b", "gpipe", "zb-h1", "zb-h2", "zbv", "interleaved:2", "interleaved:1", "breadth-first:2", "zeropp:2"]
FOLDED += ["zb-1p", "zb-2p", "zb-auto:3"]


@pytest.mark.parametrize(("schedule", "place"), in_turns(4, FOLDED, ["device", "system"]))
def test_a_folded_step_is_within_half_a_percent_of_the_whole(schedule: str, place: str) -> None:
    """Seconds and bubble; bytes and memory are the same."""
    unit = 4 if schedule.startswith("zeropp") else 1
    described = step_of(2 * 120, schedule, unit=unit, params=place, grads=place, optimizer=place)
    folded, whole = predict_step(described), play_whole(described)
    assert (folded.is_whole, whole.is_whole) == (False, True)
    assert folded.played_micros <= 60
    assert folded.step_s == pytest.approx(whole.step_s, rel=5e-3)
    assert folded.bubble == pytest.approx(whole.bubble, abs=5e-3)
    for one, two in zip(folded.reports, whole.reports, strict=True):
        assert one.sent_bytes == two.sent_bytes
        assert one.memory_bytes == two.memory_bytes
        assert one.step_s == pytest.approx(two.step_s, rel=5e-3)


def test_time_and_memory_do_not_grow_with_micro_batches() -> None:
    short, long = predict_step(step_of(2 * 200)), predict_step(step_of(2 * 40_000))
    assert long.played_micros == short.played_micros
    assert long.step_s == pytest.approx(200 * short.step_s, rel=0.03)  # what fills the pipeline counts once


def test_a_short_step_is_the_programs_played_whole() -> None:
    predicted = predict_step(step_of(2 * 24))
    assert predicted.is_whole
    assert predicted.reports == tuple(simulate_stages(predicted.programs, predicted.costs).reports)


def test_a_folded_step_of_one_stage_is_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    described = step_of(8 * 120, None, 1)
    whole = predict_step(described)
    assert whole.is_whole
    monkeypatch.setattr(step, "WHOLE_PASSES_ALONE", 0)
    folded = predict_step(described)
    assert not folded.is_whole
    assert folded.step_s == pytest.approx(whole.step_s, rel=1e-6)
    assert folded.reports[0].sent_bytes == whole.reports[0].sent_bytes


@pytest.mark.parametrize("compute", ["bf16", "fp32"])
def test_no_other_split_has_a_faster_slowest_stage(compute: str) -> None:
    """By the seconds of passes, as played with nothing to wait for: with a head as heavy as several layers."""
    places = dict.fromkeys(("params", "grads", "optimizer"), "device")
    described = step_of(16, "1f1b", 2, compute=compute, **places)
    described = replace(described, blocks=block_specs(MODEL))

    def slowest_s(stages: tuple[int, ...]) -> float:
        played = predict_step(replace(described, plan=replace(described.plan, stages=stages)))
        return max(each.time_s["forward"] + each.time_s["backward"] for each in played.reports)

    best = resolved(described).plan.stages
    num = len(described.blocks)
    ways = [(first, num - first) for first in range(1, num)]
    assert slowest_s(best) == pytest.approx(min(map(slowest_s, ways)))


def test_a_split_by_hand_is_kept_and_one_without_blocks_is_refused() -> None:
    described = step_of(16)
    by_hand = replace(described, plan=replace(described.plan, stages=(2, 8, 8, 6)))
    assert resolved(by_hand) is by_hand
    with pytest.raises(PlanError, match="44 virtual stages"):
        resolved(replace(described, plan=replace(described.plan, schedule="interleaved:11")))
    assert resolved(step_of(16, None, 1)).plan.stages == ()


@pytest.mark.parametrize(
    ("schedule", "place"), in_turns(2, ["1f1b", "zbv", "interleaved:2", "zeropp:2"], ["device", "system"])
)
def test_recordings_of_all_stages_are_the_played_step_and_their_path_covers_it(schedule: str, place: str) -> None:
    unit = 4 if schedule.startswith("zeropp") else 1
    described = step_of(2 * 16, schedule, unit=unit, params=place, grads=place, optimizer=place)
    played = play_whole(described)
    recordings = record_stages(played.programs, played.costs)
    for recording, report, passes in zip(recordings, played.reports, played.passes, strict=True):
        assert recording.report == report
        for each, ended_s in zip(passes, ends_of(recording), strict=True):
            assert each.end_s == pytest.approx(ended_s, abs=1e-9)
    path = critical_path(*recordings)
    assert math.fsum(path.seconds.values()) == pytest.approx(path.step_s, rel=0.02)
    moments = [
        (recordings[piece.stage].begin_s + piece.start_s, recordings[piece.stage].begin_s + piece.end_s)
        for piece in path.pieces
    ]
    for (_, end_s), (start_s, _) in pairwise(moments):
        assert start_s >= end_s - 1e-9
    stages = {piece.stage for piece in path.pieces}
    assert len(stages) > 1
    exposed = exposed_by_axis(recordings, 1)
    waits_s = sum(spent for name, spent in recordings[1].report.time_s.items() if name.startswith("wait "))
    assert 0 < math.fsum(exposed.values()) <= waits_s * (1 + 1e-9)
    assert ("pipeline", "node") in exposed


def ends_of(recording: Recording) -> list[float]:
    instructions = recording.program.instructions
    return [recording.begin_s + recording.done_s[at] for at, each in enumerate(instructions) if each.op in PASSES]


@pytest.mark.parametrize(
    ("schedule", "batch", "recompute", "is_faster"),
    [
        ("1f1b", 16, ("layers.*",), True),  # played whole
        pytest.param("1f1b", 240, ("layers.*",), True, marks=pytest.mark.nightly),  # folded
        ("zbv", 16, (), False),  # it computes in less time than changes of placement could save
    ],
)
def test_the_best_changes_are_the_first_of_all(
    schedule: str, batch: int, recompute: tuple[str, ...], is_faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = resolved(step_of(batch, schedule, recompute=recompute))
    base = predict_step(described)
    played: list[float] = []
    predicted = room._predicted

    def counted(*numbers: object) -> object:
        found = predicted(*numbers)  # type: ignore[arg-type]
        played.append(found.step_s)
        return found

    monkeypatch.setattr(room, "_predicted", counted)
    found, num_best = best_changes(described, base), len(played)
    every = changes(described, base=base)
    assert found == sorted(
        (next(change for change in every if change.kind == kind) for kind in ("plan", "cluster")),
        key=lambda change: change.step_s,
    )
    if is_faster:
        assert num_best < 0.6 * (len(played) - num_best)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "zbv", "interleaved:2", "breadth-first:2", "zeropp:2"])
@pytest.mark.parametrize("unit", [1, 4])
def test_passes_alone_take_no_longer_than_the_step(schedule: str, unit: int) -> None:
    base = predict_step(resolved(step_of(16, schedule, unit=unit, recompute=("layers.*",))))
    assert 0.3 * base.step_s < room._least_s(base, base.step) <= base.step_s

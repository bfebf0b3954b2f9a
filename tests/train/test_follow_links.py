"""Formats of boundaries chosen for measured links, and pipelines whose boundaries cannot take others."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from terrace.base.errors import CheckpointError, ConfigError, PlanError, TerraceError
from terrace.cli.overrides import parse_overrides
from terrace.cluster.members import Member
from terrace.plan.members import boundary_formats, boundary_links, formats_to_follow, with_formats
from terrace.plan.presets import preset
from terrace.planner.evaluate import step_of
from terrace.planner.member_stages import formats_anew
from terrace.planner.task import Task
from terrace.simulate.step import Step, predict_step
from terrace.train.deals import Deals, Dealt, formats_to_resume, read_deals
from terrace.train.follow_links import check_formats_follow
from terrace.train.resolve import resolve
from tests.support.planner_cases import gpt
from tests.support.tiny_runs import write_run
from tests.support.toys import cluster_of

LINKS = ((1e11, 1e-6), (1e6, 1e-6), (1e11, 1e-6))  # the middle one is slow, which no links of members say


def step_on(wire: str = "fp32") -> Step:
    cluster = cluster_of(1, 4)
    plan = replace(preset("ddp", cluster), micro_batch=1, mapping={"node": {"pipeline": 4}}, schedule="1f1b")
    if wire != "fp32":
        plan = replace(plan, wire={name: {"node": wire} for name in ("pipeline", "pipeline_backward")})
    task = Task(model=gpt(2, 64, 2, vocab=257, positions=64), cluster=cluster, batch=8, sequence=64, compute="fp32")
    return step_of(task, plan)


def test_the_slow_boundary_alone_is_coded_just_enough() -> None:
    step = replace(step_on(), links=LINKS)
    allowed = formats_to_follow(step.cluster, step.plan)
    assert allowed["pipeline"] == [("fp32", "bf16", "int8")] * 3
    formats, now_s, found_s = formats_anew(step, allowed)
    assert formats == dict.fromkeys(allowed, ("fp32", "int8", "fp32"))
    assert found_s < 0.6 * now_s
    # Of formats that both directions share, these are the widest of the shortest steps.
    played = {
        each: predict_step(
            replace(step, plan=with_formats(step.plan, step.cluster, dict.fromkeys(allowed, each)))
        ).step_s
        for each in product(("fp32", "int8"), repeat=3)
    }
    assert found_s == pytest.approx(played["fp32", "int8", "fp32"])
    assert found_s <= 1.02 * min(played.values())
    assert min(seconds for each, seconds in played.items() if each[1] == "fp32") > 1.5 * found_s


def test_formats_are_wide_again_once_the_link_is_fast_and_never_wider_than_the_plan() -> None:
    given = step_on("fp32, bf16, fp32")
    allowed = formats_to_follow(given.cluster, given.plan)
    coded = with_formats(given.plan, given.cluster, dict.fromkeys(allowed, ("fp32", "int8", "fp32")))
    formats, *_ = formats_anew(replace(given, plan=coded, links=(LINKS[0],) * 3), allowed)
    assert formats == boundary_formats(given.cluster, given.plan)
    assert formats["pipeline"] == ("fp32", "bf16", "fp32")


def test_measured_links_price_a_step_as_those_of_members_do() -> None:
    step = step_on()
    *inner, tier = step.cluster.tiers
    slow = Member(bandwidth_bytes_per_s=1e6)
    cluster = replace(step.cluster, tiers=(*inner, replace(tier, members=(Member(count=3), slow))))
    links = tuple(boundary_links(cluster, step.plan))  # and that of the last with the first, which hold one table
    assert links[0] == boundary_links(step.cluster, step.plan)[0]
    # But for the gradient norm, which takes the slowest link of all members.
    assert predict_step(replace(step, links=links)).step_s == pytest.approx(
        predict_step(replace(step, cluster=cluster)).step_s, rel=0.01
    )


PIPELINE = ("--plan.mapping.node.pipeline", "2", "--plan.schedule", "1f1b")
THREE = ("--cluster.tiers.node.size", "3", "--plan.mapping.node.pipeline", "3", "--model.num_hidden_layers", "6")
CODED = ("--plan.wire.pipeline.node", "int8", "--plan.wire.pipeline_backward.node")
REFUSED: tuple[tuple[type[TerraceError], tuple[str, ...], str], ...] = (
    (ConfigError, PIPELINE, r"no effect in train.steps = 6: links are compared after train.slow_steps = 20 first"),
    (PlanError, (*PIPELINE, *CODED, "int4+feedback"), r"'int4\+feedback' keeps residuals of its own: leave one"),
    (PlanError, (*PIPELINE, *CODED, "int8"), r"has no effect: every boundary has a format that no other"),
)


@pytest.mark.parametrize(("kind", "words", "why"), REFUSED)
def test_a_pipeline_that_cannot_follow_is_refused_in_a_line(
    tmp_path: Path, kind: type[TerraceError], words: tuple[str, ...], why: str
) -> None:
    file = write_run(tmp_path, 1, 2, plan="ddp")
    with pytest.raises(kind, match=why) as refused:
        resolve(str(file), {}, parse_overrides(("--train.follow", "true", "--train.batch", "12", *words)))
    assert "\n" not in str(refused.value)


def test_a_schedule_that_closes_the_ring_is_refused(tmp_path: Path) -> None:
    file = write_run(tmp_path, 1, 2, plan="ddp", batch=12)
    words = (*THREE, "--train.follow", "true", "--train.slow_steps", "4", "--plan.schedule")
    with pytest.raises(PlanError, match=r"train.follow = true: .* also sends from the last member to the first"):
        check_formats_follow(resolve(str(file), {}, parse_overrides((*words, "interleaved:2"))))
    check_formats_follow(resolve(str(file), {}, parse_overrides((*words, "1f1b"))))


def test_a_resume_repeats_formats_unless_the_user_gives_others(tmp_path: Path) -> None:
    plain, coded, own = ({"pipeline": (name,) * 2} for name in ("fp32", "int8", "bf16"))
    deals = Deals((), (), plain)
    assert formats_to_resume(tmp_path, 5, plain, own) == ()
    deals.add(Dealt(step=7, formats=coded, predicted_s=0.5))
    deals.write(tmp_path)
    first, later = read_deals(tmp_path)
    assert (first, later) == tuple(deals.dealt)
    assert [Deals((), (first, later), own).formats_at(step) for step in (0, 6, 7)] == [plain, plain, coded]
    assert formats_to_resume(tmp_path, 5, plain, plain) == (first, later)
    assert formats_to_resume(tmp_path, 5, plain, own) == (first, Dealt(step=5, formats=own))
    assert formats_to_resume(tmp_path, 9, plain, {"pipeline": ("bf16",)}) == ()  # other members
    (tmp_path / "deals.jsonl").write_text('{"step": 0, "formats": {"pipeline": 5}}\n')
    with pytest.raises(CheckpointError, match="cannot be read"):
        formats_to_resume(tmp_path, 9, plain, plain)

"""Long programs repeat: instructions, bytes, memory and the verifier's verdict are those of the program written out."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import pytest

from terrace.base.errors import PlanError, ProgramError
from terrace.base.repeated import Repeated
from terrace.model.blocks import block_specs
from terrace.model.spec import BlockSpec, freeze
from terrace.plan.plan import Plan
from terrace.program import lowering
from terrace.program.instruction import Instruction, Op, Phase
from terrace.program.lowering import build_stages, forward_programs
from terrace.program.program import Program
from terrace.program.segments import Run, Segments
from terrace.program.text import program_text
from tests.support.byte_formula import step_bytes
from tests.support.effort import lines_run
from tests.support.nightly import in_turns, nightly
from tests.support.planner_cases import CLUSTERS, gpt
from tests.support.state_formula import model_state_bytes
from tests.support.totals import verify_stages

CLUSTER = CLUSTERS["dgx 4x2"]
BLOCKS = block_specs(gpt(10, 64, 4, vocab=100, positions=32))  # tied
SCHEDULES = ("1f1b", "zb-h1", "zb-h2", "zbv", "interleaved:2", "interleaved:1", "zeropp:2", "zb-2p", "zb-auto:3")
NEVER = 10**9


def plan_of(schedule: str | None, stages: int, place: str = "system", unit: int = 1, **changes: object) -> Plan:
    mapping = {"node": {"data": 4 // stages, "pipeline": stages}} if stages > 1 else {}
    places = {"params": place, "grads": place, "optimizer": place, "unit": unit}
    return Plan(compute="bf16", mapping=mapping, schedule=schedule, **places, **changes)  # type: ignore[arg-type]


@pytest.fixture
def programs_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[Plan, int, int], list[Program]]:
    def programs(plan: Plan, num_micros: int, longest: int = 0, blocks: Sequence[BlockSpec] = BLOCKS) -> list[Program]:
        """Steps with more passes than `longest` repeat."""
        monkeypatch.setattr(lowering, "_LONG_STEP", longest)
        return build_stages(CLUSTER, plan, blocks, num_micros, 32)

    return programs


Programs = Callable[..., list[Program]]


@pytest.fixture
def nothing_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def whole(program: Program) -> Program:
        assert not program.segments.repeats, "verified with every repetition"
        return program

    monkeypatch.setattr(Program, "whole", whole)


def assert_same(found: Sequence[Program], whole: Sequence[Program]) -> None:
    for one, other in zip(found, whole, strict=True):
        assert one.segments.repeats
        assert not other.segments.repeats
        assert tuple(one.instructions) == other.instructions
        assert tuple(one.stage.groups) == other.stage.groups
        assert replace(one.stage, groups=()) == replace(other.stage, groups=())
        assert list(one.counts.items()) == list(other.counts.items())
        assert (one.sent_bytes, one.state_bytes) == (other.sent_bytes, other.state_bytes)
        assert one.short.num_micros < one.num_micros / 2


@pytest.mark.usefixtures("nothing_written_out")
@pytest.mark.parametrize(("schedule", "place"), in_turns(2, SCHEDULES, ["device", "system"]))
def test_a_pipeline_that_repeats_is_the_one_written_out(programs_of: Programs, schedule: str, place: str) -> None:
    unit = 4 if schedule.startswith("zeropp") else 1
    plan = plan_of(schedule, 4, place, unit, prefetch=3 if schedule == "zbv" else 1)
    found = programs_of(plan, 120)
    whole = programs_of(plan, 120, NEVER)
    assert_same(found, whole)
    verify_stages(found)
    forwards = forward_programs(found)
    assert_same(forwards, forward_programs(whole))
    verify_stages(forwards)
    for program in found:
        asked = (CLUSTER, plan, program.blocks, 120, 32)
        stages = program.stage, replace(program.stage, groups=tuple(program.stage.groups))
        assert step_bytes(*asked, stages[0]) == step_bytes(*asked, stages[1])
        assert model_state_bytes(*asked, stages[0]) == model_state_bytes(*asked, stages[1])


@pytest.mark.usefixtures("nothing_written_out")
@pytest.mark.parametrize(("unit", "prefetch"), in_turns(2, [1, 4], [0, 1, 5]))
def test_one_stage_that_repeats_is_the_one_written_out(programs_of: Programs, unit: int, prefetch: int) -> None:
    # 123 is no multiple of the unit: the last unit is shorter.
    plan = plan_of(None, 1, "system", unit, prefetch=prefetch)
    found = programs_of(plan, 123)
    assert_same(found, programs_of(plan, 123, NEVER))
    verify_stages(found)
    assert_same(forward_programs(found), forward_programs(programs_of(plan, 123, NEVER)))


@pytest.mark.usefixtures("nothing_written_out")
@pytest.mark.parametrize("schedule", [None, "1f1b"])
def test_frozen_blocks_repeat(programs_of: Programs, schedule: str | None) -> None:
    frozen = freeze(BLOCKS, ["layers.1.*", "layers.6.*"])
    verify_stages(programs_of(plan_of(schedule, 2 if schedule else 1), 48, blocks=frozen))


@pytest.mark.usefixtures("nothing_written_out")
def test_effort_does_not_grow_with_micro_batches(programs_of: Programs) -> None:
    plan = plan_of("1f1b", 4)

    def step(num_micros: int) -> None:
        found = programs_of(plan, num_micros)
        verify_stages(found)
        for program in found:
            assert program.state_bytes["params"]

    step(60)  # what is cached is there afterwards
    assert lines_run(lambda: step(600_000)) < 1.01 * lines_run(lambda: step(6_000))


def test_a_long_step_in_which_nothing_repeats_is_refused(programs_of: Programs) -> None:
    with pytest.raises(PlanError, match="that a program may have whose order does not repeat: give a smaller batch"):
        programs_of(plan_of("gpipe", 4), 200_000)


@pytest.mark.parametrize("schedule", ["gpipe", "breadth-first:2"])
def test_an_order_that_does_not_repeat_is_written_out(programs_of: Programs, schedule: str) -> None:
    found = programs_of(plan_of(schedule, 4), 40)
    assert not any(program.segments.repeats for program in found)
    verify_stages(found)


def damaged(program: Program, random: Random) -> Program:
    """One instruction of the beginning, the body or the end is lost, doubled, moved or another one."""
    order = program.segments.whole
    assert isinstance(order, Repeated)
    part = random.choice([name for name in ("prefix", "body", "body", "suffix") if getattr(order, name)])
    items: list[Instruction] = list(getattr(order, part))
    place = random.randrange(len(items))
    match random.randrange(5):
        case 0:
            del items[place]
        case 1:
            items.insert(random.randrange(len(items)), items[place])
        case 2:
            items.insert(random.randrange(len(items)), items.pop(place))
        case 3:
            items[place] = items[place]._replace(micro=items[place].micro + random.choice([-1, 1, 2]))
        case _:
            other = random.randrange(len(items))
            items[place], items[other] = items[other], items[place]
    return replace(program, instructions=in_parts(replace(order, **{part: tuple(items)})))  # type: ignore[arg-type]


def in_parts(order: Repeated[Instruction]) -> Segments:
    """Instructions with a body for each part of their order."""
    prefix, body, suffix = ((Run(part, 0),) for part in range(3))
    return Segments(
        (order.prefix, order.body, order.suffix), Repeated(prefix, body, suffix, order.repeats, order.every)
    )


def verdict(programs: Sequence[Program]) -> str:
    """The broken rule and its place; empty for programs that keep all rules."""
    try:
        verify_stages(programs)
    except ProgramError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", None, *nightly("zb-h1", "interleaved:2", "zeropp:2")])
def test_damage_has_the_verdict_of_the_program_written_out(programs_of: Programs, schedule: str | None) -> None:
    random, verdicts = Random(str(schedule)), []
    unit = 4 if schedule == "zeropp:2" else 1
    programs = programs_of(plan_of(schedule, 2 if schedule else 1, unit=unit), 48)
    for _ in range(15):
        bad = list(programs)
        stage = random.randrange(len(bad))
        bad[stage] = damaged(bad[stage], random)
        verdicts.append(verdict(bad))
        assert verdicts[-1] == verdict([program.whole() for program in bad])
    assert any(verdicts)


def test_a_message_that_falls_behind_body_by_body_is_refused(programs_of: Programs) -> None:
    """A RECV of the body that asks for the message of another body: the short program cannot show how far it goes."""
    programs = programs_of(plan_of("1f1b", 2), 48)
    order = programs[1].segments.whole
    assert isinstance(order, Repeated)
    at = next(place for place, each in enumerate(order.body) if each.op is Op.RECV)
    body = list(order.body)
    body[at] = body[at]._replace(micro=body[at].micro + 1)
    with pytest.raises(ProgramError):
        verify_stages([programs[0], replace(programs[1], instructions=in_parts(replace(order, body=tuple(body))))])


@pytest.mark.parametrize("phase", [Phase.TRAIN, Phase.FORWARD])
@pytest.mark.parametrize("further", [-48, -1, 1])
def test_other_repetitions_than_the_stage_has_are_refused(programs_of: Programs, phase: Phase, further: int) -> None:
    programs = programs_of(plan_of(None, 1, "device"), 48)
    (program,) = forward_programs(programs) if phase is Phase.FORWARD else programs
    order = program.segments.whole
    assert isinstance(order, Repeated)
    bad = [replace(program, instructions=in_parts(order.times(max(order.repeats + further, 0))))]
    assert verdict(bad) == verdict([each.whole() for each in bad]) != ""


def test_groups_written_out_do_not_hinder_the_verifier(programs_of: Programs) -> None:
    (program,) = programs_of(plan_of(None, 1), 48)
    groups = tuple(program.stage.groups)
    verify_stages([replace(program, stage=replace(program.stage, groups=groups))])


def test_a_gather_that_adds_up_over_bodies_is_refused_by_bytes(programs_of: Programs) -> None:
    """Gathered and freed once more in every body: each body is in order, the bytes are not the plan's."""
    (program,) = programs_of(plan_of(None, 1), 48)
    order = program.segments.whole
    assert isinstance(order, Repeated)
    at = next(place for place, each in enumerate(order.body) if each.op is Op.FREE)
    block = order.body[at].block
    again = next(each for each in order.body if each.op is Op.GATHER and each.block == block)
    read = next(each for each in order.body if each.op in (Op.FORWARD, Op.BACKWARD) and each.block == block)
    assert read.micro >= 0
    body = (*order.body[:at], order.body[at], again, *order.body[at:])
    with pytest.raises(ProgramError, match="the block is gathered for nothing"):
        verify_stages([replace(program, instructions=in_parts(replace(order, body=body)))])


def test_the_text_of_a_program_that_repeats_has_its_body_once(programs_of: Programs) -> None:
    program, *_ = programs_of(plan_of("1f1b", 4), 120)
    order = program.segments.whole
    assert isinstance(order, Repeated)
    lines, whole = program_text(program).splitlines(), program_text(program.whole()).splitlines()
    begin = len(order.prefix) + len(order.body)
    assert lines[:begin] == whole[:begin]
    times = f"{order.repeats - 1} times more, each time 1 micro-batch later"
    assert lines[begin] == f"  ...  the last {len(order.body)} instructions {times}"
    assert lines[begin + 1 :] == whole[-len(order.suffix) :]

"""Plans with islands: their steps stay inside, an outer program says what crosses, and formulas agree with both."""

from dataclasses import replace

import pytest

from terrace.base.errors import ConfigError, PlanError, ProgramError
from terrace.plan.memory import model_state_bytes
from terrace.plan.plan import Plan
from terrace.plan.presets import parse_plan, preset
from terrace.plan.wire import MessageClass
from terrace.program.instruction import Instruction, Op
from terrace.program.lowering import build, build_stages, forward_programs, outer_program
from terrace.program.period import Period, Turn
from terrace.program.program import Program
from terrace.program.verify import verify
from terrace.program.verify_period import verify_period
from terrace.simulate.period import predict_period
from tests.support.pipelines import INNER, pipelined
from tests.support.toys import MODELS, SEQUENCE, cluster_of

MODEL = MODELS["deep llama tied"]
CLUSTER = cluster_of(2, 2, 2)
FLOPS = (1e9,) * len(MODEL.declared)


def island_plan(name: str, island: str = "node", **changes: object) -> Plan:
    made = preset(name, CLUSTER)
    inside = {state: island for state in ("params", "grads", "optimizer") if getattr(made, state) == "system"}
    return replace(made, island=island, **inside, **changes)  # type: ignore[arg-type]


def step_of(plan: Plan) -> Program:
    return build(CLUSTER, plan, MODEL.declared, 2, SEQUENCE)


def synchronised_bytes(step: Program) -> dict[tuple[MessageClass, str], int]:
    """By tier: gradients added up outside `grads`, gathered outside `optimizer`; three fp64 numbers of every rank."""
    tiers, plan = ["device", "package", "node"], step.plan
    grads, optimizer, numel = tiers.index(plan.grads), tiers.index(plan.optimizer), padded_numel(step)
    item, total = {"fp32": 4, "bf16": 2}[plan.compute], dict[tuple[MessageClass, str], int]()
    for tier in (1, 2):  # a tier joins two ranks, so a rank sends half of what it holds inside, each way
        reduced, gathered = tier > grads, tier > max(grads, optimizer)
        total[MessageClass.SYNC, tiers[tier]] = (reduced + gathered) * numel // 2**tier * item
        total[MessageClass.CONTROL, tiers[tier]] = 3 * 8
    return total


def padded_numel(step: Program) -> int:
    return sum(flat.padded for flats in step.flats for flat in flats if flat.trainable)


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero3", "three-level", "hsdp"])
def test_only_the_outer_program_leaves_an_island(name: str) -> None:
    step = step_of(island_plan(name))
    outer = outer_program(step)
    period = Period((Turn((step,), 5), Turn((outer,))))
    verify_period(period)
    assert not [key for key, size in step.sent_bytes.items() if key[1] == "system" and size]
    assert {message for (message, tier) in outer.sent_bytes if tier == "system"} == {MessageClass.OUTER}
    # Of P elements in bf16 or fp32, each of the 4 ranks of an island exchanges a quarter, half of it each way.
    item = {"fp32": 4, "bf16": 2}[step.plan.compute]
    numel = padded_numel(step)
    assert period.sent_bytes()[MessageClass.OUTER, "system"] == 2 * numel * item // 4 // 2
    # All else of a step is as without islands.
    whole = step_of(replace(step.plan, island=None)).sent_bytes
    for key, size in step.sent_bytes.items():
        assert size == whole[key] or key[0] in (MessageClass.SYNC, MessageClass.CONTROL)
    for key, size in synchronised_bytes(step).items():
        assert step.sent_bytes.get(key, 0) == size
    for place in (period, Period((Turn((step,)), Turn((outer,))))):
        assert place.state_bytes() == model_state_bytes(CLUSTER, step.plan, step.blocks, 2, SEQUENCE)
    assert period.state_bytes()["outer"] > 0


def test_a_period_hides_an_exchange_behind_more_steps() -> None:
    slow = replace(CLUSTER.tiers[2], bandwidth_bytes_per_s=CLUSTER.tiers[2].bandwidth_bytes_per_s / 1e4)
    cluster = replace(CLUSTER, tiers=(*CLUSTER.tiers[:2], slow))
    steps = tuple(build_stages(cluster, island_plan("zero3"), MODEL.declared, 2, SEQUENCE))
    outer = tuple(map(outer_program, steps))
    found = {every: predict_period(Period((Turn(steps, every), Turn(outer))), FLOPS) for every in (1, 10)}
    (step,), (exchange,) = found[1].turns
    assert exchange.time_s["wait outer"] > 0.9 * exchange.step_s
    for every, period in found.items():
        assert period.reports[0].step_s == pytest.approx(every * step.step_s + exchange.step_s)


def test_stages_of_a_pipeline_exchange_their_own_blocks() -> None:
    plan = replace(pipelined("zero1", INNER, "1f1b"), optimizer="package", island="package")
    steps = tuple(build_stages(cluster_of(*INNER.sizes), plan, MODEL.declared, 2, SEQUENCE))
    period = Period((Turn(steps, 2), Turn(tuple(map(outer_program, steps)))))
    verify_period(period)
    for turn in period.turns[1:]:
        for program in turn.programs:
            assert {now.block for now in program.instructions} == set(program.stage.held)
    assert len(predict_period(period, FLOPS).reports) == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer": "system"}, "optimizer = 'system' lies outside island = 'node'"),
        ({"island": "system"}, "no data ranks are outside"),
        ({"mapping": {"system": {"tensor": 2}}}, "no data ranks are outside"),
        ({"mapping": {"node": {"context": 2}}, "island": "package"}, "the ring axis crosses tier 'node'"),
        ({"island": "nowhere"}, "no tier 'nowhere'"),
    ],
)
def test_a_plan_whose_islands_cannot_be_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        step_of(replace(island_plan("ddp"), **changes))  # type: ignore[arg-type]


def test_an_island_is_no_key_of_a_file_yet() -> None:
    with pytest.raises(ConfigError, match=r"unknown key plan\.island"):
        parse_plan({"preset": "ddp", "island": "node"}, CLUSTER)
    with pytest.raises(PlanError, match="nothing to exchange"):
        outer_program(step_of(preset("ddp", CLUSTER)))


def test_a_period_without_an_exchange_or_with_one_too_many_is_refused() -> None:
    step = step_of(island_plan("zero3"))
    outer, (forward,) = (outer_program(step),), forward_programs([step])
    for turns, words in (
        ((Turn((step,), 3),), "never exchange their changes"),
        ((Turn((step,)), Turn(outer, 2)), "no step has changed a parameter"),
        ((Turn((step,)), Turn(outer), Turn((forward,)), Turn(outer)), "no step has changed a parameter"),
        ((Turn(outer),), "no step has changed a parameter"),
        ((Turn((step,)), Turn((forward,)), Turn(outer)), "follows steps of islands, whose parameters differ"),
        # The step at the end is before the forwards at the beginning.
        ((Turn((forward,), 2), Turn((step,)), Turn(outer), Turn((step,))), "turn 0 of the period .* parameters differ"),
    ):
        with pytest.raises(ProgramError, match=words):
            verify_period(Period(turns))
    # A period may end with steps: it repeats, and the next exchange is of theirs.
    verify_period(Period((Turn((step,)), Turn(outer), Turn((forward,)), Turn((step,)))))
    verify_period(Period((Turn((forward,)), Turn((step,)), Turn(outer))))
    verify_period(Period((Turn((forward,)),)))


def test_an_exchange_in_another_order_is_refused() -> None:
    outer = outer_program(step_of(island_plan("zero3")))
    start, apply, refresh = (Instruction(op, 1) for op in (Op.OUTER_START, Op.OUTER_APPLY, Op.REFRESH))
    others = tuple(now for now in outer.instructions if now.block != 1)
    for order, words in (
        ((apply, start, refresh), "it needs `OUTER_START b1` before it"),
        ((start, refresh, apply), "it needs `OUTER_APPLY b1` before it"),
        ((start, refresh), "it needs `OUTER_APPLY b1` before it"),
        ((start, start, apply, refresh), "it runs twice"),
        ((start, apply), "`REFRESH b1` never happens"),
        ((start, apply, refresh, Instruction(Op.UPDATE, 1)), "exchanges changes of parameters alone"),
    ):
        with pytest.raises(ProgramError, match=words):
            verify(replace(outer, instructions=(*others, *order)))
    step = step_of(island_plan("zero3"))
    with pytest.raises(ProgramError, match="the program trains"):
        verify(replace(step, instructions=(start, *step.instructions)))

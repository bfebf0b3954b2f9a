"""Plans with islands: steps stay inside, an exchange lists its messages and their times, and formulas agree."""

from dataclasses import replace

import pytest

from terrace.base.errors import ConfigError, PlanError, ProgramError
from terrace.base.schema import dump, merge
from terrace.plan.outer import NO_EXCHANGE, ONE_ISLAND, OUTERS, Exchange, Outer, closing
from terrace.plan.plan import Plan
from terrace.plan.presets import parse_plan, preset
from terrace.plan.wire import MessageClass
from terrace.program.cycle import cycle, exchanging, outer_program
from terrace.program.instruction import Instruction, Op
from terrace.program.lowering import build, build_stages
from terrace.program.program import Program
from terrace.program.verify_ranks import verify_stages
from tests.support.pipelines import INNER, pipelined
from tests.support.state_formula import model_state_bytes
from tests.support.totals import verify
from tests.support.toys import MODELS, SEQUENCE, cluster_of

MODEL = MODELS["deep llama tied"]
CLUSTER = cluster_of(2, 2, 2)
LOOP = Outer(tier="system", every=6)
LATE = Outer(tier="system", every=6, fragments=3, delay=3)


def island_plan(name: str, outer: Outer = LOOP, **changes: object) -> Plan:
    made = preset(name, CLUSTER)
    inside = {state: "node" for state in ("params", "grads", "optimizer") if getattr(made, state) == "system"}
    return replace(made, outer=outer, **inside, **changes)  # type: ignore[arg-type]


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
    return sum(flat.padded for flats in step.model.flats for flat in flats if flat.trainable)


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero3", "three-level", "hsdp"])
@pytest.mark.parametrize("outer", [LOOP, LATE], ids=["one fragment", "three fragments, late"])
def test_only_exchanges_leave_an_island(name: str, outer: Outer) -> None:
    step = step_of(island_plan(name, outer))
    period = cycle([step])
    for turn in period.turns:
        verify_stages(turn.programs)
    assert not [key for key, size in step.sent_bytes.items() if key[1] == "system" and size]
    assert {message for (message, tier) in period.sent_bytes() if tier == "system"} == {MessageClass.OUTER}
    # Of P elements in bf16 or fp32, each of the 4 ranks of an island exchanges a quarter, half of it each way; five
    # fp64 numbers of each fragment and a digest of each block go to the other island.
    item = {"fp32": 4, "bf16": 2}[step.plan.compute]
    numbers = 8 * (5 * outer.fragments + len(MODEL.declared))
    assert period.sent_bytes()[MessageClass.OUTER, "system"] == 2 * padded_numel(step) * item // 4 // 2 + numbers
    # All else of a step is as without islands.
    whole = step_of(replace(step.plan, outer=ONE_ISLAND)).sent_bytes
    for key, size in step.sent_bytes.items():
        assert size == whole[key] or key[0] in (MessageClass.SYNC, MessageClass.CONTROL)
    for key, size in synchronised_bytes(step).items():
        assert step.sent_bytes.get(key, 0) == size
    assert period.state_bytes() == model_state_bytes(CLUSTER, step.plan, step.blocks, 2, SEQUENCE)
    owned = padded_numel(step) // {"device": 1, "package": 2, "node": 4}[step.plan.optimizer]
    assert period.state_bytes()["outer"] == owned * 4 * (4 if outer.delay else 2)


def test_one_island_never_exchanges_and_no_file_names_it() -> None:
    plan = preset("zero3", CLUSTER)
    step = step_of(plan)
    assert {ONE_ISLAND.exchange(number, ()) for number in range(5)} == {NO_EXCHANGE}
    (turn,) = cycle([step]).turns
    assert (turn.programs, turn.times) == ((step,), 1)
    assert step.state_bytes["outer"] == 0
    assert "outer" not in dump(plan)
    assert parse_plan(dump(plan), CLUSTER) == plan


def test_fragments_take_turns_and_arrive_after_their_delay() -> None:
    step = step_of(island_plan("zero3", LATE))
    assert [turn.programs[0].exchange for turn in cycle([step]).turns] == [
        Exchange(arrives=(1,)),
        Exchange(starts=(0,)),
        Exchange(arrives=(2,)),
        Exchange(starts=(1,)),
        Exchange(arrives=(0,)),
        Exchange(starts=(2,)),
    ]
    # At first nothing is under way.
    assert [LATE.exchange(step, ()) for step in (0, 2)] == [NO_EXCHANGE, NO_EXCHANGE]
    assert closing({1}, {0, 2}) == [Exchange(arrives=(1,)), Exchange(starts=(0, 2), waits=True)]
    assert closing((), ()) == []
    # The same block in each exchange, and REFRESH once a step.
    for turn in cycle([step]).turns:
        order = [now for now in turn.programs[0].instructions if now.op is Op.REFRESH]
        assert len(order) == len(set(order)) == len(MODEL.declared)


def test_stages_of_a_pipeline_exchange_their_own_blocks() -> None:
    plan = replace(pipelined("zero1", INNER, "1f1b"), optimizer="package", outer=Outer(tier="node", every=2))
    steps = tuple(build_stages(cluster_of(*INNER.sizes), plan, MODEL.declared, 2, SEQUENCE))
    period = cycle(steps)
    for turn in period.turns:
        verify_stages(turn.programs)
    for program in period.turns[1].programs:
        started = {now.block for now in program.instructions if now.op is Op.OUTER_START}
        assert started == set(program.stage.held)


def test_a_long_step_takes_an_exchange_at_its_end() -> None:
    plan = island_plan("zero3")
    frame = build(CLUSTER, plan, MODEL.declared, 4000, SEQUENCE)
    found = exchanging(frame, Exchange(starts=(0,), waits=True))
    verify(found)
    assert len(found.instructions) == len(frame.instructions) + 1 + 2 * len(MODEL.declared)
    assert exchanging(found, NO_EXCHANGE).instructions == frame.instructions


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer": "system"}, "optimizer = 'system' does not lie inside outer.tier = 'system'"),
        ({"mapping": {"system": {"tensor": 2}}}, "the rows axis crosses tier 'system'"),
        ({"mapping": {"system": {"context": 2}}}, "the ring axis crosses tier 'system'"),
        ({"outer": {"tier": "nowhere"}}, "outer.tier = 'nowhere' is not in the cluster"),
        ({"outer": {"every": 0}}, "outer.every = 0: islands exchange"),
        ({"outer": {"fragments": 4}}, "outer.every = 6 is no multiple of outer.fragments = 4, .* use 4 or 8"),
        ({"outer": {"fragments": 99, "every": 99}}, "outer.fragments = 99: the 8 blocks"),
        ({"outer": {"delay": 7}}, "outer.delay = 7: .* outer.every = 6"),
        ({"outer": {"lr": 0.0}}, r"outer.lr = 0.0: it is above 0"),
        ({"outer": {"momentum": 1.0}}, "outer.momentum = 1.0: it is from 0 to below 1"),
        ({"outer": {"clip": -1.0}}, "outer.clip = -1.0"),
        ({"outer": {"clip": float("nan")}}, "outer.clip = nan"),
        ({"outer": {"keep": 1.5, "delay": 1}}, "outer.keep = 1.5"),
        ({"outer": {"keep": 0.5}}, "outer.keep has no effect without a delay"),
        ({"outer": {"penalty": True}}, "outer.penalty has no effect without a delay"),
        ({"outer": {"optimizer": "average", "momentum": 0.5}}, "outer.momentum has no effect: optimizer 'average'"),
        ({"wire": {"outer": {"device": "int8"}}}, "names tier 'device', which is not in the cluster"),
        (
            {"outer": ONE_ISLAND, "wire": {"outer": {"system": "int8"}}},
            "wire.outer.system has no effect: all ranks are one",
        ),
    ],
)
def test_a_plan_whose_islands_cannot_be_is_refused(changes: dict[str, object], words: str) -> None:
    given = changes.get("outer")
    more = changes | ({"outer": replace(LOOP, **given)} if isinstance(given, dict) else {})
    with pytest.raises(PlanError, match=words):
        step_of(replace(island_plan("ddp"), **more))  # type: ignore[arg-type]


def test_a_tier_of_one_member_makes_no_islands() -> None:
    cluster = cluster_of(2, 1)
    plan = replace(preset("ddp", cluster), outer=Outer(tier="node", every=2))
    with pytest.raises(PlanError, match="one member, so there is one island; leave outer out"):
        build(cluster, plan, MODEL.declared, 1, SEQUENCE)


def test_a_file_names_a_preset_or_a_table() -> None:
    for name, make in OUTERS.items():
        plan = parse_plan({"preset": "three-level", "outer": name}, CLUSTER)
        assert plan.outer == make("system")
        # The last tier of a preset is the last inside of islands.
        assert (plan.params, plan.grads, plan.optimizer) == ("package", "node", "node")
        step_of(plan)
    plan = parse_plan({"preset": "zero3", "outer": {"preset": "diloco", "tier": "node", "every": 7}}, CLUSTER)
    assert plan.outer == Outer(tier="node", every=7)
    assert plan.optimizer == "package"
    assert parse_plan({"preset": "ddp", "outer": {"every": 7}}, CLUSTER).outer == Outer(tier="system", every=7)
    # A key of the command line beside the name of a preset, in either form.
    named = merge({"preset": "ddp", "outer": "co2"}, {"outer": {"every": 24}})
    assert parse_plan(named, CLUSTER).outer == replace(OUTERS["co2"]("system"), every=24)
    with pytest.raises(PlanError, match=r"plan.outer = \['diloco'\] is no preset"):
        parse_plan({"preset": "ddp", "outer": {"preset": ["diloco"]}}, CLUSTER)
    with pytest.raises(PlanError, match=r"plan.outer = 'dilocco' is no preset.*diloco"):
        parse_plan({"preset": "ddp", "outer": "dilocco"}, CLUSTER)
    with pytest.raises(ConfigError, match=r"unknown key plan.outer.evry"):
        parse_plan({"preset": "ddp", "outer": {"evry": 7}}, CLUSTER)
    with pytest.raises(PlanError, match="every rank is an island of its own: use preset 'ddp'"):
        parse_plan({"preset": "zero3", "outer": {"tier": "package", "every": 2}}, CLUSTER)
    with pytest.raises(PlanError, match="nothing to exchange"):
        exchanging(step_of(preset("ddp", CLUSTER)), Exchange(starts=(0,)))


def test_an_exchange_in_another_order_is_refused() -> None:
    outer = outer_program(step_of(island_plan("zero3")), Exchange(starts=(0,), waits=True))
    count = Instruction(Op.OUTER_COUNT)
    start, apply, refresh = (Instruction(op, 1) for op in (Op.OUTER_START, Op.OUTER_APPLY, Op.REFRESH))
    others = tuple(now for now in outer.instructions if now.block != 1)
    for order, words in (
        ((apply, start, refresh), "it needs `OUTER_START b1` before it"),
        ((start, refresh, apply), "it needs `OUTER_APPLY b1` before it"),
        ((start, refresh), "it needs `OUTER_APPLY b1` before it"),
        ((start, start, apply, refresh), "it runs twice"),
        ((start, apply), "`REFRESH b1` never happens"),
        ((start, apply, refresh, Instruction(Op.UPDATE, 1)), "exchanges changes of parameters alone"),
        ((start, apply, refresh, count), "it runs twice"),
    ):
        with pytest.raises(ProgramError, match=words):
            verify(replace(outer, instructions=(*others, *order)))
    with pytest.raises(ProgramError, match="it needs `OUTER_COUNT` before it"):
        verify(replace(outer, instructions=(start, *outer.instructions)))
    # In a step: not without an exchange, not of another fragment, not before the update.
    late = step_of(island_plan("zero3", LATE))
    with pytest.raises(ProgramError, match="no exchange starts here"):
        verify(replace(late, instructions=(*late.instructions, count)))
    sends = exchanging(late, Exchange(starts=(0,)))
    with pytest.raises(ProgramError, match="it is not the turn of its fragment"):
        verify(replace(sends, instructions=(*sends.instructions, start)))
    with pytest.raises(ProgramError, match="it needs `UPDATE b0` before it"):
        verify(replace(sends, instructions=(count, *sends.instructions)))
    takes = exchanging(late, Exchange(arrives=(1,)))
    with pytest.raises(ProgramError, match="no exchange of its fragment is over"):
        verify(replace(takes, instructions=(*takes.instructions, Instruction(Op.OUTER_APPLY, 0))))
    without = tuple(now for now in takes.instructions if now != apply)
    with pytest.raises(ProgramError, match="it needs `OUTER_APPLY b1` before it"):
        verify(replace(takes, instructions=without))

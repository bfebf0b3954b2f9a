"""Look-ups of spread tables in the predicted step: messages, seconds of used rows, memory."""

import math
from dataclasses import replace
from typing import Any

import pytest

from terrace.base.errors import ProgramError
from terrace.cluster.below import Medium
from terrace.cluster.presets import load_cluster
from terrace.model.blocks import block_specs
from terrace.model.config import ModelConfig, parse_model
from terrace.plan.keep import Keep
from terrace.plan.kinds import Kinds
from terrace.plan.plan import Plan
from terrace.plan.presets import preset
from terrace.plan.tables import TableTraffic, distinct
from terrace.plan.wire import MessageClass
from terrace.planner.advice import changes, cost_of
from terrace.program.instruction import Instruction, Op
from terrace.program.lowering import build
from terrace.program.program import Program
from terrace.program.report import StepReport
from terrace.program.verify import verify
from terrace.report.routing import mean_words, routed_table
from terrace.simulate.below import ROWS
from terrace.simulate.cost import Costs, step_costs
from terrace.simulate.footprint import footprint, work_of
from terrace.simulate.priced_instruction import Doing
from terrace.simulate.recording import record
from terrace.simulate.states import model_states, stage_blocks
from terrace.simulate.step import Step, predict_step

CLUSTER = load_cluster("dgx-h100").resized(1)
SEQUENCE, MICROS = 2048, 2


def model_of(vocab: int = 262_144, hidden: int = 1024) -> ModelConfig:
    table = {"model_type": "llama", "hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": 2}
    table |= {"num_attention_heads": 8, "num_key_value_heads": 8, "hidden_act": "silu", "vocab_size": vocab}
    return parse_model(table)


def plan_of(name: str = "ddp", *, spread: bool = True, **changes: Any) -> Plan:
    vocabulary = {tier.name: tier.size for tier in CLUSTER.tiers} if spread else {}
    return replace(preset(name, CLUSTER), compute="bf16", vocabulary=vocabulary, micro_batch=2, **changes)


def program_of(plan: Plan, model: ModelConfig) -> Program:
    return build(CLUSTER, plan, block_specs(model), MICROS, SEQUENCE)


def costs_of(plan: Plan, model: ModelConfig) -> Costs:
    program = program_of(plan, model)
    return step_costs(program, work_of(CLUSTER, plan, block_specs(model)[1].operations, SEQUENCE))


def test_a_look_up_waits_for_its_messages_and_its_gradients_are_rows() -> None:
    whole, spread = (costs_of(plan_of(spread=each), model_of()) for each in (False, True))
    forward, backward = (Instruction(op, 0, 0) for op in (Op.FORWARD, Op.BACKWARD))
    assert not whole.steps(forward, whole.forward_s[0], "")
    steps = spread.steps(forward, spread.forward_s[0], "")
    assert [step.does for step in steps[1:]] == [Doing.SEND, Doing.WAIT] * 3
    assert steps[0].event.seconds == spread.forward_s[0] == whole.forward_s[0]
    back = spread.steps(backward, spread.backward_s[0], "")
    assert [step.does for step in back[1:-1]] == [Doing.SEND, Doing.WAIT]
    assert back[-1].event.seconds == spread.backward_s[0]
    # Nothing of the table's size is zeroed or updated: the shares are those of tokens and of distinct ids.
    assert spread.backward_s[0] < 0.1 * whole.backward_s[0]
    assert spread.update_s[0] < 0.2 * whole.update_s[0]
    assert spread.update_s[1:] == whole.update_s[1:]


def test_the_step_has_their_bytes_and_seconds() -> None:
    plan, model = plan_of(), model_of()
    blocks = block_specs(model)
    work = work_of(CLUSTER, plan, blocks[1].operations, SEQUENCE)
    predicted = predict_step(
        Step(cluster=CLUSTER, plan=plan, blocks=blocks, num_micros=MICROS, sequence=SEQUENCE, work=work)
    )
    program = program_of(plan, model)
    sent = program.expected_bytes
    look_ups = program.model.routed.look_ups(0)
    ids = look_ups.tokens * (1 - 1 / 8)  # few of them are equal
    assert sent[MessageClass.COMBINE, "node"] == pytest.approx(MICROS * ids * 1024 * 2, rel=0.02)
    assert sent[MessageClass.DISPATCH, "node"] == pytest.approx(MICROS * ids * (1024 * 2 + 4), rel=0.02)
    assert sent[MessageClass.ROUTE, "node"] == MICROS * 4 * 8 * 7
    assert (MessageClass.DISPATCH, "node") not in program.sent_bytes  # batches declare them
    times = predicted.times_s[predicted.busiest]
    assert all(times[f"wait {name}"] > 0 for name in ("dispatch", "combine", "route"))
    assert mean_words(program).endswith("the mean of uniform ids; each batch declares its own")
    assert routed_table(program).title == "rows of tables on several ranks, for every micro-batch"


@pytest.mark.parametrize("name", ["ddp", "zero3", "three-level"])
def test_memory_of_a_plan_is_that_of_its_program(name: str) -> None:
    """Two accounts: that of a search, and the walk over the program's buffers."""
    plan, blocks = plan_of(name), block_specs(model_of())
    states = model_states(CLUSTER, plan, Kinds.of(blocks), stage_blocks(Kinds.of(blocks), range(len(blocks))), MICROS)
    walked = program_of(plan, model_of()).state_bytes
    assert {key: walked[key] for key in states.steady if key != "buffers"} == {
        key: size for key, size in states.steady.items() if key != "buffers"
    }


def test_gradients_and_rows_on_their_way_are_in_the_account() -> None:
    kinds = Kinds.of(block_specs(model_of()))
    whole, spread = (footprint(CLUSTER, plan_of(spread=each), kinds, SEQUENCE, MICROS) for each in (False, True))
    table, ids = 262_144 * 1024, 2 * SEQUENCE * MICROS
    assert whole["params"] - spread["params"] == table * 2 * 7 // 8
    assert whole["optimizer"] - spread["optimizer"] == table * 12 * 7 // 8
    # At most one row of gradients for each token of the step.
    assert table * 4 - ids * (1024 * 4 + 8) <= whole["grads"] - spread["grads"] < table * 4
    assert 0 < spread["experts"] - whole["experts"] <= 2 * 2 * SEQUENCE * 1024 * 4


def test_a_step_that_does_not_fit_is_offered_rows_on_several_ranks() -> None:
    plan, blocks = plan_of(spread=False), block_specs(model_of())
    work = work_of(CLUSTER, plan, blocks[1].operations, SEQUENCE)
    step = Step(cluster=CLUSTER, plan=plan, blocks=blocks, num_micros=MICROS, sequence=SEQUENCE, work=work)
    needed = cost_of(predict_step(step)).needed_bytes
    words = "vocabulary = { node = 8 }"
    assert words not in [change.words for change in changes(step)]
    small = replace(CLUSTER, device=replace(CLUSTER.device, memory_bytes=0.95 * needed, headroom="0%"))
    (offered,) = (change for change in changes(replace(step, cluster=small)) if change.words == words)
    assert offered.note == "rows that a step does not use are not updated"
    assert offered.plan.vocabulary == {"node": 8}
    assert offered.cost is not None
    assert offered.cost.needed_bytes < 0.9 * needed


def kept_step(keep: Keep, reads: float = 0.0, writes: float = 0.0) -> tuple[Step, StepReport]:
    """A step of the spread table with states on a disk of 2 GB/s, or in a host of 20 GB/s, and its prediction."""
    media = {
        "disk": Medium(
            memory_bytes=1e12,
            read_bytes_per_s=2e9,
            write_bytes_per_s=2e9,
            read_pages_per_s=reads,
            write_pages_per_s=writes,
        ),
        "host": Medium(memory_bytes=1e12, read_bytes_per_s=2e10, write_bytes_per_s=2e10),
    }
    cluster, plan, blocks = (
        replace(CLUSTER, device=replace(CLUSTER.device, below=media)),
        plan_of(),
        block_specs(model_of()),
    )
    work = work_of(cluster, plan, blocks[1].operations, SEQUENCE)
    plan = replace(plan, keep=keep)
    step = Step(cluster=cluster, plan=plan, blocks=blocks, num_micros=MICROS, sequence=SEQUENCE, work=work)
    return step, predict_step(step).reports[0]


def test_rows_below_take_the_seconds_of_their_bytes_and_of_their_pages() -> None:
    (_, on_device), (_, on_disk), (_, host) = map(kept_step, (Keep(), Keep(table="disk"), Keep(table="host")))
    _, slow = kept_step(Keep(table="disk"), 1e4, 5e3)
    assert all(key[0] not in ROWS for key in on_device.sent_bytes)
    # Of 32,768 rows of a rank 2 x 2 x 2,048 ids of 8 ranks use most; a page has one row, its master copy and moments.
    rows, page = TableTraffic.used(look_ups(), MICROS), 4096 * math.ceil((3 * 1024 * 4 + 64) / 4096)
    program = built(Keep(table="disk"))
    read, written = (program.expected_bytes[message, "disk"] for message in ROWS)
    assert (read, written) == pytest.approx((rows * page, rows * page), rel=1e-4)
    assert on_disk.time_s["wait row_read"] == pytest.approx(read / 2e9, rel=1e-6)
    assert on_disk.memory_bytes["optimizer"] < on_device.memory_bytes["optimizer"]
    assert slow.time_s["wait row_read"] == pytest.approx(rows / 1e4, rel=1e-3)
    assert slow.time_s["wait row_write"] == pytest.approx(rows / 5e3, rel=0.05)  # nearly all of it, behind the updates
    looked_up = MICROS * distinct(262_144, look_ups().tokens * 8) / 8 * 1024 * 4
    updated = rows * 3 * 1024 * 4
    program = built(Keep(table="host"))
    assert program.expected_bytes[ROWS[0], "host"] == pytest.approx(looked_up + updated, rel=1e-4)
    assert program.expected_bytes[ROWS[1], "host"] == pytest.approx(updated, rel=1e-4)
    assert host.time_s["wait row_read"] == pytest.approx((looked_up + updated) / 2e10, rel=1e-4)


def look_ups() -> TableTraffic:
    return program_of(plan_of(), model_of()).model.routed.look_ups(0)


def built(keep: Keep) -> Program:
    step, _ = kept_step(keep)
    return build(step.cluster, step.plan, step.blocks, MICROS, SEQUENCE)


def test_rows_below_leave_the_memory_of_the_device_and_must_fit_their_medium() -> None:
    program = built(Keep(table="disk"))
    table = 262_144 // 8 * 1024
    assert program.resting_bytes == {"disk": 262_144 // 8 * 16_384}
    kept, device = program.state_bytes, built(Keep()).state_bytes
    assert device["params"] - kept["params"] == 2 * table
    assert device["optimizer"] - kept["optimizer"] == 12 * table
    step, _ = kept_step(Keep(table="disk"))
    small = {"disk": replace(step.cluster.device.below["disk"], memory_bytes=1e8)}
    cluster = replace(step.cluster, device=replace(step.cluster.device, below=small))
    with pytest.raises(ProgramError, match="disk"):
        verify(build(cluster, step.plan, step.blocks, MICROS, SEQUENCE), 0)


def test_the_verifier_refuses_an_update_of_rows_before_a_look_up() -> None:
    """Rules of gradients say so (terrace.program.verify): rows are not read behind their update in a step."""
    program = built(Keep(table="disk"))
    verify(program)
    update = Instruction(Op.UPDATE, 0)
    look_ups = [each for each in program.instructions if (each.op, each.block) == (Op.FORWARD, 0)]
    assert len(look_ups) == MICROS
    for look_up in look_ups:
        for moved, other, behind in ((update, look_up, 0), (look_up, update, 1)):
            instructions = [each for each in program.instructions if each != moved]
            instructions.insert(instructions.index(other) + behind, moved)
            with pytest.raises(ProgramError, match="it needs"):
                verify(replace(program, instructions=tuple(instructions)))


def test_rows_below_are_among_the_changes_of_a_step_that_does_not_fit() -> None:
    step, _ = kept_step(Keep())
    needed = cost_of(predict_step(step)).needed_bytes
    small = replace(step.cluster, device=replace(step.cluster.device, memory_bytes=0.95 * needed, headroom="0%"))
    offered = {change.words: change for change in changes(replace(step, cluster=small))}
    for medium in ("disk", "host"):
        change = offered[f"keep.table = {medium!r}"]
        assert change.cost is not None
        assert change.cost.needed_bytes < needed
        assert change.plan.keep == Keep(table=medium)


def test_a_recording_has_the_lane_of_the_rows() -> None:
    step, report = kept_step(Keep(table="disk"))
    costs = step_costs(built(Keep(table="disk")), step.work)
    recorded = record(costs.program, costs)
    spans = [(recorded.lane_name(span.lane), span.category) for span in recorded.spans[recorded.first :]]
    assert spans.count(("disk", "row_read")) == MICROS
    assert spans.count(("disk", "row_write")) == 1
    assert ("compute", "wait row_read") in spans
    assert recorded.report.step_s == pytest.approx(report.step_s)

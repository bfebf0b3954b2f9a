"""Programs of forwards alone: verified, without a gradient, and with a part of the step's bytes and seconds."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terrace.base.errors import ProgramError
from terrace.plan.presets import preset
from terrace.plan.wire import MessageClass
from terrace.program.instruction import Instruction, Op
from terrace.program.lowering import build_stages, forward_programs
from terrace.program.program import Program
from terrace.simulate.cost import step_costs
from terrace.simulate.events import simulate
from tests.support.pipelines import ALONE, PLACEMENTS, SCHEDULES, pipelined
from tests.support.totals import verify, verify_stages
from tests.support.toys import MODELS, SEQUENCE, cluster_of

MODEL = MODELS["deep llama tied"]


def trained(name: str, *sizes: int, num_micros: int = 2) -> list[Program]:
    cluster = cluster_of(*sizes)
    return build_stages(cluster, preset(name, cluster), MODEL.declared, num_micros, SEQUENCE)


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero3", "zero++", "three-level"])
def test_what_is_left_of_a_step_is_its_gathers_and_its_sums(name: str) -> None:
    (step,) = trained(name, 2, 2)
    (forward,) = forward_programs([step])
    verify(forward)
    gathers = {key: size for key, size in step.sent_bytes.items() if key[0] is MessageClass.GATHER}
    found = dict(forward.sent_bytes)
    for key in [key for key in found if key[0] is MessageClass.CONTROL]:
        assert found.pop(key) == step.sent_bytes[key]
    assert found == gathers
    flops = [1e9] * len(step.blocks)
    part = simulate(forward, step_costs(forward, flops)).step_s / simulate(step, step_costs(step, flops)).step_s
    assert 0 < part < 1 / 2
    assert forward.state_bytes["grads_full"] == 0


@settings(max_examples=25)
@given(
    schedule=st.sampled_from(SCHEDULES),
    placement=st.sampled_from(PLACEMENTS),
    num_micros=st.integers(1, 9),
)
def test_under_any_schedule_stages_agree(schedule: str, placement: str, num_micros: int) -> None:
    plan = pipelined(placement, ALONE, schedule)
    step = build_stages(cluster_of(*ALONE.sizes), plan, MODEL.declared, num_micros, SEQUENCE)
    programs = forward_programs(step)
    verify_stages(programs)
    for each, trains in zip(programs, step, strict=True):
        passes = [now for now in each.instructions if now.op is Op.FORWARD]
        assert passes == [now for now in trains.instructions if now.op is Op.FORWARD]
        sends = [now for now in trains.instructions if now.op is Op.SEND and not now.backward]
        assert [now for now in each.instructions if now.op is Op.SEND] == sends


FOREIGN = [Instruction(Op.BACKWARD, 0, 0), Instruction(Op.UPDATE, 0), Instruction(Op.GATHER, 0, backward=True)]


@pytest.mark.parametrize("foreign", FOREIGN, ids=str)
def test_an_instruction_of_training_is_refused(foreign: Instruction) -> None:
    (forward,) = forward_programs(trained("zero3", 2, 2))
    with pytest.raises(ProgramError, match="the program runs forwards alone"):
        verify(replace(forward, instructions=(foreign, *forward.instructions)))


def test_a_pass_that_is_missing_is_named() -> None:
    (forward,) = forward_programs(trained("ddp", 2))
    left = tuple(now for now in forward.instructions if now != Instruction(Op.FORWARD, 1, 1))
    with pytest.raises(ProgramError, match="it needs `FORWARD b1 m1` before it"):
        verify(replace(forward, instructions=left))

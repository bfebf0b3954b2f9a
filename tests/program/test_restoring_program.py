"""The program after a loaded state: REFRESH of every trained block, its bytes a part of the step's."""

from dataclasses import replace

import pytest

from terrace.base.errors import ProgramError
from terrace.plan.presets import preset
from terrace.plan.wire import MessageClass
from terrace.program.instruction import Instruction, Op
from terrace.program.lowering import build, build_stages, restoring_program
from terrace.program.program import Program
from terrace.simulate.cost import step_costs
from terrace.simulate.events import simulate
from terrace.simulate.stages import simulate_stages
from tests.support.pipelines import OUTER, pipelined
from tests.support.totals import verify, verify_stages
from tests.support.toys import MODELS, SEQUENCE, cluster_of

MODEL = MODELS["deep llama tied"]


def trained(name: str) -> Program:
    cluster = cluster_of(2, 2)
    return build(cluster, preset(name, cluster), MODEL.declared, 2, SEQUENCE)


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero3", "zero++", "three-level", "three-level-compressed"])
def test_it_sends_what_the_steps_refreshes_send(name: str) -> None:
    step = trained(name)
    restoring = restoring_program(step)
    verify(restoring)
    refreshes = {key: size for key, size in step.sent_bytes.items() if key[0] is MessageClass.REFRESH}
    assert restoring.sent_bytes == refreshes
    # It is waited for, so its seconds are those of its messages.
    costs = step_costs(restoring, [1e9] * len(step.blocks))
    messages_s = sum(costs.collective_s(now) for now in restoring.instructions)
    assert simulate(restoring, costs).step_s == pytest.approx(messages_s)
    assert bool(messages_s) == bool(sum(refreshes.values()))


def test_all_stages_restore_without_waiting_for_each_other() -> None:
    plan = pipelined("zero1", OUTER, "1f1b")
    steps = build_stages(cluster_of(*OUTER.sizes), plan, MODEL.declared, 2, SEQUENCE)
    programs = [restoring_program(step) for step in steps]
    verify_stages(programs)
    costs = [step_costs(program, [1e9] * len(MODEL.declared)) for program in programs]
    for program, found in zip(programs, simulate_stages(programs, costs).reports, strict=True):
        assert found.time_s.keys() == {"wait refresh"}
        assert {now.block for now in program.instructions} <= set(program.stage.held)


def test_a_block_that_is_left_out_or_foreign_is_named() -> None:
    restoring = restoring_program(trained("zero1"))
    without = tuple(now for now in restoring.instructions if now.block != 3)
    with pytest.raises(ProgramError, match="`REFRESH b3` never happens"):
        verify(replace(restoring, instructions=without))
    with pytest.raises(ProgramError, match="the program refreshes parameters alone"):
        verify(replace(restoring, instructions=(Instruction(Op.UPDATE, 0), *restoring.instructions)))

"""Corners of pipelines that numbers alone do not show: counts and refusals."""

from dataclasses import replace

import pytest
import torch

from terrace.base.errors import PlanError, ProgramError
from terrace.plan.presets import preset
from terrace.plan.state_bytes import tie_bytes
from terrace.plan.wire import MessageClass
from terrace.program.instruction import Instruction, Op
from terrace.runtime.engine import Engine
from terrace.runtime.setup import Blocks, Workload
from tests.support.byte_formula import CONTROL_NUMBER_BYTES
from tests.support.pipelines import OUTER, Place, pipelined, programs_of
from tests.support.totals import verify, verify_ranks
from tests.support.toys import MODELS, SEQUENCE, cluster_of

ROWS = Place((2, 2), {"package": {"tensor": 2}, "node": {"pipeline": 2}}, 2)


def test_a_block_format_on_the_tier_of_the_pipeline_measures_nothing() -> None:
    """Control messages cross all stages, but only classes that cross data or tensor ranks have an error in them."""
    plan = replace(preset("three-level-compressed", cluster_of(*OUTER.sizes)), mapping=OUTER.mapping)
    programs = programs_of(plan, OUTER.sizes)
    verify_ranks(programs)
    clip = next(now for now in programs[0].instructions if str(now) == "CLIP")
    assert dict(programs[0].message(clip).sends) == {0: 3 * CONTROL_NUMBER_BYTES, 1: 3 * CONTROL_NUMBER_BYTES}


def test_an_empty_schedule_is_no_schedule() -> None:
    with pytest.raises(PlanError, match="no schedule ''"):
        programs_of(pipelined("zero2", OUTER, ""), OUTER.sizes)


def test_buffers_of_a_tied_block_are_exchanged_one_after_the_other() -> None:
    """GPT-2's positions are whole on every tensor rank, its table is not: two messages, of which one is in memory."""
    model = "deep gpt2"
    program = programs_of(pipelined("zero1", ROWS), ROWS.sizes, model)[0]
    assert program.stage.ties
    apart = [tie_bytes([flat], program.plan.master) for flat in program.model.flats[0]]
    assert len(apart) == 2
    untied = replace(program, instructions=tuple(now for now in program.instructions if now.op is not Op.TIE))
    assert program.state_bytes["buffers"] - untied.state_bytes["buffers"] == max(apart)
    tie = next(now for now in program.instructions if now.peer >= 0 and now.message_class is MessageClass.TIE)
    assert sum(num_bytes for _, num_bytes in program.message(tie).sends) == sum(apart)


@pytest.mark.parametrize(
    ("instruction", "words"),
    [
        (Instruction(Op.FORWARD, 7, 0), "block 7 runs on another stage"),
        (Instruction(Op.RECV, 5, 0, peer=1), "stage 1 makes nothing of it that this stage reads"),
        (Instruction(Op.SYNC, 7), "block 7 is on another stage"),
    ],
)
def test_instructions_of_another_stage_are_refused(instruction: Instruction, words: str) -> None:
    program = programs_of(pipelined("zero3", OUTER, stages=(4, 4)), OUTER.sizes)[0]
    with pytest.raises(ProgramError, match=words):
        verify(replace(program, instructions=(instruction, *program.instructions)))


def test_a_program_for_sequences_of_another_length_is_refused() -> None:
    """Its messages would have another size than the activations: found out before anything is sent."""
    model, plan = MODELS["deep gpt2"], pipelined("zero1", OUTER)
    program = programs_of(plan, OUTER.sizes, "deep gpt2")[0]
    with pytest.raises(ProgramError, match=f"sequences of {SEQUENCE} tokens"):
        Engine(
            Blocks(model.blocks(torch.float64), names=[spec.name for spec in model.declared], declared=model.declared),
            Workload(cluster=cluster_of(*OUTER.sizes), plan=plan, num_micros=4, sequence=SEQUENCE - 1, program=program),
            model.objective,
        )

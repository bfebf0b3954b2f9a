"""Activation bytes of every block of a plan, and their peak over the passes of a program."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from terrace.model.spec import BlockSpec
from terrace.plan.plan import Plan
from terrace.plan.recompute import recomputed_parts
from terrace.program.instruction import PASSES, Op
from terrace.simulate.activations import activations_of, recomputing
from terrace.simulate.block_tape import Backend
from terrace.simulate.curve import Held
from terrace.simulate.work import Work

if TYPE_CHECKING:
    from terrace.program.program import Program


def activations_by_block(work: Work, plan: Plan, blocks: Sequence[BlockSpec], backend: Backend) -> list[Held]:
    """Activation bytes of every block for one micro-batch; the plan's patterns decide which blocks are recomputed."""
    # The plan's patterns decide per block, so `work` itself recomputes nothing.
    work = replace(work, expert_chunks=plan.num_chunks)
    found = []
    for parts, spec in zip(recomputed_parts(plan.recompute, blocks), blocks, strict=True):
        block = activations_of(recomputing(work, parts), spec, backend)
        peaks = block.backward_peak_bytes, block.halved_peak_bytes
        found.append(Held(block.kept_bytes, block.due_bytes, *(max(0, peak - block.kept_bytes) for peak in peaks)))
    return found


def activation_bytes(program: "Program", by_block: Sequence[Held]) -> int:
    """Peak activation bytes of a rank, including the running block's working memory."""
    now = most = 0
    for instruction in program.short.instructions:
        if instruction.op not in PASSES:
            continue
        held = by_block[instruction.block]
        match instruction.op:
            case Op.FORWARD:
                now += held.kept
                most = max(most, now + held.on_top)
            case Op.BACKWARD:
                most = max(most, now + held.on_top)
                now -= held.kept
            case Op.BACKWARD_INPUT:
                most = max(most, now + held.halved_on_top)
                now += held.due - held.kept
            case _:
                most = max(most, now)
                now -= held.due
    return most

"""The data-parallel builder: one stage, any placement of states, any number of micro-batches.

For every unit of micro-batches: forward through the blocks, backward through them in reverse, each
gradient reduced as soon as the unit has passed its block. Gathers are issued `prefetch` visits ahead of the
first one they serve (terrace.plan.residency). In the last unit each block is synchronised right after its
last reduction, so that the outer tiers work while inner blocks still compute. Then the global norm, and
block by block, in forward order, update and refresh: the next step can start on block 0 while later
blocks are still being refreshed.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from terrace.base.errors import PlanError
from terrace.cluster import Cluster
from terrace.model.spec import BlockSpec
from terrace.plan import Plan, validate
from terrace.plan.grid import Grid
from terrace.plan.layout import DEVICE
from terrace.plan.residency import Residency, residencies, step_visits
from terrace.plan.slices import slice_blocks
from terrace.program.instruction import Instruction, Op
from terrace.program.program import Program

_LARGEST_STEP = 2_000_000  # a program is a list: what one process builds in seconds


def build(cluster: Cluster, plan: Plan, blocks: Sequence[BlockSpec], num_micros: int, sequence: int = 0) -> Program:
    """Return the program of every rank for a step of `num_micros` micro-batches of sequences of `sequence` tokens.

    `blocks` is the whole model; the program's are what one tensor rank holds of it. Raises `PlanError` when the plan
    cannot run. Cost and size do not depend on the world size.
    """
    layout = validate(cluster, plan, blocks)
    if num_micros < 1:
        raise PlanError(f"num_micros = {num_micros}: a step has at least one micro-batch")
    if num_micros * len(blocks) > _LARGEST_STEP:
        raise PlanError(
            f"{num_micros} micro-batches of {len(blocks)} blocks on a rank are more than the {_LARGEST_STEP:,} passes "
            "that a program may have: give a smaller batch or a larger plan.micro_batch"
        )
    frame = Program(
        cluster=cluster,
        plan=plan,
        layout=layout,
        blocks=slice_blocks(blocks, Grid.of(cluster, plan)),
        num_micros=num_micros,
        instructions=(),
        sequence=sequence,
    )
    if frame.tensor.degree > 1 and sequence < 1:
        raise PlanError("a plan with a tensor axis needs the length of a sequence: its messages are activations")
    return replace(frame, instructions=(*_passes(frame), *_updates(blocks)))


def _passes(frame: Program) -> Iterator[Instruction]:
    layout, plan, blocks, num_micros = frame.layout, frame.plan, frame.blocks, frame.num_micros
    stays = residencies(blocks, num_micros, plan.unit, plan.prefetch) if layout.params != DEVICE else []
    issued, freed = defaultdict(list), defaultdict(list)
    for stay in stays:
        issued[stay.issue].append(stay)
        freed[stay.last].append(stay)
    for position, visit in enumerate(step_visits(len(blocks), num_micros, plan.unit)):
        yield from (_gather(frame, stay) for stay in issued[position])
        op = Op.BACKWARD if visit.backward else Op.FORWARD
        yield from (Instruction(op, visit.block, micro) for micro in visit.micros)
        if visit.backward and blocks[visit.block].num_trainable:
            yield Instruction(Op.REDUCE, visit.block, visit.micros[-1])
            if visit.micros[-1] == num_micros - 1:
                yield Instruction(Op.SYNC, visit.block)
        yield from (Instruction(Op.FREE, stay.block) for stay in freed[position])


def _gather(frame: Program, stay: Residency) -> Instruction:
    secondary = frame.has_secondary and not stay.opening
    return Instruction(Op.GATHER, stay.block, backward=stay.backward, secondary=secondary)


def _updates(blocks: Sequence[BlockSpec]) -> Iterator[Instruction]:
    yield Instruction(Op.CLIP)
    for index, block in enumerate(blocks):
        if block.num_trainable:
            yield Instruction(Op.UPDATE, index)
            yield Instruction(Op.REFRESH, index)

"""Example transfers for every route of a plan's messages, from which process groups are created."""

from collections.abc import Iterator

from terrace.plan.in_block_messages import Leg
from terrace.plan.outer import Exchange
from terrace.plan.wire import ROUTES
from terrace.program.message import Transfer
from terrace.program.program import Program
from terrace.program.resolve import block_message, control_message, counts_message, line_transfer, outer_numbers_message


def transfers_of(program: Program) -> Iterator[Transfer]:
    """One transfer for every route that the plan's messages take on any stage; equal on all ranks."""
    plan, blocks, stage, world = program.plan, program.blocks, program.model.stage_layout, program.model.world_layout
    for first in dict.fromkeys(program.model.alike):
        for message_class in ROUTES:
            yield from block_message(message_class, stage, plan, program.model.flats[first]).transfers
    # Calibration measures the first in a pipeline too, where CLIP is among all stages.
    for ranks in (stage, world):
        for inside in (True, False):
            yield from control_message(stage, ranks, plan, blocks, inside=inside).transfers
    yield from counts_message(stage, plan, blocks).transfers
    every = Exchange(starts=tuple(range(plan.outer.fragments)))
    if every.starts:
        yield from outer_numbers_message(world, plan, blocks, every).transfers
    for line in program.model.tensor.lines_of(blocks):
        yield line_transfer(line, plan, Leg.GATHER, line.degree)
    yield from program.model.routed.transfers

"""Activation bytes of every block of a plan, and when a program's passes hold them.

A forward keeps tensors of a micro-batch until the block's backward, or until its input-gradient half, which leaves some
of them and new gradients for the weight-gradient half. While a pass runs, the block has working memory on top.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from terrace.model.spec import BlockSpec
from terrace.plan.boundaries import leaving
from terrace.plan.plan import Plan
from terrace.plan.recompute import recomputed_parts
from terrace.program.instruction import PASSES, Instruction, Op
from terrace.simulate.activations import activations_of, recomputing
from terrace.simulate.block_tape import Backend
from terrace.simulate.work import Work

if TYPE_CHECKING:
    from terrace.program.program import Program


class Held(NamedTuple):
    """Activation bytes of a block for one micro-batch.

    `kept` lives from the forward to the end of the backward (or of its input-gradient half), `due` from there to the
    end of the weight-gradient half. The others live while a pass runs, beside `kept`: a backward, its first half, a
    forward.
    """

    kept: int
    due: int
    on_top: int
    halved_on_top: int
    forward_on_top: int = 0
    left: int = 0  # of `kept`, the input, if it leaves the device


class Change(NamedTuple):
    """A change of activation bytes at the start of the instruction at `position`, or at its end."""

    position: int
    at_end: bool
    num_bytes: int


def activations_by_block(work: Work, plan: Plan, blocks: Sequence[BlockSpec], backend: Backend) -> list[Held]:
    """Activation bytes of every block for one micro-batch; the plan's patterns decide which blocks are recomputed."""
    # The plan's patterns decide per block, so `work` itself recomputes nothing.
    work = replace(work, expert_chunks=plan.num_chunks)
    found, gone = [], leaving(plan.keep, blocks)
    for number, (parts, spec) in enumerate(zip(recomputed_parts(plan.recompute, blocks), blocks, strict=True)):
        block = activations_of(recomputing(work, parts), spec, backend)
        peaks = block.backward_peak_bytes, block.halved_peak_bytes, block.forward_peak_bytes
        backward, halved, forward = (max(0, peak - block.kept_bytes) for peak in peaks)
        left = block.input_bytes if number in gone else 0
        found.append(Held(block.kept_bytes, block.due_bytes, backward, halved, forward, left))
    return found


def activation_changes(instructions: Iterable[Instruction], by_block: Sequence[Held]) -> Iterator[Change]:
    """All changes of a rank's activation bytes, in order.

    An input that leaves is there until the next EVICT, which waits for its write, or until its own FETCH.
    """
    newest = (-1, -1)  # block and micro-batch of the input that was evicted last, if it is there
    for position, (op, block, micro, *_) in enumerate(instructions):
        if op is Op.EVICT or (op is Op.FETCH and newest == (block, micro)):
            yield Change(position, False, -by_block[newest[0]].left if newest[0] >= 0 else 0)
            newest = (block, micro) if op is Op.EVICT else (-1, -1)
        if op is Op.FETCH:
            yield Change(position, False, by_block[block].left)
        if op not in PASSES:
            continue
        held = by_block[block]
        match op:
            case Op.FORWARD:
                # What a forward keeps is there while it runs.
                yield Change(position, False, held.kept)
                working, left = held.forward_on_top, 0
            case Op.BACKWARD:
                working, left = held.on_top, -held.kept
            case Op.BACKWARD_INPUT:
                working, left = held.halved_on_top, held.due - held.kept
            case _:
                working, left = 0, -held.due
        yield Change(position, False, working)
        yield Change(position, True, left - working)


def activation_bytes(program: "Program", by_block: Sequence[Held]) -> int:
    """Peak activation bytes of a rank, including the running block's working memory."""
    now = most = 0
    # A peak does not grow with repetitions.
    for change in activation_changes(program.short.instructions, by_block):
        now += change.num_bytes
        most = max(most, now)
    return most

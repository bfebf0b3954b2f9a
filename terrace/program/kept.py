"""What a program reads from below the device and writes there: groups of states in order, bytes of instructions."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from terrace.plan.boundaries import input_bytes
from terrace.plan.keep import MOMENTUM
from terrace.plan.kept import NO_TRAFFIC, Group, Traffic, grads_bytes, groups, params_bytes, pieces, traffic
from terrace.plan.kept import resting_bytes as all_resting_bytes
from terrace.plan.kept_rows import RowBytes, expected_rows, row_pages
from terrace.plan.wire import MessageClass
from terrace.program.instruction import Instruction, Op

if TYPE_CHECKING:
    from terrace.program.sharded_model import ShardedModel

_CLASSES = (MessageClass.KEEP_READ, MessageClass.KEEP_WRITE)
_PASSING = {Op.ORTHOGONALISE: True, Op.UPDATE: False}  # ops that pass states, and whether it is the momentum


class Passing(NamedTuple):
    """A group that passes through the device: the flat buffer `flat` of a block."""

    block: int
    flat: int
    group: Group


def passing(model: "ShardedModel", step: Iterable[Instruction]) -> Iterator[Passing]:
    """The groups below of a training step of these distinct instructions, in the order in which they are updated."""
    for instruction in step if model.plan.keep.optimizer_below else ():
        if instruction.op in _PASSING:
            for index, flat in enumerate(model.flats[instruction.block]):
                for group in groups(model.plan, flat):
                    if (group.name == MOMENTUM) == _PASSING[instruction.op]:
                        yield Passing(instruction.block, index, group)


def passed(model: "ShardedModel", instruction: Instruction) -> Traffic:
    if instruction.op not in _PASSING:
        return NO_TRAFFIC
    return traffic(model.plan, model.flats[instruction.block], orthogonalises=_PASSING[instruction.op])


def num_pieces(model: "ShardedModel", step: Iterable[Instruction]) -> int:
    """Pieces that pass in a training step of these distinct instructions."""
    return sum(len(pieces(model.plan, each.group)) for each in passing(model, step)) * model.plan.keep.states_pass


def moved(model: "ShardedModel", instruction: Instruction) -> tuple[int, int]:
    """Bytes of working parameters that an instruction reads from below the device, and that it writes there.

    A GATHER reads those of its block, and a REFRESH writes those that were updated.
    """
    op, keep = instruction.op, model.plan.keep
    if not keep.params_below or op not in (Op.GATHER, Op.REFRESH):
        return 0, 0
    found = params_bytes(model.plan, model.flats[instruction.block], trained=op is Op.REFRESH)
    return (found, 0) if op is Op.GATHER else (0, found)


def gradients(model: "ShardedModel", instruction: Instruction) -> tuple[int, int]:
    """Bytes of gradients that an instruction reads from below the device, and that it writes there.

    They are written behind a SYNC. What is read ahead of an ORTHOGONALISE counts as read by the UPDATE of its block. An
    UPDATE on the host's cores reads as much: the new parameters, in the place of their gradients.
    """
    if not model.plan.keep.grads_below or instruction.op not in (Op.SYNC, Op.UPDATE):
        return 0, 0
    found = grads_bytes(model.plan, model.flats[instruction.block])
    return (found, 0) if instruction.op is Op.UPDATE else (0, found)


def inputs(model: "ShardedModel", instruction: Instruction) -> tuple[int, int]:
    """Bytes of a block's input that an instruction reads from below the device, and that it writes there."""
    if instruction.op not in (Op.EVICT, Op.FETCH):
        return 0, 0
    found = input_bytes(model.plan, model.input_numel)
    return (found, 0) if instruction.op is Op.FETCH else (0, found)


def kept_bytes(model: "ShardedModel", counts: Mapping[Instruction, int]) -> dict[tuple[MessageClass, str], int]:
    """Bytes that instructions read from media below the device and write to them, by message class and medium."""
    keep, found = model.plan.keep, Counter[tuple[MessageClass, str]]()
    for instruction, times in counts.items() if keep.is_below else ():
        read, written = moved(model, instruction)
        if _restores(instruction, counts):
            read += written
        of_states = passed(model, instruction).num_bytes
        wholes = (read, written), gradients(model, instruction), inputs(model, instruction)
        for message, *each in zip(_CLASSES, *wholes, strict=True):
            for medium, size in zip((keep.params, keep.grads, keep.activations), each, strict=True):
                found[message, medium] += times * size
            found[message, keep.optimizer] += times * of_states
    for block in {each.block for each in counts if each.op is Op.FORWARD} if keep.table_below else ():
        rows = rows_of(model, counts, block)
        for message, size in (
            (MessageClass.ROW_READ, rows.looked_up + rows.read),
            (MessageClass.ROW_WRITE, rows.written),
        ):
            found[message, keep.table] += size
    return {key: size for key, size in found.items() if size}


def rows_of(model: "ShardedModel", counts: Mapping[Instruction, int], block: int) -> RowBytes:
    """Mean bytes of the rows below the device that a block's look-ups and its update move."""
    num_micros = sum(times for each, times in counts.items() if each.op is Op.FORWARD and each.block == block)
    updates, look_ups = Instruction(Op.UPDATE, block) in counts, model.routed.look_ups(block)
    return expected_rows(model.plan, model.flats[block], look_ups, num_micros, updates=updates)


def _restores(instruction: Instruction, counts: Mapping[Instruction, int]) -> bool:
    # Without an UPDATE the working copy is not on the device, so a REFRESH reads it: its message has the other parts.
    return instruction.op is Op.REFRESH and Instruction(Op.UPDATE, instruction.block) not in counts


def resting_bytes(model: "ShardedModel", held: Sequence[int], num_inputs: int) -> dict[str, int]:
    """Bytes that a rank keeps on each medium below its device for the blocks that it holds, and inputs of blocks."""
    found = all_resting_bytes(model.plan, [model.flats[block] for block in held])
    for block in held:
        for flat in model.flats[block]:
            for rows in row_pages(model.plan, flat):
                found[rows.medium] += rows.num_bytes
    if num_inputs:
        found[model.plan.keep.activations] += num_inputs * input_bytes(model.plan, model.input_numel)
    return found

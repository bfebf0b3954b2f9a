"""Buffers: the named memory of a rank's model state, each with its size and its lifetimes within the step.

    category     buffer                                           allocated
    params       a rank's slice of the working copy of a block    the whole step; if it is kept below (plan.keep),
                                                                  from its UPDATE to the second UPDATE after it
    secondary    its slice of the secondary copy (ZeRO++)         the whole step
    gathered     the full parameters of a block                   from each GATHER to its FREE
    grads        its slice of the accumulated gradient            the whole step; if it is kept below, from its
                                                                  backward to the first or second backward after it,
                                                                  and around its UPDATE
    grads_full   the gradient of a block before its reduction     from a backward to the wait for its REDUCE
    optimizer    moments, and the master copy if it is separate   the whole step
    outer        of islands: anchor, momentum, and the slices     the whole step
                 of an exchange in flight
    feedback     residuals of error feedback                      the whole step
    buffers      the message memory of a lane                     the whole step, as large as its largest message
                 the ring of states kept below (plan.keep)        the whole step
                 momentum or gradient of a layer's whole matrices from ORTHOGONALISE to UPDATE
                 the gradient of a block from another stage       during TIE

A temporary buffer has one span per lifetime, so the number of buffers does not grow with micro-batches. `peak_bytes`
walks over them; tests check it against closed formulas.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from terrace.base.alike import once_each
from terrace.plan.boundaries import passing_bytes
from terrace.plan.edges import edge_feedback_bytes
from terrace.plan.flats import FlatParamSpec, gathered_bytes
from terrace.plan.keep import MOST_UPDATED, MOST_WRITTEN
from terrace.plan.kept import gradient_bytes, is_final_at_once, ring_bytes, working_bytes
from terrace.plan.stage import Stage
from terrace.plan.state_bytes import CATEGORIES, accumulates_in_place, blocks_bytes, tie_bytes
from terrace.plan.wire import FORMATS
from terrace.program.instruction import PASSES, Instruction, Op
from terrace.program.message import Message

if TYPE_CHECKING:
    from terrace.program.sharded_model import ShardedModel


class Lifetime(NamedTuple):
    """One lifetime of a buffer, in positions of instructions.

    The instruction at `first` allocates the memory, and the one at `last` uses it last. The instruction at `freed`
    waits for that use and finds the memory free.
    """

    first: int
    last: int
    freed: int


@dataclass(frozen=True, slots=True)
class Buffer:
    """Named memory of one rank. A buffer without `spans` is allocated for the whole step."""

    name: str
    category: str
    num_bytes: int
    spans: tuple[Lifetime, ...] = ()


def peak_bytes(buffers: Iterable[Buffer]) -> dict[str, int]:
    """Peak bytes of each category. Categories need not peak at the same time."""
    # Categories are summed separately: each has its own row in reports.
    peaks = dict.fromkeys(CATEGORIES, 0)
    changes: dict[str, dict[int, int]] = {}
    for buffer in buffers:
        if not buffer.spans:
            peaks[buffer.category] += buffer.num_bytes
            continue
        of_category = changes.setdefault(buffer.category, defaultdict(int))
        for span in buffer.spans:
            of_category[span.first] += buffer.num_bytes
            # A buffer is freed before the instruction at that position allocates, so equal positions cancel.
            of_category[span.freed] -= buffer.num_bytes
    for category, of_category in changes.items():
        # Sweep over positions in order: the running sum is the memory in use.
        now = most = 0
        for position in sorted(of_category):
            now += of_category[position]
            most = max(most, now)
        peaks[category] += most
    return peaks


def state_buffers(
    model: "ShardedModel", stage: Stage, instructions: Sequence[Instruction], messages: Iterable[Message]
) -> tuple[Buffer, ...]:
    """Model-state buffers of a rank that runs `instructions` and sends the distinct `messages`."""
    messages = tuple(messages)
    return (
        *_slices(model, stage),
        *_residuals(messages),
        *_lanes(messages),
        *_ring(model, stage),
        *_visiting(model, instructions),
        *_updated(model, instructions),
        *_accumulated(model, instructions),
        *_gradients(model, instructions),
    )


def _slices(model: "ShardedModel", stage: Stage) -> Iterator[Buffer]:
    sizes = blocks_bytes(model.plan, [model.flats[index] for index in stage.held])
    for index, of_block in zip(stage.held, sizes, strict=True):
        for category, num_bytes in of_block.items():
            yield Buffer(f"{category} of {model.blocks[index].name}", category, num_bytes)


def _residuals(messages: Iterable[Message]) -> Iterator[Buffer]:
    # Residuals of block messages are counted in `_slices`.
    for message in messages:
        if message.fed_back:
            name = f"feedback of a {message.message_class} message"
            yield Buffer(name, "feedback", edge_feedback_bytes(message.fed_back))


def _lanes(messages: Iterable[Message]) -> Iterator[Buffer]:
    largest: dict[int, int] = {}
    for message in messages:
        for lane, size in message.arenas.items():
            largest[lane] = max(largest.get(lane, 0), size)
    # A lane runs one message at a time, so all its messages share one arena as large as the largest of them.
    yield from (Buffer(f"messages on lane {lane}", "buffers", size) for lane, size in largest.items() if size)


def _ring(model: "ShardedModel", stage: Stage) -> Iterator[Buffer]:
    size = ring_bytes(model.plan, [model.flats[block] for block in stage.held])
    if size:
        yield Buffer("ring of states kept below", "buffers", size)
    if model.leaving.intersection(stage.own):
        size = passing_bytes(model.plan, model.input_numel)
        yield Buffer("ring of inputs kept below", "buffers", size)


_TAKES = {Op.GATHER: "gathered", Op.ORTHOGONALISE: "buffers", Op.TIE: "buffers"}
_GIVES = {Op.FREE: Op.GATHER, Op.UPDATE: Op.ORTHOGONALISE}


def _visiting(model: "ShardedModel", instructions: Sequence[Instruction]) -> Iterator[Buffer]:
    plan, blocks, flats = model.plan, model.blocks, model.flats
    item = FORMATS[plan.compute].element_bytes
    # (allocating op, block) -> position, until the op that frees it.
    taken: dict[tuple[Op, int], int] = {}
    spans: dict[tuple[Op, int], list[Lifetime]] = defaultdict(list)
    for position, (op, block, *_) in enumerate(instructions):
        # A TIE's receive buffer lives only during its own instruction.
        if op is Op.TIE:
            spans[op, block].append(Lifetime(position, position, position + 1))
        elif op in _TAKES:
            taken[op, block] = position
        # UPDATE can occur without ORTHOGONALISE.
        elif op in _GIVES and (_GIVES[op], block) in taken:
            first = taken.pop((_GIVES[op], block))
            spans[_GIVES[op], block].append(Lifetime(first, position, position))
    for (op, block), position in taken.items():  # never freed: a whole secondary copy, of size 0 here
        spans[op, block].append(Lifetime(position, len(instructions), len(instructions)))
    for (op, block), lives in spans.items():
        parts, name = flats[block], blocks[block].name
        if op is Op.GATHER:
            size = gathered_bytes(plan, parts)
        elif op is Op.TIE:  # one flat buffer after the other
            size = max((tie_bytes([flat], plan.sums) for flat in parts), default=0)
        else:
            size = sum(flat.gathered_numel for flat in parts) * item
        yield Buffer(f"{op.value} of {name}", _TAKES[op], size, tuple(lives))


def _updated(model: "ShardedModel", instructions: Sequence[Instruction]) -> Iterator[Buffer]:
    """Working copies that are kept below the device: one is written while the next is updated."""
    opened: dict[int, int] = {}  # block -> position of its UPDATE, for those on the device, the oldest first
    for position, (op, block, *_) in enumerate(instructions if model.plan.keep.params_below else ()):
        if op not in (Op.UPDATE, Op.REFRESH) or block in opened or not working_bytes(model.plan, model.flats[block]):
            continue
        if len(opened) == MOST_UPDATED:
            oldest = next(iter(opened))
            yield _working(model, oldest, opened.pop(oldest), position)
        opened[block] = position
    for block, first in opened.items():
        yield _working(model, block, first, len(instructions))


def _working(model: "ShardedModel", block: int, first: int, last: int) -> Buffer:
    name, size = model.blocks[block].name, working_bytes(model.plan, model.flats[block])
    return Buffer(f"updated parameters of {name}", "params", size, (Lifetime(first, last, last),))


def _accumulated(model: "ShardedModel", instructions: Sequence[Instruction]) -> Iterator[Buffer]:
    """Accumulated gradients kept below the device: one is written, or read, while another is computed, or used."""
    if not model.plan.keep.grads_below:
        return
    sizes = [gradient_bytes(model.plan, flats) for flats in model.flats]
    opened, lives = dict[int, int](), defaultdict[int, list[Lifetime]](list)
    complete, written = list[int](), list[int]()  # blocks being reduced, and blocks being written

    def leave(block: int, last: int, freed: int) -> None:
        lives[block].append(Lifetime(opened.pop(block), last, freed))

    def settle(num_complete: int, num_written: int, position: int) -> None:
        while len(complete) > num_complete:
            written.append(complete.pop(0))
        while len(written) > num_written:
            leave(written.pop(0), position, position)

    # The host's cores read them where they are.
    updates = () if model.plan.keep.updates_on_host else (Op.ORTHOGONALISE, Op.UPDATE)
    used = (each.block for each in instructions if each.op in updates)
    ahead = [block for block in dict.fromkeys(used) if sizes[block]]
    taken = set[int]()
    for position, (op, block, *_) in enumerate(instructions):
        if op in PASSES and op is not Op.FORWARD:
            for needed in (block, *model.blocks[block].tied_to):
                if sizes[needed] and needed not in opened:
                    settle(MOST_WRITTEN, MOST_WRITTEN, position)
                    opened[needed] = position
        elif op is Op.SYNC and sizes[block]:
            complete.append(block)
            if is_final_at_once(model.flats[block]) or model.plan.keep.layer_wise:
                settle(0, len(written) + len(complete), position)
        elif op is Op.CLIP:
            settle(0, 0, position)
        # The gradients of the next block are read while those of this one are used.
        begins = op in updates and sizes[block] and block not in taken
        if op is Op.CLIP or begins:
            taken.add(block)
            if ahead:
                opened[ahead.pop(0)] = position
        if op in updates and op is Op.UPDATE and sizes[block]:
            leave(block, position, position + 1)
    for block, spans in lives.items():
        yield Buffer(f"accumulated gradient of {model.blocks[block].name}", "grads", sizes[block], tuple(spans))


def _gradients(model: "ShardedModel", instructions: Sequence[Instruction]) -> Iterator[Buffer]:
    plan, blocks, flats = model.plan, model.blocks, model.flats
    # Only gradients that autograd cannot add into the accumulated shard need a separate buffer.
    item = FORMATS[plan.compute].element_bytes

    def whole_bytes(parts: Sequence[FlatParamSpec]) -> int:
        whole = (flat for flat in parts if flat.trainable and not accumulates_in_place(flat.layout))
        return sum(flat.padded for flat in whole) * item

    sizes = once_each(whole_bytes, flats)
    # All gradients accumulate in place.
    if not any(sizes):
        return
    opened: dict[int, int] = {}
    reducing: list[tuple[int, int, int]] = []  # block, first, last
    spans: dict[int, list[Lifetime]] = defaultdict(list)

    # Reductions on a lane finish in the order of issue, so a wait frees the oldest first.
    def wait(num_left: int, position: int) -> None:
        while len(reducing) > num_left:
            block, first, last = reducing.pop(0)
            spans[block].append(Lifetime(first, last, position))

    for position, (op, block, *_) in enumerate(instructions):
        if op in PASSES and op is not Op.FORWARD:
            # A backward also adds to the gradients of the blocks it is tied to, such as a tied embedding.
            for needed in (block, *blocks[block].tied_to):
                # One reduction may stay in flight while the next gradient is computed; a second would need a third
                # buffer.
                if sizes[needed] and needed not in opened:
                    wait(1, position)
                    opened[needed] = position
        elif op is Op.REDUCE and block in opened:
            reducing.append((block, opened.pop(block), position))
        # TIE and CLIP read accumulated gradients, so no reduction may be in flight.
        elif op in (Op.TIE, Op.CLIP):
            wait(0, position)
    wait(0, len(instructions))
    for block, first in opened.items():  # never reduced
        spans[block].append(Lifetime(first, len(instructions), len(instructions)))
    for block, lives in spans.items():
        yield Buffer(f"gradient of {blocks[block].name}", "grads_full", sizes[block], tuple(lives))

"""The passes of a stage as instructions: groups of micro-batches, with the messages that they need and produce.

For the order inside a task see terrace.program.lowering. Messages between two ranks arrive in the order of sending, so
their RECVs have the same order.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from terrace.plan.counts import counted
from terrace.plan.residency import Residency, gathers
from terrace.plan.stage import Pass, Stage, reduction_points
from terrace.program.boundaries import fetched_ahead, with_boundaries
from terrace.program.gaps import before_gaps, may_be_in_gaps
from terrace.program.instruction import Instruction, Op
from terrace.program.segments import Writer

if TYPE_CHECKING:
    from terrace.program.program import Program

_OPS = {
    Pass.FORWARD: Op.FORWARD,
    Pass.BACKWARD: Op.BACKWARD,
    Pass.BACKWARD_INPUT: Op.BACKWARD_INPUT,
    Pass.BACKWARD_WEIGHT: Op.BACKWARD_WEIGHT,
}


def write_passes(program: "Program", stages: Sequence[Stage]) -> Writer:
    """Write the instructions of all groups of `program.stage`, one of `stages`, without the end of the step."""
    stage, found = program.stage, Writer()
    stays = gathers(stage, program.blocks, program.model.flats, program.plan.prefetch)
    issued, freed = defaultdict[int, tuple[Instruction, ...]](tuple), defaultdict[int, tuple[Instruction, ...]](tuple)
    for stay in stays:
        issued[stay.issue] += (_gather(program, stay),)
        if program.model.frees(stay.block):
            freed[stay.last] += (Instruction(Op.FREE, stay.block),)
    received, reduced = _received(found, stage, stages), _reduced(program)
    leaving = program.model.leaving if program.trains else frozenset[int]()
    fetched = fetched_ahead(stage, leaving)
    fetches = {block: found.body(Instruction(Op.FETCH, block, 0)) for block in sorted(leaving)}
    sends = {key: None if edge is None else found.body(_send(edge)) for key, edge in _edges(stage, _sent).items()}
    bodies, order = dict[tuple[object, ...], int](), found.order
    # Three counters: visits of blocks (gathers), passes (reductions) and tasks (receives).
    visit = number = task = 0
    counts = program.trains and bool(counted(program.blocks, stage.own))
    forwards_left = sum(group.pass_ is Pass.FORWARD for group in stage.groups)
    for group in stage.groups:
        pass_, chunk, micros = group
        blocks, sent = stage.traversal(group), sends[pass_, chunk]
        size = len(blocks)
        # Weight gradients read activations and output gradients only, so their passes need no parameters.
        reads, finishes = pass_ is not Pass.BACKWARD_WEIGHT, pass_.finishes
        for micro in micros:
            order += received.get(task, ())
            if task in fetched:
                order += [(fetches[block], of) for block, of in fetched[task]]
            task += 1
            # All micro-batches of a group share one gather: issued with the first, freed after the last.
            key = (
                pass_,
                chunk,
                _at(issued, visit, size) if stays and reads and micro == micros[0] else None,
                _at(reduced, number, size) if finishes else None,
                _at(freed, visit, size) if stays and reads and micro == micros[-1] else None,
            )
            body = bodies.get(key)
            if body is None:
                body = bodies[key] = found.body(*_body(blocks, leaving, *key))
            order.append((body, micro))
            number += size
            if sent is not None:
                order.append((sent, micro))
        visit += size if reads else 0
        forwards_left -= pass_ is Pass.FORWARD
        # As soon as all tokens are routed, so that the remaining backwards hide the message.
        if counts and pass_ is Pass.FORWARD and not forwards_left:
            order.append((found.body(Instruction(Op.COUNT)), -1))
    return found


_UPDATES = (Op.AGREE, Op.UPDATE, Op.REFRESH)  # in the backward: full parameters are freed first
_Extra = tuple[tuple[Instruction, ...] | None, ...] | None  # instructions at each pass of a body


def _at(found: Mapping[int, tuple[Instruction, ...]], first: int, size: int) -> _Extra:
    return tuple(map(found.get, range(first, first + size)))


def _body(
    blocks: Sequence[int],
    leaving: Collection[int],
    pass_: Pass,
    chunk: int,
    issued: _Extra,
    reduced: _Extra,
    freed: _Extra,
) -> Iterator[Instruction]:
    passes, none = [Instruction(_OPS[pass_], block, 0) for block in blocks], (None,) * len(blocks)
    each = with_boundaries(passes, leaving) if leaving else [(now,) for now in passes]
    for own, before, after, last in zip(each, issued or none, reduced or none, freed or none, strict=True):
        yield from before or ()
        yield from own
        yield from (now for now in after or () if now.op not in _UPDATES)
        yield from last or ()
        yield from (now for now in after or () if now.op in _UPDATES)


def _send(edge: "_Edge") -> Instruction:
    return Instruction(Op.SEND, edge.block, 0, edge.backward, False, edge.peer)


def _gather(program: "Program", stay: Residency) -> Instruction:
    # The first gather of a step reads the primary copy and refreshes the secondary one.
    secondary = program.has_secondary and not stay.opening
    return Instruction(Op.GATHER, stay.block, backward=stay.backward, secondary=secondary)


def _reduced(program: "Program") -> dict[int, tuple[Instruction, ...]]:
    """Index of a pass -> reductions after it."""
    stage, blocks = program.stage, program.blocks
    tied, gaps = dict(stage.ties), before_gaps(program.model, stage)
    found: dict[int, tuple[Instruction, ...]] = {}
    for block, numbers in reduction_points(stage, blocks, program.plan.unit).items():
        # A frozen block has no gradient to reduce.
        if blocks[block].num_trainable:
            parts = {op: may_be_in_gaps(program.model, op, block) for op in (Op.REDUCE, Op.SYNC)}
            whole, in_gaps = ((Instruction(Op.REDUCE, block, 0, in_gaps=each),) for each in (False, parts[Op.REDUCE]))
            for number in numbers:
                reduction = in_gaps if number in gaps else whole
                found[number] = _at_once(found[number]) + reduction if number in found else reduction
            # The SYNC of a tied block waits for its TIE at the end of the step.
            if block not in tied:
                found[numbers[-1]] += (Instruction(Op.SYNC, block, in_gaps=parts[Op.SYNC] and numbers[-1] in gaps),)
                if program.plan.keep.layer_wise:
                    found[numbers[-1]] += tuple(Instruction(op, block) for op in _UPDATES)
    return found


def _at_once(instructions: tuple[Instruction, ...]) -> tuple[Instruction, ...]:
    # If two gradients follow one pass, the first must be sent before the next is opened: there are two buffers.
    return tuple(each._replace(in_gaps=False) for each in instructions)


class _Edge(NamedTuple):
    """A message that a group sends to or receives from another stage: a block's output or its input gradient."""

    peer: int
    block: int
    backward: bool


def _sent(stage: Stage, pass_: Pass, chunk: int) -> _Edge | None:
    blocks, backward = stage.chunks[chunk], pass_ is not Pass.FORWARD
    peer = (stage.back if backward else stage.onward)[chunk]
    # The input gradient leaves after BACKWARD_INPUT; the weight half produces nothing for other stages.
    if peer is None or pass_ is Pass.BACKWARD_WEIGHT:
        return None
    return _Edge(peer, blocks[0] if backward else blocks[-1], backward)


def _read(stage: Stage, pass_: Pass, chunk: int) -> _Edge | None:
    blocks, backward = stage.chunks[chunk], pass_ is not Pass.FORWARD
    peer = (stage.onward if backward else stage.back)[chunk]
    if peer is None or pass_ is Pass.BACKWARD_WEIGHT:
        return None
    return _Edge(peer, blocks[-1] + 1 if backward else blocks[0] - 1, backward)


def _edges(stage: Stage, edge: Callable[[Stage, Pass, int], _Edge | None]) -> dict[tuple[Pass, int], _Edge | None]:
    return {(pass_, chunk): edge(stage, pass_, chunk) for pass_ in Pass for chunk in range(len(stage.chunks))}


def _received(found: Writer, stage: Stage, stages: Sequence[Stage]) -> dict[int, list[tuple[int, int]]]:
    """Index of a task -> RECVs before it, as (body, micro-batch)."""
    needed: dict[_Edge, dict[int, int]] = defaultdict(dict)  # the task that reads each message
    edges, num_tasks = _edges(stage, _read), 0
    for group in stage.groups:
        edge = edges[group.pass_, group.chunk]
        if edge is not None:
            needed[edge].update(zip(group.micros, count(num_tasks)))
        num_tasks += len(group.micros)
    bodies = {edge: found.body(Instruction(Op.RECV, edge.block, 0, edge.backward, False, edge.peer)) for edge in needed}
    before: dict[int, list[tuple[int, int]]] = defaultdict(list)
    # Each peer is a separate channel: order matters only between two ranks.
    for peer in {each for each in (*stage.onward, *stage.back) if each is not None}:
        # Walking backwards, a RECV may move earlier than one task ahead, so that no later message overtakes it.
        latest = num_tasks
        for edge, micros in reversed(_channel(stages[peer], stage.index)):
            tasks, body = needed[edge], bodies[edge]
            for micro in reversed(micros):
                task = tasks[micro]
                if task <= latest:
                    latest = task - 1 if task else 0
                before[latest].append((body, micro))
    return {task: received[::-1] for task, received in before.items()}


def _channel(sender: Stage, receiver: int) -> list[tuple[_Edge, Sequence[int]]]:
    sent = {key: edge for key, edge in _edges(sender, _sent).items() if edge is not None and edge.peer == receiver}
    edges = {key: edge._replace(peer=sender.index) for key, edge in sent.items()}
    return [(edges[key], micros) for pass_, chunk, micros in sender.groups if (key := (pass_, chunk)) in edges]

"""Lowering: from a plan to the instructions of a stage.

Groups of micro-batches pass the chunks of a stage (terrace.plan.stage) in the order of its schedule, each task as

    RECV        its input, if another stage makes it; issued one task ahead
    GATHER      `prefetch` visits before the first block that reads it (terrace.plan.residency)
    FORWARD, BACKWARD, or one half of a backward, of each block
    FREE        after the last visit that reads it
    REDUCE      once per unit of micro-batches, when its gradient is complete
    SYNC        right after the last REDUCE of a block, so that the outer tiers work while other blocks still compute
    SEND        the result, if another stage reads it

A plan without a pipeline is one stage with one chunk per block: every unit of micro-batches goes forward
through the blocks, then backward through them in reverse. After all passes come TIE and SYNC of the blocks that two
stages hold: the last stage would otherwise wait for the first in the middle of the step. Then the global norm, and
block by block, in forward order, update (under Muon with an ORTHOGONALISE one layer ahead) and refresh: the next step
can start on block 0 while later blocks are still being refreshed.

Messages between two ranks arrive in the order sent, so the RECV of a message precedes the RECV of every later one.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, pairwise
from typing import NamedTuple

from terrace.base.errors import PlanError
from terrace.cluster.cluster import Cluster
from terrace.model.spec import BlockSpec
from terrace.plan.context import is_context_parallel
from terrace.plan.flats import orthogonalised
from terrace.plan.mesh import Mesh, no_sequence
from terrace.plan.plan import Plan
from terrace.plan.residency import Residency, gathers
from terrace.plan.slices import slice_blocks
from terrace.plan.stage import Pass, Stage, forward_stage, idle_stage, reduction_points, whole_stage
from terrace.plan.state_bytes import blocks_bytes
from terrace.plan.validate import validate
from terrace.program.instruction import Instruction, Op
from terrace.program.phase import Phase
from terrace.program.program import Program
from terrace.program.repeating import joined, repeating
from terrace.program.schedules.orders import Orders
from terrace.program.segments import Writer
from terrace.program.stages import make_stages, period

# Micro-batches times blocks. Shorter steps are lists; a longer one is looked through for what repeats in it.
_LONG_STEP = 10_000
_LARGEST_STEP = 2_000_000  # of a step in which nothing repeats: one process builds such a list in seconds

_OPS = {
    Pass.FORWARD: Op.FORWARD,
    Pass.BACKWARD: Op.BACKWARD,
    Pass.BACKWARD_INPUT: Op.BACKWARD_INPUT,
    Pass.BACKWARD_WEIGHT: Op.BACKWARD_WEIGHT,
}


def build(
    cluster: Cluster,
    plan: Plan,
    blocks: Sequence[BlockSpec],
    num_micros: int,
    sequence: int = 0,
    stage: int = 0,
    orders: Orders | None = None,
) -> Program:
    """Program of every rank of a stage for a step of `num_micros` micro-batches.

    `blocks` is the whole model; the program holds one tensor rank's slices of it. `sequence` is the tokens of a
    sequence; `orders` replaces the plan's schedule in a pipeline. Raises `PlanError` when the plan cannot run. Cost and
    size do not depend on the number of data ranks.
    """
    return build_stages(cluster, plan, blocks, num_micros, sequence, orders, only=stage)[0]


def build_stages(
    cluster: Cluster,
    plan: Plan,
    blocks: Sequence[BlockSpec],
    num_micros: int,
    sequence: int = 0,
    orders: Orders | None = None,
    only: int | None = None,
) -> list[Program]:
    """The programs of all stages, or of one; arguments and errors as in `build`."""
    return lowered(frame_of(cluster, plan, blocks, num_micros, sequence), blocks, num_micros, orders, only)


def frame_of(cluster: Cluster, plan: Plan, blocks: Sequence[BlockSpec], num_micros: int, sequence: int = 0) -> Program:
    """A program without instructions: what follows from the plan, for the programs of all stages.

    Arguments and errors as in `build`.
    """
    layout = validate(cluster, plan, blocks)
    if num_micros < 1:
        raise PlanError(f"num_micros = {num_micros}: a step has at least one micro-batch")
    mesh = Mesh.of(cluster, plan)
    for axis, is_cut in (("context", is_context_parallel(mesh, plan)), ("tensor", mesh.total("tensor") > 1)):
        if is_cut and sequence < 1:
            raise no_sequence(axis)
    return Program(
        cluster=cluster,
        plan=plan,
        layout=layout,
        blocks=slice_blocks(blocks, mesh),
        # Two micro-batches show whether gradients are accumulated; more change no block's cost.
        stage=whole_stage(len(blocks), min(2, num_micros), 1),
        instructions=(),
        sequence=sequence,
    )


def lowered(
    frame: Program,
    blocks: Sequence[BlockSpec],
    num_micros: int,
    orders: Orders | None = None,
    only: int | None = None,
) -> list[Program]:
    """The programs of all stages, or of one, for a step of `num_micros` micro-batches of the whole model `blocks`."""
    plan, num_stages = frame.plan, frame.mesh.total("pipeline")

    def stages_of(num_micros: int) -> tuple[Stage, ...]:
        return _stages(frame, blocks, num_stages, num_micros, orders)

    def lower(stages: Sequence[Stage]) -> list[Program]:
        frames = (frame.of_stage(each) for each in (stages if only is None else [stages[only]]))
        return [each.of_stage(each.stage, _passes(each, stages).end(*_end(each))) for each in frames]

    if num_micros * len(blocks) > _LONG_STEP and orders is None:
        found = repeating(stages_of, lower, num_micros, num_stages, period(plan, num_stages))
        if found is not None:
            return found
    # Before any lowering: a list of this length would exhaust the host's memory.
    if num_micros * len(blocks) > _LARGEST_STEP:
        raise PlanError(
            f"{num_micros} micro-batches of {len(blocks)} blocks on a rank are more than the {_LARGEST_STEP:,} passes "
            "that a program may have whose order does not repeat: give a smaller batch or a larger plan.micro_batch"
        )
    return lower(stages_of(num_micros))


def _stages(
    frame: Program, blocks: Sequence[BlockSpec], num_stages: int, num_micros: int, orders: Orders | None
) -> tuple[Stage, ...]:
    plan = frame.plan
    if num_stages == 1:
        return (whole_stage(len(blocks), num_micros, plan.unit),)
    # Stages are balanced by a rank's own slices, since these are the model state that must fit its device.
    sizes = [sum(each.values()) for each in blocks_bytes(plan, frame.flats)]
    memory_bytes = frame.cluster.device.memory_bytes
    return make_stages(plan, blocks, num_stages, num_micros, frame.sequence, orders, sizes, memory_bytes)


def lengthened(program: Program, num_micros: int) -> Program:
    """The program of a plan without a pipeline for a step of `num_micros` micro-batches; all else is shared."""
    stage = whole_stage(len(program.blocks), num_micros, program.plan.unit)
    frame = program.of_stage(stage)
    return frame.of_stage(stage, _passes(frame, [stage]).end(*_end(frame)))


def forward_programs(programs: Sequence[Program]) -> list[Program]:
    """Forward-only programs on the stages of the training programs `programs`, which are all stages.

    They end with a CLIP, which adds up losses and tokens; there is no gradient.
    """
    if programs[0].short is not programs[0]:
        found = joined(
            [_forwards([each.repeating(bodies) for each in programs]) for bodies in range(3)], programs[0].num_micros
        )
        return _forwards([each.whole() for each in programs]) if found is None else found
    return _forwards(programs)


def _forwards(programs: Sequence[Program]) -> list[Program]:
    stages = [forward_stage(each.stage) for each in programs]
    frames = [each.of_stage(stage, phase=Phase.FORWARD) for each, stage in zip(programs, stages, strict=True)]
    return [frame.of_stage(frame.stage, _passes(frame, stages).end(Instruction(Op.CLIP))) for frame in frames]


def outer_program(program: Program) -> Program:
    """The program in which islands agree on parameters, on the stage of their training program `program`.

    All changes are sent before the first is applied, so that messages run while others are applied. Raises `PlanError`
    for a plan without islands.
    """
    if program.layout.num_islands == 1:
        raise PlanError("a plan without islands has nothing to exchange between steps: name plan.island")
    blocks = [block for block in program.stage.held if program.blocks[block].num_trainable]
    instructions = [Instruction(Op.OUTER_START, block) for block in blocks]
    for block in blocks:
        instructions += [Instruction(Op.OUTER_APPLY, block), Instruction(Op.REFRESH, block)]
    return program.of_stage(idle_stage(program.stage), tuple(instructions), Phase.OUTER)


def restoring_program(program: Program) -> Program:
    """The program that follows a loaded state, on the stage of the training program `program`.

    Every working copy is made from the master parameters. Secondary copies need no instruction: the first gather of
    the next step writes them.
    """
    blocks = (block for block in program.stage.held if program.blocks[block].num_trainable)
    instructions = tuple(Instruction(Op.REFRESH, block) for block in blocks)
    return program.of_stage(idle_stage(program.stage), instructions, Phase.RESTORE)


def _passes(frame: Program, stages: Sequence[Stage]) -> Writer:
    stage, found = frame.stage, Writer()
    stays = gathers(stage, frame.blocks, frame.flats, frame.plan.prefetch)
    issued, freed = defaultdict[int, tuple[Instruction, ...]](tuple), defaultdict[int, tuple[Instruction, ...]](tuple)
    for stay in stays:
        issued[stay.issue] += (_gather(frame, stay),)
        if frame.frees(stay.block):
            freed[stay.last] += (Instruction(Op.FREE, stay.block),)
    received, reduced = _received(found, stage, stages), _reduced(frame)
    sends = {key: None if edge is None else found.body(_send(edge)) for key, edge in _edges(stage, _sent).items()}
    bodies, order = dict[tuple[object, ...], int](), found.order
    # Three counters: visits of blocks (gathers), passes (reductions) and tasks (receives).
    visit = number = task = 0
    for group in stage.groups:
        pass_, chunk, micros = group
        blocks, sent = stage.traversal(group), sends[pass_, chunk]
        size = len(blocks)
        # Weight gradients read activations and output gradients only, so their passes need no parameters.
        reads, finishes = pass_ is not Pass.BACKWARD_WEIGHT, pass_.finishes
        for micro in micros:
            order += received.get(task, ())
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
                body = bodies[key] = found.body(*_body(blocks, *key))
            order.append((body, micro))
            number += size
            if sent is not None:
                order.append((sent, micro))
        visit += size if reads else 0
    return found


_Extra = tuple[tuple[Instruction, ...] | None, ...] | None  # instructions at each pass of a body


def _at(found: Mapping[int, tuple[Instruction, ...]], first: int, size: int) -> _Extra:
    return tuple(map(found.get, range(first, first + size)))


def _body(
    blocks: Sequence[int], pass_: Pass, chunk: int, issued: _Extra, reduced: _Extra, freed: _Extra
) -> Iterator[Instruction]:
    op, none = _OPS[pass_], (None,) * len(blocks)
    for block, before, after, last in zip(blocks, issued or none, reduced or none, freed or none, strict=True):
        yield from before or ()
        yield Instruction(op, block, 0)
        yield from after or ()
        yield from last or ()


def _send(edge: "_Edge") -> Instruction:
    return Instruction(Op.SEND, edge.block, 0, edge.backward, False, edge.peer)


def _gather(frame: Program, stay: Residency) -> Instruction:
    # The first gather of a step reads the primary copy and refreshes the secondary one.
    secondary = frame.has_secondary and not stay.opening
    return Instruction(Op.GATHER, stay.block, backward=stay.backward, secondary=secondary)


def _reduced(frame: Program) -> dict[int, tuple[Instruction, ...]]:
    """The reductions after each pass, by its number."""
    stage, blocks, tied = frame.stage, frame.blocks, dict(frame.stage.ties)
    found: dict[int, tuple[Instruction, ...]] = {}
    for block, numbers in reduction_points(stage, blocks, frame.plan.unit).items():
        # A frozen block has no gradient to reduce.
        if blocks[block].num_trainable:
            reduction = (Instruction(Op.REDUCE, block, 0),)
            for number in numbers:
                found[number] = found[number] + reduction if number in found else reduction
            # The SYNC of a tied block waits for its TIE at the end of the step.
            if block not in tied:
                found[numbers[-1]] += (Instruction(Op.SYNC, block),)
    return found


def _end(frame: Program) -> Iterator[Instruction]:
    stage = frame.stage
    # TIE before CLIP: the norm must see the sum of both stages' gradients.
    for block, peer in stage.ties:
        if frame.blocks[block].num_trainable:
            yield Instruction(Op.TIE, block, peer=peer)
            yield Instruction(Op.SYNC, block)
    yield Instruction(Op.CLIP)
    whole = orthogonalised(frame.flats, stage.held)  # each is gathered while the one before it is updated
    following = dict(pairwise(whole))
    # The first gather has no update to hide behind.
    yield from (Instruction(Op.ORTHOGONALISE, block) for block in whole[:1])
    for block in stage.held:
        if frame.blocks[block].num_trainable:
            if block in following:
                yield Instruction(Op.ORTHOGONALISE, following[block])
            yield Instruction(Op.UPDATE, block)
            yield Instruction(Op.REFRESH, block)


class _Edge(NamedTuple):
    """What a group sends to another stage, or reads from one: a block's output, or the gradient of its input."""

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
    """The edges of all kinds of groups: a stage has few, one for each chunk and direction."""
    return {(pass_, chunk): edge(stage, pass_, chunk) for pass_ in Pass for chunk in range(len(stage.chunks))}


def _received(found: Writer, stage: Stage, stages: Sequence[Stage]) -> dict[int, list[tuple[int, int]]]:
    """The RECVs before each task, by its number, as bodies and micro-batches."""
    needed: dict[_Edge, dict[int, int]] = defaultdict(dict)  # the task that reads each message
    edges, num_tasks = _edges(stage, _read), 0
    for group in stage.groups:
        edge = edges[group.pass_, group.chunk]
        if edge is not None:
            needed[edge].update(zip(group.micros, count(num_tasks)))
        num_tasks += len(group.micros)
    bodies = {edge: found.body(Instruction(Op.RECV, edge.block, 0, edge.backward, False, edge.peer)) for edge in needed}
    before: dict[int, list[tuple[int, int]]] = defaultdict(list)
    # Each peer is a channel of its own: order matters between two ranks only.
    for peer in {*stage.onward, *stage.back} - {None}:
        assert peer is not None
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

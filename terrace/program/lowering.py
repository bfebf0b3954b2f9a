"""Lowering: from a plan to the instructions of a stage.

Groups of micro-batches pass the chunks of a stage (terrace.plan.stage) in the order of its schedule, each task as

    RECV        its input, if another stage computes it; issued one task ahead
    GATHER      `prefetch` visits before the first block that reads it (terrace.plan.residency)
    FORWARD, BACKWARD, or one half of a backward, of each block
    EVICT       after a forward whose input is kept below the device
    FETCH       of that input, ahead of its backward (terrace.program.boundaries)
    FREE        after the last visit that uses the block
    REDUCE      once per unit of micro-batches, when its gradient is complete
    COUNT       after the last forward of a stage with routers
    SYNC        right after the last REDUCE of a block, so that outer tiers communicate while other blocks still compute
    SEND        the result, if another stage reads it

A plan without a pipeline is one stage with one chunk per block: every unit of micro-batches passes the blocks forward,
then backward. After all passes come TIE and SYNC of blocks held by two stages (in the middle of the step, the last
stage would wait for the first). Then the global norm; then, block by block in forward order, UPDATE (under Muon with an
ORTHOGONALISE one layer ahead) and REFRESH, so that the next step can start on block 0 while later blocks are still
being refreshed. Exchanges between islands come last: arrived means are applied and their blocks refreshed, then new
changes are sent. terrace.program.stage_passes builds the passes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise

from terrace.base.errors import PlanError
from terrace.cluster.cluster import Cluster
from terrace.model.spec import BlockSpec
from terrace.plan.context import is_context_parallel
from terrace.plan.context_rules import check_linear
from terrace.plan.counts import num_choices
from terrace.plan.edges import edge_of
from terrace.plan.flats import FlatParamSpec, orthogonalised
from terrace.plan.mesh import Mesh, no_sequence
from terrace.plan.outer import NO_EXCHANGE
from terrace.plan.plan import Plan
from terrace.plan.slices import slice_blocks
from terrace.plan.stage import Stage, forward_stage, idle_stage, whole_stage
from terrace.plan.state_bytes import blocks_bytes
from terrace.plan.validate import check_units, validate
from terrace.program.exchange import exchange_instructions, exchanged
from terrace.program.gaps import has_gaps, may_be_in_gaps, no_gaps, refuse_open_shares
from terrace.program.instruction import Instruction, Op, Phase
from terrace.program.program import Program
from terrace.program.repeating import joined, repeating
from terrace.program.segments import Segments
from terrace.program.sharded_model import ShardedModel
from terrace.program.stage_passes import write_passes
from terrace.program.stages import make_stages, period

# Micro-batches times blocks. Longer steps are built from a repeating body, if there is one, instead of as a list.
_LONG_STEP = 10_000
_LARGEST_STEP = 2_000_000  # limit for a step without repetition; one process builds such a list in seconds


def build(
    cluster: Cluster, plan: Plan, blocks: Sequence[BlockSpec], num_micros: int, sequence: int = 0, stage: int = 0
) -> Program:
    """The program of every rank of a stage for a step of `num_micros` micro-batches.

    `blocks` is the whole model; the program holds one tensor rank's slices of it. `sequence` is the sequence length in
    tokens. Raises `PlanError` if the plan cannot run. Time and size of the result do not depend on the number of data
    ranks.
    """
    return build_stages(cluster, plan, blocks, num_micros, sequence, only=stage)[0]


def build_stages(
    cluster: Cluster,
    plan: Plan,
    blocks: Sequence[BlockSpec],
    num_micros: int,
    sequence: int = 0,
    only: int | None = None,
) -> list[Program]:
    """The programs of all stages, or of stage `only`; arguments and errors as in `build`."""
    return lowered(sharded(cluster, plan, blocks, num_micros, sequence), blocks, num_micros, only)


def sharded(
    cluster: Cluster, plan: Plan, blocks: Sequence[BlockSpec], num_micros: int, sequence: int = 0
) -> ShardedModel:
    """The model that the programs of all stages share. Arguments and errors as in `build`."""
    layout = validate(cluster, plan, blocks)
    refuse_open_shares(plan)
    if num_micros < 1:
        raise PlanError(f"num_micros = {num_micros}: a step has at least one micro-batch")
    check_units(plan, num_micros)
    mesh = Mesh.of(cluster, plan)
    for axis, is_cut in (("context", is_context_parallel(mesh, plan)), ("tensor", mesh.total("tensor") > 1)):
        if is_cut and sequence < 1:
            raise no_sequence(axis)
    check_linear(blocks, sequence, mesh.total("ring"), mesh.total("ulysses"))
    sliced = slice_blocks(blocks, mesh)
    model = ShardedModel(cluster=cluster, plan=plan, layout=layout, blocks=sliced, sequence=sequence)
    if model.leaving and sequence < 1:
        raise PlanError(
            f"keep.activations = {plan.keep.activations!r} needs the length of a sequence, from which sizes of "
            "activations follow: name it as `sequence`"
        )
    if mesh.total("pipeline") > 1 or model.leaving:
        edge_of(model.tensor, model.blocks)  # raises if its size is not known
    return model


def lowered(
    model: ShardedModel, blocks: Sequence[BlockSpec], num_micros: int, only: int | None = None
) -> list[Program]:
    """The programs of all stages, or of stage `only`, for a step of `num_micros` micro-batches; `blocks` are whole."""
    found = _lowered(model, blocks, num_micros, only)
    # One stage may have no gaps while another has some; ranks of all stages must agree on the error.
    if model.plan.gap_shares and not (
        _any_in_gaps(found) or (only is not None and _any_in_gaps(_lowered(model, blocks, num_micros, None)))
    ):
        raise no_gaps()
    return found


def _any_in_gaps(programs: Sequence[Program]) -> bool:
    return any(each.in_gaps for program in programs for each in program.counts)


def _lowered(model: ShardedModel, blocks: Sequence[BlockSpec], num_micros: int, only: int | None) -> list[Program]:
    plan, num_stages = model.plan, model.mesh.total("pipeline")

    def stages_of(num_micros: int) -> tuple[Stage, ...]:
        return _stages(model, blocks, num_stages, num_micros)

    def lower(stages: Sequence[Stage]) -> list[Program]:
        wanted = stages if only is None else [stages[only]]
        if only is None and num_micros * len(blocks) <= _LONG_STEP:
            read = _Read(tuple(stages), plan.prefetch, plan.unit, plan.keep.layer_wise, _facts(model), model)
            written = _all_written(read)
        else:
            written = [_written(Program(model=model, stage=stage), stages) for stage in wanted]
        pairs = zip(wanted, written, strict=True)
        return [Program(model=model, stage=stage, instructions=segments) for stage, segments in pairs]

    if num_micros * len(blocks) > _LONG_STEP:
        found = repeating(stages_of, lower, num_micros, num_stages, period(plan, num_stages))
        if found is not None:
            return found
    # Checked before lowering: a list of this length would exhaust host memory.
    if num_micros * len(blocks) > _LARGEST_STEP:
        raise PlanError(
            f"{num_micros} micro-batches of {len(blocks)} blocks on a rank are more than the {_LARGEST_STEP:,} passes "
            "that a program may have whose order does not repeat: give a smaller batch or a larger plan.micro_batch"
        )
    return lower(stages_of(num_micros))


_Fact = tuple[object, ...]


@dataclass(frozen=True)
class _Read:
    """Cache key: everything that a step's instructions depend on; `model` is one with these values.

    Many plans that a search compares have the same key.
    """

    stages: tuple[Stage, ...]
    prefetch: int
    unit: int
    layer_wise: bool
    facts: tuple[_Fact, ...]  # of every block
    model: ShardedModel = field(compare=False)


def _facts(model: ShardedModel) -> tuple[_Fact, ...]:
    def of_flats(flats: Sequence[FlatParamSpec]) -> _Fact:
        layouts = [flat.layout for flat in flats]
        return (
            any(layout.gathers for layout in layouts),
            any(layout.frees for layout in layouts),
            any(layout.has_secondary for layout in layouts),
            any(flat.num_orthogonal for flat in flats),
        )

    facts = zip(model.of_flats(of_flats), model.blocks, _gap_facts(model), strict=True)
    return tuple(
        [
            (
                *of_block,
                block.num_trainable > 0,
                block.tied_to,
                num_choices(block) > 0,
                of_gaps,
                number in model.leaving,
            )
            for number, (of_block, block, of_gaps) in enumerate(facts)
        ]
    )


def _gap_facts(model: ShardedModel) -> list[_Fact]:
    if not model.plan.gap_shares:
        return [()] * len(model.blocks)
    ops = (Op.REDUCE, Op.SYNC)
    return [
        (has_gaps(model, Instruction(Op.BACKWARD, block)), *(may_be_in_gaps(model, op, block) for op in ops))
        for block in range(len(model.blocks))
    ]


@lru_cache(maxsize=8)
def _all_written(read: _Read) -> list[Segments]:
    return [_written(Program(model=read.model, stage=stage), read.stages) for stage in read.stages]


def _written(program: Program, stages: Sequence[Stage]) -> Segments:
    return write_passes(program, stages).end(*step_end(program))


def _stages(model: ShardedModel, blocks: Sequence[BlockSpec], num_stages: int, num_micros: int) -> tuple[Stage, ...]:
    plan = model.plan
    if num_stages == 1:
        return (whole_stage(len(blocks), num_micros, plan.unit),)
    # Sizes are those of a rank's slices, since that model state must fit its device.
    sizes = [] if plan.stages else [sum(each.values()) for each in blocks_bytes(plan, model.flats)]
    memory_bytes = model.cluster.device.usable_bytes
    return make_stages(plan, blocks, num_stages, num_micros, model.sequence, sizes, memory_bytes)


def forward_programs(programs: Sequence[Program]) -> list[Program]:
    """Forward-only programs for the stages of `programs`, the training programs of all stages.

    They end with a CLIP, which sums losses and token counts; there are no gradients.
    """
    if programs[0].short is not programs[0]:
        found = joined(
            [_forwards([each.repeating(bodies) for each in programs]) for bodies in range(3)], programs[0].num_micros
        )
        return _forwards([each.whole() for each in programs]) if found is None else found
    return _forwards(programs)


def _forwards(programs: Sequence[Program]) -> list[Program]:
    stages = [forward_stage(each.stage) for each in programs]
    found = []
    for program, stage in zip(programs, stages, strict=True):
        forward = replace(program, stage=stage, phase=Phase.FORWARD, exchange=NO_EXCHANGE)
        found.append(replace(forward, instructions=write_passes(forward, stages).end(Instruction(Op.CLIP))))
    return found


def restoring_program(program: Program) -> Program:
    """The program to run after loading a state, for the stage of the training program `program`.

    It refreshes every working copy from the master parameters. Secondary copies need no instruction: the first gather
    of the next step writes them.
    """
    blocks = (block for block in program.stage.held if program.blocks[block].num_trainable)
    instructions = tuple(Instruction(Op.REFRESH, block) for block in blocks)
    return replace(program, stage=idle_stage(program.stage), instructions=instructions, phase=Phase.RESTORE)


def step_end(program: Program) -> Iterator[Instruction]:
    stage, blocks = program.stage, program.blocks
    # TIE before CLIP: the norm is over the sum of both stages' gradients.
    for block, peer in stage.ties:
        if blocks[block].num_trainable:
            yield Instruction(Op.TIE, block, peer=peer)
            yield Instruction(Op.SYNC, block)
    yield Instruction(Op.CLIP)
    if program.plan.keep.layer_wise:
        return
    whole = orthogonalised(program.model.flats, stage.held)  # each is gathered while the previous one is updated
    following = dict(pairwise(whole))
    # The first gather has no update to hide behind.
    yield from (Instruction(Op.ORTHOGONALISE, block) for block in whole[:1])
    later = set(exchanged(program, program.exchange.applies))
    for block in stage.held:
        if blocks[block].num_trainable:
            if block in following:
                yield Instruction(Op.ORTHOGONALISE, following[block])
            yield Instruction(Op.UPDATE, block)
            if block not in later:
                yield Instruction(Op.REFRESH, block)
    yield from exchange_instructions(program)

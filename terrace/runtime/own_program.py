"""Builds or checks the program of a rank."""

from collections.abc import Sequence

from terrace.base.errors import ProgramError
from terrace.cluster.cluster import Cluster
from terrace.model.spec import BlockSpec
from terrace.plan.mesh import Mesh
from terrace.plan.plan import Plan
from terrace.plan.slices import slice_blocks
from terrace.program.lowering import build, build_stages
from terrace.program.program import Program
from terrace.program.verify import verify
from terrace.program.verify_ranks import verify_stages


def own_program(
    rank: int,
    cluster: Cluster,
    plan: Plan,
    specs: Sequence[BlockSpec],
    num_micros: int,
    sequence: int,
    *,
    given: Program | None = None,
    verified: bool = False,
) -> Program:
    """The verified program of this rank: `given`, or else a new one.

    Every rank verifies its own program. Rank 0 also verifies the stages of a new pipeline against each other, unless
    `verified`: lowering is a pure function of values that all ranks share, so one verdict holds for all. Raises
    `ProgramError` if the program is wrong or was built for another run.
    """
    mesh = Mesh.of(cluster, plan)
    stage = mesh.stage(rank)
    if given is not None:
        # A program is built for one stage of one plan; comparing values catches one from another run.
        expected = (cluster, plan, slice_blocks(specs, mesh), num_micros, stage)
        if (given.cluster, given.plan, given.blocks, given.num_micros, given.stage.index) != expected:
            raise ProgramError(
                "the program was built for another cluster, plan, model, number of micro-batches or stage"
            )
        # Without activations in messages the length changes nothing.
        if given.model.sequence != sequence and (given.model.tensor.degree > 1 or given.stage.num_stages > 1):
            raise ProgramError(
                f"the program was built for sequences of {given.model.sequence} tokens, the engine is asked for "
                f"{sequence}: its messages are activations; build it for the same length"
            )
        program = given
    elif rank == 0 and mesh.total("pipeline") > 1 and not verified:
        programs = build_stages(cluster, plan, specs, num_micros, sequence)
        # A rank with different inputs would not notice in programs that it built itself, so one verdict is enough.
        verify_stages(programs)
        program = programs[stage]
    else:
        program = build(cluster, plan, specs, num_micros, sequence, stage)
    verify(program, rank)
    return program

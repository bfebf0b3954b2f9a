"""The values that an engine is made of: which blocks, under which plan, with which settings, on which rank."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn

from terrace.base.errors import ProgramError
from terrace.cluster.cluster import Cluster
from terrace.comm.groups import Timeouts
from terrace.comm.pace import UNPACED, Pace
from terrace.model.balance import BalanceConfig
from terrace.model.spec import BlockSpec
from terrace.plan.balance_rules import with_exchanged_choices
from terrace.plan.members import num_micros_of
from terrace.plan.mesh import Mesh
from terrace.plan.plan import Plan
from terrace.plan.pruning import NO_PRUNING, BlockPruning
from terrace.plan.slices import slice_blocks
from terrace.program.lowering import build, build_stages
from terrace.program.program import Program
from terrace.program.verify import verify
from terrace.program.verify_ranks import verify_stages
from terrace.runtime.describe import describe, with_dims
from terrace.runtime.messages import Progress, no_progress
from terrace.runtime.model_state import InitialValue
from terrace.runtime.settings import OptimizerConfig


def own_values(modules: Sequence[nn.Module], names: Sequence[str]) -> InitialValue:
    """The values that the parameters of `modules` have now."""
    values = {
        (block, name): parameter
        for module, block in zip(modules, names, strict=True)
        for name, parameter in module.named_parameters()
    }
    return lambda block, name, shape: values[block, name].detach()


@dataclass(frozen=True, kw_only=True)
class Training:
    """How parameters are updated, routers balanced and blocks run. `seed` is for noise.

    With `compiled`, blocks or their parts run through `torch.compile`.
    """

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    pruning: BlockPruning = NO_PRUNING
    compiled: bool = False
    seed: int = 0


DEFAULTS = Training()


class Blocks:
    """Blocks to train, by name. Their parameters are replaced by views of flat buffers.

    Initial values come from `initial`, or else from the blocks, which must then be equal on every rank. `freeze` holds
    patterns of parameters that are not trained. Tensor and pipeline axes need the parameter dims in `declared`.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        *,
        names: Sequence[str] = (),
        declared: Sequence[BlockSpec] = (),
        freeze: Sequence[str] = (),
        initial: InitialValue | None = None,
    ) -> None:
        self.modules: Sequence[nn.Module] = list(modules)
        self.names = list(names or (f"block.{index}" for index in range(len(modules))))
        self.initial = initial or own_values(self.modules, self.names)
        self._declared, self._freeze = declared, freeze

    def specs(self, balance: BalanceConfig) -> tuple[BlockSpec, ...]:
        """Specs of the blocks. Raises `ModelError` if they differ from the declared ones."""
        return with_exchanged_choices(
            balance, with_dims(describe(self.modules, self.names, self._freeze), self._declared)
        )


@dataclass(frozen=True, kw_only=True)
class RankSetup:
    """One rank and its device.

    `pacer` slows messages to the rates of their tiers; a message that takes longer than `timeout` is an error.
    `progress` hears of each instruction. `keep_folder` is for states that the plan keeps on a disk, by default the
    system's folder for temporary files.
    """

    rank: int = 0
    device: torch.device | str = "cpu"
    timeout: timedelta | Timeouts = timedelta(minutes=10)
    pacer: Pace = UNPACED
    progress: Progress = no_progress
    keep_folder: Path | None = None


ALONE = RankSetup()


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Steps of `num_micros` micro-batches under a plan on a cluster; a plan with `shares` has numbers of its own.

    Tensor and pipeline axes and `keep.activations` need the length of a `sequence`. `program` is a rank's own order of
    instructions, built for the same values. Unless `is_verified`, rank 0 verifies the stages against each other.
    """

    cluster: Cluster
    plan: Plan
    num_micros: int
    sequence: int = 0
    program: Program | None = None
    is_verified: bool = False

    def program_of(self, rank: int, specs: Sequence[BlockSpec]) -> Program:
        """The verified program of a rank: the given one, or else a new one.

        Every rank verifies its own program. Rank 0 also verifies the stages of a new pipeline against each other,
        unless `is_verified`: lowering is a pure function of values that all ranks share, so one verdict holds for all.
        Raises `ProgramError` if the program is wrong or was built for another run.
        """
        cluster, plan, sequence = self.cluster, self.plan, self.sequence
        num_micros = num_micros_of(cluster, plan, rank, self.num_micros)
        mesh = Mesh.of(cluster, plan)
        stage = mesh.stage(rank)
        if self.program is not None:
            given = self.program
            # A program is built for one stage of one plan; comparing values catches one from another run.
            expected = (cluster, plan, slice_blocks(specs, mesh), num_micros, stage)
            if (given.cluster, given.plan, given.blocks, given.num_micros, given.stage.index) != expected:
                raise ProgramError(
                    "the program was built for another cluster, plan, model, number of micro-batches or stage"
                )
            # Where no activation is sent or kept below the device the length changes nothing.
            moves = given.model.tensor.degree > 1 or given.stage.num_stages > 1 or given.model.leaving
            if given.model.sequence != sequence and moves:
                raise ProgramError(
                    f"the program was built for sequences of {given.model.sequence} tokens, the engine is asked for "
                    f"{sequence}: it moves activations; build it for the same length"
                )
            program = given
        elif rank == 0 and mesh.total("pipeline") > 1 and not self.is_verified:
            programs = build_stages(cluster, plan, specs, num_micros, sequence)
            # A rank with different inputs would not notice in programs that it built itself, so one verdict is enough.
            verify_stages(programs)
            program = programs[stage]
        else:
            program = build(cluster, plan, specs, num_micros, sequence, stage)
        verify(program, rank)
        return program

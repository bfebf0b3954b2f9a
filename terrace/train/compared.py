"""Reports of other ranks, gathered at the end of a run: one of each pipeline stage, and that of the slowest rank."""

from collections.abc import Sequence
from typing import Any

from terrace.program.report import StepReport, plain, read_plain
from terrace.runtime.engine import Engine
from terrace.train.metrics import SlowestRank, own_seconds


def compare_ranks(
    engine: Engine, predicted: Sequence[StepReport], measured: StepReport
) -> tuple[tuple[tuple[StepReport, StepReport], ...], SlowestRank | None]:
    """((predicted, measured) of each pipeline stage, empty without a pipeline; the slowest rank, None in a world of 1).

    Every rank calls this with its `measured` report.
    """
    mesh, is_pipelined = engine.program.mesh, len(predicted) > 1
    if engine.program.cluster.world_size == 1:
        return (), None
    # Without a pipeline the reports of ranks differ in their times alone.
    own: dict[str, Any] = plain(measured) if is_pipelined else {"time_s": dict(measured.time_s)}
    of_ranks = engine.comm.exchange(own)
    stages: tuple[tuple[StepReport, StepReport], ...] = ()
    if is_pipelined:
        # The first data and tensor rank stands for its stage.
        firsts = (of_ranks[mesh.at_stage(0, stage)] for stage in range(len(predicted)))
        stages = tuple(zip(predicted, map(read_plain, firsts), strict=True))
    rank = max(range(len(of_ranks)), key=lambda each: own_seconds(of_ranks[each]["time_s"]))
    stage = mesh.stage(rank)
    slowest = SlowestRank(
        rank=rank, stage=stage, predicted_s=predicted[stage].time_s, measured_s=of_ranks[rank]["time_s"]
    )
    return stages, slowest

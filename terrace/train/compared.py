"""The reports of all pipeline stages, predicted beside measured."""

from collections.abc import Sequence

from terrace.program.report import StepReport, plain, read_plain
from terrace.runtime.engine import Engine


def compare_stages(
    engine: Engine, predicted: Sequence[StepReport], measured: StepReport
) -> tuple[tuple[StepReport, StepReport], ...]:
    """(predicted, measured) of each pipeline stage, none without a pipeline: a rank's own report then says it all.

    Every rank calls this with its `measured` report.
    """
    if len(predicted) == 1:
        return ()
    # The first data and tensor rank stands for its stage.
    of_ranks = [read_plain(report) for report in engine.comm.exchange(plain(measured))]
    mesh = engine.program.mesh
    return tuple((each, of_ranks[mesh.at_stage(0, stage)]) for stage, each in enumerate(predicted))

"""What a run is predicted to do, from its configuration and the cluster that its start measured. Needs no torch."""

from collections.abc import Sequence

from terrace.cluster import Cluster
from terrace.model.config import forward_flops
from terrace.program import Program, StepReport, build_stages
from terrace.simulate import Costs, Work, simulate, simulate_stages, step_costs
from terrace.simulate.footprint import work_of
from terrace.train.config import RunConfig
from terrace.train.utilisation import Utilisation, utilisation


def priced_programs(run: RunConfig, cluster: Cluster) -> tuple[list[Program], list[Costs]]:
    """Return the program of every stage of a run on `cluster`, and its costs.

    The run's own cluster, which was probed, prices compute kernel by kernel; another one holds what the start of the
    run measured, which is the FLOP/s of a layer.
    """
    programs = build_stages(cluster, run.plan, run.blocks(), run.num_micros(), run.train.sequence)
    sizes = (run.plan.micro_batch, run.train.sequence)
    work: Work | Sequence[float] = work_of(
        cluster, run.plan, run.model, run.train.sequence, documents=run.has_documents
    )
    if cluster is not run.cluster:
        work = [forward_flops(run.model, block, *sizes) for block in range(run.model.num_blocks)]
    return programs, [step_costs(program, work) for program in programs]


def predict(run: RunConfig, cluster: Cluster) -> list[StepReport]:
    """Return the predicted reports of a steady step of this run on `cluster`, for a rank of each stage."""
    programs, costs = priced_programs(run, cluster)
    if len(programs) == 1:
        return [simulate(programs[0], costs[0])]
    return simulate_stages(programs, costs).reports


def utilisation_of(run: RunConfig, cluster: Cluster, backend: str) -> Utilisation:
    """Return what the run's MFU and HFU are counted from; `cluster` has what its start measured, if it did."""
    return utilisation(
        run.model,
        run.blocks(),
        run.plan,
        run.train.batch,
        run.train.sequence,
        cluster=run.cluster,
        measured=cluster,
        backend=backend,
    )

"""The predicted step of a run, from its configuration and the cluster measured at its start. Needs no torch."""

from dataclasses import replace

from terrace.cluster.cluster import Cluster
from terrace.model.block_operations import layer_operations
from terrace.model.blocks import block_specs
from terrace.simulate.footprint import work_of
from terrace.simulate.step import Prediction, Step, predict_step, resolved
from terrace.train.config import RunConfig
from terrace.train.rules import parts_of
from terrace.train.utilisation import Utilisation, utilisation


def given_step(run: RunConfig) -> Step:
    """The run's step, priced with the constants of its cluster file; a stage split that the plan leaves open is not
    resolved.
    """
    return Step(
        cluster=run.cluster,
        plan=run.plan,
        blocks=run.blocks(),
        num_micros=run.num_micros(),
        sequence=run.train.sequence,
        work=work_of(
            run.cluster,
            run.plan,
            layer_operations(run.model),
            run.train.sequence,
            documents=run.has_documents,
            attention=run.train.attention,
            served=parts_of(run),
        ),
    )


def step_of(run: RunConfig, cluster: Cluster | None = None) -> Step:
    """The run's step on its own cluster, or on `cluster`, measured at the start.

    The own cluster, from a probe or a data sheet, prices compute kernel by kernel; a measured one holds the FLOP/s of a
    layer. Blocks are always divided among stages by the own cluster, which is the same on every rank.
    """
    # Stages are resolved on the run's own cluster: measured constants could divide the blocks differently than the
    # engine did.
    own = resolved(given_step(run))
    if cluster is None or cluster is run.cluster:
        return own
    sizes = (run.plan.micro_batch, run.train.sequence)
    flops = tuple(block.forward_flops(*sizes) for block in block_specs(run.model))
    return replace(own, cluster=cluster, work=flops)


def resolved_run(run: RunConfig) -> RunConfig:
    """The run with a fully resolved plan. Raises `PlanError` for a plan that cannot run."""
    return replace(run, plan=step_of(run).plan)


def predict(run: RunConfig, cluster: Cluster) -> Prediction:
    return predict_step(step_of(run, cluster))


def utilisation_of(run: RunConfig, cluster: Cluster, backend: str) -> Utilisation:
    """FLOPs and peaks behind the run's MFU and HFU; `cluster` has the constants measured at the start."""
    return utilisation(
        run.blocks(),
        run.plan,
        run.rows,
        run.train.sequence,
        cluster=run.cluster,
        measured=cluster,
        backend=backend,
    )

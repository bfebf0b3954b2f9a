"""The predicted step of a run, from its configuration and the cluster measured at its start. Needs no torch."""

from dataclasses import replace

from terrace.cluster.cluster import Cluster
from terrace.model.blocks import block_specs
from terrace.plan.plan import Plan
from terrace.simulate.step import Prediction, Step, predict_step, resolved
from terrace.train.config import RunConfig
from terrace.train.utilisation import Utilisation, utilisation


def step_of(run: RunConfig, cluster: Cluster | None = None) -> Step:
    """A step of the run, on its own cluster or on one measured at its start.

    The run's own cluster, with figures from a probe or a data sheet, prices compute kernel by kernel. A measured one
    holds the FLOP/s of a layer. Blocks are shared among stages by the run's own cluster, which is equal on every rank.
    """
    # Stages are resolved on the run's cluster: measured constants could share the blocks differently than the engine
    # did.
    own = resolved(run.step())
    if cluster is None or cluster is run.cluster:
        return own
    sizes = (run.plan.micro_batch, run.train.sequence)
    flops = tuple(block.forward_flops(*sizes) for block in block_specs(run.model))
    return replace(own, cluster=cluster, work=flops)


def resolved_run(run: RunConfig) -> RunConfig:
    """The run with a plan that names stages, chunks of experts and shares of gradients; raises `PlanError` for a plan
    that cannot run.
    """
    return replace(run, plan=step_of(run).plan)


def predict(run: RunConfig, cluster: Cluster) -> Prediction:
    return predict_step(step_of(run, cluster))


def utilisation_of(run: RunConfig, cluster: Cluster, backend: str) -> Utilisation:
    """FLOPs and peaks behind the run's MFU and HFU; `cluster` has the constants measured at the start, if any."""
    return utilisation(
        run.blocks(),
        run.plan,
        run.rows,
        run.train.sequence,
        cluster=run.cluster,
        measured=cluster,
        backend=backend,
    )


def gaps_words(asked: Plan, found: Plan) -> str:
    """A line where shares of gradients were to be found and none are worth taking; "" otherwise."""
    if asked.expert_gaps != "auto" or found.expert_gaps:
        return ""
    return (
        'expert_gaps = "auto" takes none: no share of the gradients in the gaps of the experts makes a step noticeably '
        "shorter"
    )

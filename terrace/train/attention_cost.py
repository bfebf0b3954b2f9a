"""Attention cost on a run's devices and links, for the balancer of `balance = "cost"`.

The cost decides how documents are assigned to ranks, and another assignment sums in another order. Checkpoints
therefore store it, so that a resumed run has the same bits as long as cluster, plan and model are the same.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from terrace.base.schema import dump, load
from terrace.cluster.cluster import Cluster
from terrace.model.blocks import block_specs
from terrace.model.config import to_table
from terrace.plan.mesh import Mesh
from terrace.plan.residency import recomputed
from terrace.sequence.cost import WorkCost
from terrace.simulate.attention_cost import attention_cost
from terrace.train.config import RunConfig

KEY = "attention_cost"  # of a checkpoint's facts


def work_cost(run: RunConfig, cluster: Cluster) -> WorkCost:
    """Cost of a layer's attention on one rank. `cluster` holds the measured constants, or those of its file.

    Raises `ClusterError` for a device that has no peak of the plan's compute dtype.
    """
    mesh = Mesh.of(cluster, run.plan)
    blocks = block_specs(run.model)
    return attention_cost(
        cluster,
        blocks,
        rows=mesh.total("rows"),
        columns=mesh.total("columns"),
        ulysses=mesh.total("ulysses"),
        compute=run.plan.compute,
        recomputed=recomputed(run.plan, blocks),
    )


def cost_fact(run: RunConfig, cost: WorkCost) -> dict[str, Any]:
    """The attention cost as stored in a checkpoint, with a digest of the settings it was made for."""
    return {"of": _digest(run), "seconds": dump(cost)}


def kept_cost(run: RunConfig, facts: Mapping[str, Any]) -> WorkCost | None:
    """The attention cost stored in a checkpoint; None if it belongs to another cluster, plan or model."""
    fact = facts.get(KEY)
    # Figures of another cluster, plan or model do not apply.
    if not isinstance(fact, Mapping) or fact.get("of") != _digest(run):
        return None
    return load(WorkCost, fact["seconds"], KEY)


def _digest(run: RunConfig) -> str:
    tables = [dump(run.cluster), dump(run.plan), dump(to_table(run.model))]
    return hashlib.blake2b(json.dumps(tables, sort_keys=True).encode(), digest_size=16).hexdigest()

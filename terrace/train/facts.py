"""Facts of a run stored in its checkpoints; a resumed run must have the same ones.

Among them is the attention cost on a run's devices and links, for the balancer of `balance = "cost"`. It decides how
documents are assigned to ranks, and another assignment sums in another order. Checkpoints therefore store it, so that a
resumed run has the same bits as long as cluster, plan and model are the same.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from terrace.base.errors import CheckpointError
from terrace.base.schema import dump, load
from terrace.cluster.cluster import Cluster
from terrace.data.prepared import data_facts
from terrace.model.blocks import block_specs
from terrace.model.config import ModelConfig, to_table
from terrace.model.hf.mixtures import OWN_KEYS
from terrace.plan.mesh import Mesh
from terrace.plan.residency import recomputed
from terrace.sequence.cost import WorkCost
from terrace.simulate.attention_cost import attention_cost
from terrace.train.adapted import FACT, PRUNED, fact_of, pruned_fact
from terrace.train.config import RunConfig
from terrace.train.job import RunJob

OBJECTIVE = "objective"  # of a run on pairs
COST = "attention_cost"  # of a checkpoint's facts


def facts_of(job: RunJob, cost: WorkCost | None) -> Mapping[str, Any]:
    """`cost` is the attention cost, if documents are assigned by it."""
    run = job.run
    return {
        "model": to_table(run.model),
        "plan": run.plan.name,
        "tokenizer": job.tokenizer_fingerprint,
        **data_facts(job.sources, run.data.holdout),
        "seed": run.train.seed,
        "batch": run.train.batch,
        "sequence": run.train.sequence,
        FACT: fact_of(run.lora),
        **({PRUNED: pruned_fact(run)} if run.prune.is_on else {}),
        **({OBJECTIVE: run.train.objective} if run.on_pairs else {}),
        **({} if cost is None else {COST: cost_fact(run, cost)}),
    }


def model_facts(stored: Mapping[str, Any], config: ModelConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """The facts of a checkpoint's model (table `stored`) and of `config`, each by name, as input for `check_facts`."""
    model = to_table(config)
    names = (*model, *(stored.keys() - model.keys()))
    # A key that only one of them has, such as a family's own gate, counts as a difference.
    there, here = (
        {f"model.{name}": table.get(name, OWN_KEYS.get(name)) for name in names} for table in (stored, model)
    )
    return there, here


def check_facts(folder: Path, there: Mapping[str, Any], here: Mapping[str, Any], fixes: Mapping[str, str]) -> None:
    """Raises `CheckpointError` for the first fact in `here` that differs from the checkpoint's (`there`).

    `fixes` gives the advice per name; the default advice is to restore the earlier value.
    """
    for name, value in here.items():
        if there.get(name) != value:
            raise CheckpointError(
                f"{folder} was made with {name} = {there.get(name)!r}, now it is {value!r}, so the run would not be "
                f"the same: {fixes.get(name, 'restore it')}, or start a new run"
            )


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
    fact = facts.get(COST)
    # Figures of another cluster, plan or model do not apply.
    if not isinstance(fact, Mapping) or fact.get("of") != _digest(run):
        return None
    return load(WorkCost, fact["seconds"], COST)


def _digest(run: RunConfig) -> str:
    tables = [dump(run.cluster), dump(run.plan), dump(to_table(run.model))]
    return hashlib.blake2b(json.dumps(tables, sort_keys=True).encode(), digest_size=16).hexdigest()

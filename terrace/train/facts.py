"""Facts of a run that its checkpoints keep: a resumed run must have the same."""

from collections.abc import Mapping
from typing import Any

from terrace.data.prepared import data_facts
from terrace.model.config import to_table
from terrace.sequence.cost import WorkCost
from terrace.train.adapted import FACT, fact_of
from terrace.train.attention_cost import KEY, cost_fact
from terrace.train.job import RunJob

OBJECTIVE = "objective"  # of a run on pairs


def facts_of(job: RunJob, cost: WorkCost | None) -> Mapping[str, Any]:
    """`cost` is of attention, where documents are dealt out by it."""
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
        **({OBJECTIVE: run.train.objective} if run.on_pairs else {}),
        **({} if cost is None else {KEY: cost_fact(run, cost)}),
    }

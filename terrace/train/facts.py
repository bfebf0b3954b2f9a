"""Facts of a run stored in its checkpoints; a resumed run must have the same ones."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from terrace.base.errors import CheckpointError
from terrace.data.prepared import data_facts
from terrace.model.config import ModelConfig, to_table
from terrace.model.hf.mixtures import OWN_KEYS
from terrace.sequence.cost import WorkCost
from terrace.train.adapted import FACT, fact_of
from terrace.train.attention_cost import KEY, cost_fact
from terrace.train.job import RunJob

OBJECTIVE = "objective"  # of a run on pairs


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
        **({OBJECTIVE: run.train.objective} if run.on_pairs else {}),
        **({} if cost is None else {KEY: cost_fact(run, cost)}),
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

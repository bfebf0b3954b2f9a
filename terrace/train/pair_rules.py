"""Rules across the sections of a run on pairs. Pure: needs no torch."""

import math
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from terrace.base.errors import ConfigError, ModelError, PlanError
from terrace.base.words import counted
from terrace.model.facts import has_scalar_head
from terrace.plan.context import is_context_parallel
from terrace.plan.layout import Layout
from terrace.plan.mesh import Mesh

if TYPE_CHECKING:
    from terrace.train.config import RunConfig


def check_objective(run: "RunConfig") -> None:
    """Raises a `TerraceError` for an objective that does not fit the data, the model or a valid plan."""
    objective, beta = run.train.objective, run.train.beta
    if not 0 < beta < math.inf:
        raise ConfigError(f"train.beta = {beta} must be positive and finite")
    if objective != "dpo" and beta != type(run.train).beta:
        raise ConfigError(f'train.beta = {beta} has no effect: train.objective = "{objective}", not "dpo"')
    has_pairs = any(source.format == "pairs" for source in run.data.sources())
    if has_scalar_head(run.model) and objective != "reward":
        raise ModelError(
            f'the model has one output a token, and train.objective = "{objective}" needs logits: name a model with an '
            'output matrix, or set train.objective = "reward"'
        )
    if run.on_pairs and not has_pairs:
        raise ConfigError(
            f'train.objective = "{objective}" needs pairs: give --data a file of them, with data.format = "pairs"'
        )
    if not run.on_pairs:
        if has_pairs:
            raise ConfigError(
                'data.format = "pairs" needs train.objective = "reward" or "dpo": set one for the preferences of '
                f"{run.data.sources()[0].path}, or give text or conversations"
            )
        return
    degree = Layout.of(run.cluster, run.plan).data_degree
    if run.train.batch % degree:
        raise PlanError(
            f"{counted(run.train.batch, 'pair')} in a step do not divide among {degree} data ranks: make train.batch a "
            f"multiple of {degree}"
        )
    if is_context_parallel(Mesh.of(run.cluster, run.plan), run.plan):
        raise PlanError("pairs need whole rows: leave out the context axis and balance")
    if run.plan.outer is not None:
        raise PlanError(f'train.objective = "{objective}" is not implemented for islands: leave plan.outer out')
    if run.balance is not None:
        raise ConfigError(f'[balance] is not implemented for train.objective = "{objective}": leave it out')
    if run.lora is not None and objective == "reward":
        raise ConfigError('[lora] would leave the score of train.objective = "reward" as it began: leave it out')


def with_whole_pairs(run: "RunConfig", free: Collection[str]) -> "RunConfig":
    """The run with a pair in its micro-batch, where it trains on pairs and the plan leaves the number `free`.

    Raises `PlanError` where the plan gives an odd one.
    """
    if not run.on_pairs or run.plan.micro_batch % 2 == 0:
        return run
    if "micro_batch" not in free:
        raise PlanError(
            f"plan.micro_batch = {run.plan.micro_batch} is odd, and both sequences of a pair are in one micro-batch: "
            "make it even, or leave it out"
        )
    return replace(run, plan=replace(run.plan, micro_batch=2))

"""Rules of a run that is evaluated while it trains."""

from typing import TYPE_CHECKING

from terrace.base.errors import ConfigError, did_you_mean
from terrace.data.config import HOLDOUT
from terrace.model.facts import refuse_looking_ahead
from terrace.train.keys import TrainConfig

if TYPE_CHECKING:
    from terrace.train.config import RunConfig


def check_evaluation(run: "RunConfig") -> None:
    """Raise `ConfigError` for keys of evaluations that cannot have an effect, or `ModelError` for a model."""
    train, names = run.train, [*([HOLDOUT] if run.data.holdout else []), *run.data.eval]
    if not train.eval_every:
        if run.data.eval:
            raise ConfigError("data.eval has no effect: train.eval_every = 0; set it to a number of steps")
        for key in ("keep_best", "eval_batches"):
            if getattr(train, key) != getattr(TrainConfig, key):
                raise ConfigError(f"train.{key} has no effect: train.eval_every = 0; set it to a number of steps")
        return
    if run.on_pairs:
        raise ConfigError(
            f"train.eval_every = {train.eval_every} evaluates the prediction of tokens, and train.objective = "
            f"{train.objective!r} trains on pairs: leave it out"
        )
    if not names:
        raise ConfigError(
            f"train.eval_every = {train.eval_every}, but there is nothing to evaluate: hold out a part of the data "
            "(data.holdout = 0.01), or name other data (data.eval.NAME = PATH)"
        )
    if train.keep_best and train.keep_best not in names:
        known = did_you_mean(train.keep_best, names)
        raise ConfigError(f"train.keep_best = {train.keep_best!r} names nothing that is evaluated{known}")
    refuse_looking_ahead(run.model)

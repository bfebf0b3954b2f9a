"""The learning rate: linear warm-up, then one of four forms. A pure function of the step, so a resumed run follows it.

With p the progress from the end of the warm-up to the last step (for wsd, of the decay) and f the final fraction of the
peak rate, `train.final_lr_fraction`:

    cosine     f + (1 - f) (1 + cos(pi p)) / 2      Loshchilov and Hutter, arXiv 1608.03983, equation 5, one period
    linear     f + (1 - f) (1 - p)
    constant   1
    wsd        1, then over the last `train.decay_steps` steps    (Hu et al., MiniCPM, arXiv 2404.06395, section 4)
                   linear    f + (1 - f) (1 - p)
                   sqrt      f + (1 - f) (1 - sqrt(p))      (Haegele et al., arXiv 2405.18392, section 3: "1-sqrt")
"""

import math
from collections.abc import Mapping
from typing import Any

from terrace.base.errors import ConfigError
from terrace.base.schema import load
from terrace.runtime.settings import OptimizerConfig
from terrace.train.keys import TrainConfig

_TOLD = 0.01  # a rate that differs by less is no jump


def learning_rate(step: int, train: TrainConfig, optimizer: OptimizerConfig) -> float:
    """Learning rate of step `step` (from 0)."""
    if step < train.warmup_steps:
        return optimizer.lr * (step + 1) / train.warmup_steps
    last = train.final_lr_fraction
    return optimizer.lr * (last + (1 - last) * _height(step, train))


def rate_jump(step: int, earlier: Mapping[str, Any] | None, train: TrainConfig, optimizer: OptimizerConfig) -> str:
    """Words on how the rate of a resumed run's first step `step` (from 0) differs from the schedule of the `earlier`
    settings.

    "" if it does not differ, or if `earlier` cannot be read.
    """
    if not earlier:
        return ""
    try:
        before = load(TrainConfig, earlier.get("train", {}), "train")
        own = load(OptimizerConfig, earlier.get("optimizer", {}), "optimizer")
    except ConfigError:  # of another version
        return ""
    # Beyond its last step, the earlier schedule would have stayed where it ended.
    last, planned, now = (
        learning_rate(step - 1, before, own),
        learning_rate(min(step, before.steps), before, own),
        learning_rate(step, train, optimizer),
    )
    if math.isclose(now, planned, rel_tol=_TOLD):
        return ""
    return f"learning rate {last:.3g} -> {now:.3g} in one step, where the earlier settings have {planned:.3g},"


def _height(step: int, train: TrainConfig) -> float:
    if train.schedule == "constant":
        return 1.0
    first = train.warmup_steps
    if train.schedule == "wsd":
        # The rate stays at its peak between the warm-up and the decay.
        first = train.steps - decay_steps(train)
    progress = min(1.0, max(0, step - first) / max(1, train.steps - first))
    if train.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    return 1 - (math.sqrt(progress) if train.schedule == "wsd" and train.decay == "sqrt" else progress)


def decay_steps(train: TrainConfig) -> int:
    """Steps of wsd's decay; a fraction of the run is rounded to whole steps, at least one."""
    given = train.decay_steps
    return given if isinstance(given, int) else max(1, round(given * train.steps))

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

from terrace.runtime.settings import OptimizerConfig
from terrace.train.keys import TrainConfig


def learning_rate(step: int, train: TrainConfig, optimizer: OptimizerConfig) -> float:
    """Learning rate of step `step` (from 0)."""
    if step < train.warmup_steps:
        return optimizer.lr * (step + 1) / train.warmup_steps
    last = train.final_lr_fraction
    return optimizer.lr * (last + (1 - last) * _height(step, train))


def warmed_up(peak: float, step: int, num_steps: int) -> float:
    """Learning rate of step `step` (from 0) of a run of feedback: it rises for `num_steps` steps, and stays."""
    return peak * min(1.0, (step + 1) / max(1, num_steps))


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
    """Steps of the decay of wsd; a fraction of the run is rounded to whole steps, at least one."""
    given = train.decay_steps
    return given if isinstance(given, int) else max(1, round(given * train.steps))

"""The learning rate: linear warm-up, then a cosine."""

import math

from terrace.runtime.settings import AdamWConfig
from terrace.train.config import TrainConfig


def learning_rate(step: int, train: TrainConfig, optimizer: AdamWConfig) -> float:
    """Return the learning rate of step `step` (from 0). A pure function, so a resumed run follows it exactly."""
    if step < train.warmup_steps:
        return optimizer.lr * (step + 1) / train.warmup_steps
    progress = (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return optimizer.lr * (train.final_lr_fraction + (1 - train.final_lr_fraction) * cosine)

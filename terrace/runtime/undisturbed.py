"""Forwards between two steps that do not affect the second."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from terrace.comm.rounding import ErrorLog
from terrace.runtime.random_state import random_state, restored


@contextmanager
def undisturbed(modules: Iterable[nn.Module], errors: ErrorLog, device: torch.device) -> Iterator[None]:
    """Context for an evaluation: modules in eval mode; random state and rounding figures are restored afterwards."""
    # Only modules in training mode are switched back: others may have been set to eval on purpose.
    training = [module for module in modules if module.training]
    for module in training:
        module.eval()
    try:
        with restored(random_state(device), device), errors.aside():
            yield
    finally:
        for module in training:
            module.train()

"""Saves and restores a device's random state: recomputed dropout draws the same mask, evaluations change nothing."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from terrace.accelerator import random_state, set_random_state
from terrace.comm.rounding import ErrorLog


class restored:  # noqa: N801  (reads as a statement)
    def __init__(self, state: Tensor, device: torch.device) -> None:
        self._state = state
        self._device = device

    def __enter__(self) -> None:
        self._now = random_state(self._device)
        set_random_state(self._state, self._device)

    def __exit__(self, *_: object) -> None:
        set_random_state(self._now, self._device)


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

"""Saves and restores a device's random state: recomputed dropout draws the same mask, evaluations change nothing."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from terrace.comm.rounding import ErrorLog


def random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


class restored:  # noqa: N801  (reads as a statement)
    def __init__(self, state: Tensor, device: torch.device) -> None:
        self._state = state
        self._device = device

    def __enter__(self) -> None:
        self._now = random_state(self._device)
        self._set(self._state)

    def __exit__(self, *_: object) -> None:
        self._set(self._now)

    def _set(self, state: Tensor) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(state, self._device)
        else:
            torch.set_rng_state(state)


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

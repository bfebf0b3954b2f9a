"""Saves and restores a device's random state, so that recomputed dropout draws the same mask."""

import torch
from torch import Tensor


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

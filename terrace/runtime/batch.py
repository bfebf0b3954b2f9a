"""A micro-batch as it is handed to the engine, and a rank's part of one whose tokens are spread over ranks."""

import inspect
from collections.abc import Iterable, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from terrace.base.errors import ModelError
from terrace.model.attention import document_begins
from terrace.model.decoder import IGNORE_INDEX
from terrace.sequence.view import Spread

# Inputs, labels and, where a row holds several documents, of each token the position in its own: int64 (B, S). With a
# spread they are this rank's part, (1, T).
Batch = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor] | tuple[Tensor, Tensor, Tensor, Spread]


def positions_of(batch: Batch) -> Tensor | None:
    """Return the positions of a micro-batch, None where a row is one document."""
    return batch[2] if len(batch) > 2 else None


def spread_of(batch: Batch) -> Spread | None:
    """Return what a micro-batch's tokens are a part of, None where they are whole rows."""
    return batch[3] if len(batch) == 4 else None


def moved(batch: Batch, device: torch.device) -> Batch:
    """Return a micro-batch on a device; from pinned memory the host does not wait."""
    parts = (x.to(device, non_blocking=True) if isinstance(x, Tensor) else x for x in batch)
    return cast(Batch, tuple(parts))


def documents_of(batch: Batch) -> tuple[int, ...]:
    """Return with which tokens of a whole micro-batch, row after row, documents begin; every row begins one."""
    positions, (num, sequence) = positions_of(batch), batch[1].shape
    if positions is None:
        return tuple(range(0, num * sequence, sequence))
    return tuple(torch.nonzero(document_begins(positions).flatten()).flatten().tolist())


def localise(batch: Batch, spread: Spread) -> Batch:
    """Return what a rank has of a whole micro-batch, (1, T) each, the end filled up with tokens that do not count."""
    inputs, labels, positions = batch[0], batch[1], positions_of(batch)
    if positions is None:
        positions = torch.arange(labels.shape[1], device=labels.device).expand(labels.shape)

    def local(x: Tensor, filling: int) -> Tensor:
        flat = x.reshape(-1)
        held = torch.cat([flat[:0], *(flat[start:stop] for start, stop in spread.tokens)])
        return F.pad(held, (0, spread.num_held - held.numel()), value=filling)[None]

    return local(inputs, 0), local(labels, IGNORE_INDEX), local(positions, 0), spread


def check_positions(batches: Sequence[Batch], modules: Iterable[nn.Module]) -> None:
    """Raise `ModelError` when positions are not of the labels' shape, or a block of `modules` takes none."""
    given = [(batch[1], batch[2]) for batch in batches if len(batch) > 2]
    if not given:
        return
    for labels, positions in given:
        if positions.shape != labels.shape or positions.is_floating_point():
            raise ModelError(
                f"positions {tuple(positions.shape)} of {positions.dtype} must be integers of the labels' shape "
                f"{tuple(labels.shape)}"
            )
    for module in modules:
        try:
            inspect.signature(module.forward).bind(None, None)
        except TypeError:
            raise ModelError(
                f"{type(module).__name__}.forward takes no positions, but the micro-batch has some: give it a second "
                "argument, or leave positions away"
            ) from None

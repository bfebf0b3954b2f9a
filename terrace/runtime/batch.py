"""A micro-batch as it is handed to the engine."""

import inspect
from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from terrace.base.errors import ModelError

# Inputs, labels and, where a row holds several documents, of each token the position in its own: int64 (B, S).
Batch = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]


def positions_of(batch: Batch) -> Tensor | None:
    """Return the positions of a micro-batch, None where a row is one document."""
    return batch[2] if len(batch) == 3 else None


def check_positions(batches: Sequence[Batch], modules: Iterable[nn.Module]) -> None:
    """Raise `ModelError` when positions are not of the labels' shape, or a block of `modules` takes none."""
    given = [(batch[1], batch[2]) for batch in batches if len(batch) == 3]
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

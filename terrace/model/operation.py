"""Hook for pairs of an operation and the module that reads its result.

Layers call it with both, so that a runtime can drop the result that the reader would save for the backward, and
recompute it instead (terrace.runtime.replay).
"""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor


class Runs(Protocol):
    """Computes `reader(operation(*inputs))`."""

    def __call__(
        self, operation: Callable[..., Tensor], inputs: tuple[Tensor, ...], reader: Callable[[Tensor], Tensor]
    ) -> Tensor: ...


def keeping(operation: Callable[..., Tensor], inputs: tuple[Tensor, ...], reader: Callable[[Tensor], Tensor]) -> Tensor:
    """Run both normally; autograd saves what their backwards need."""
    return reader(operation(*inputs))

"""An operation of a layer with the module that takes its result: the place where a runtime may drop the result.

A layer hands over both, so that whoever runs them knows who keeps the result for a backward, and may compute it again
instead (terrace.runtime.replay).
"""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor


class Runs(Protocol):
    """Runs an operation on its inputs and gives the result to its reader; returns the reader's result."""

    def __call__(
        self, operation: Callable[..., Tensor], inputs: tuple[Tensor, ...], reader: Callable[[Tensor], Tensor]
    ) -> Tensor: ...


def keeping(operation: Callable[..., Tensor], inputs: tuple[Tensor, ...], reader: Callable[[Tensor], Tensor]) -> Tensor:
    """Run both; autograd keeps the tensors that their backwards need."""
    return reader(operation(*inputs))

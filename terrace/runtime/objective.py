"""Objectives of a step: a loss of the last block's output, or of numbers by token and the columns of a batch.

Losses are sums, divided once over all ranks and micro-batches: by the number of labels that count, or by the sum of a
batch's `weights` (`num_counted`). No divisor is of one micro-batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from terrace.base.errors import ModelError
from terrace.model import decoder
from terrace.runtime.batch import Batch
from terrace.runtime.token_numbers import TokenNumbers, token_numbers

OutputLoss = Callable[[Tensor, Tensor], Tensor]  # (output of the last block, labels) -> sum of the losses
Numbers = Callable[[nn.Module, Tensor, Tensor], TokenNumbers]  # of (last block, its input, labels)


def head_numbers(module: nn.Module, inputs: Tensor, labels: Tensor) -> TokenNumbers:
    """The numbers of a decoder's head on its input (B, S, H). Raises `ModelError` for another block."""
    if not isinstance(module, decoder.Head):
        raise ModelError(
            f"losses of token numbers need a decoder's Head as last block, not {type(module).__name__}: give a loss of "
            "its output instead"
        )
    return token_numbers(module.entering(inputs), module.weight, labels, module.cap)


@dataclass(frozen=True)
class TokenObjective:
    """A loss of token numbers: `loss` takes the numbers of a micro-batch and the batch, and returns a sum, a scalar.

    `numbers` has them from the last block; a tensor axis puts its own form there.
    """

    loss: Callable[[TokenNumbers, Batch], Tensor]
    numbers: Numbers = head_numbers

    def __call__(self, module: nn.Module, inputs: Tensor, batch: Batch) -> Tensor:
        """Run the last block and the loss on the block's input (B, S, H)."""
        return self.loss(self.numbers(module, _read(inputs, batch), batch.labels), batch)


@dataclass(frozen=True)
class ValueObjective:
    """A loss of values by token: `loss` takes those of a micro-batch, (B, S), and the batch, and returns a sum."""

    loss: Callable[[Tensor, Batch], Tensor]

    def __call__(self, module: nn.Module, inputs: Tensor, batch: Batch) -> Tensor:
        """Run the last block and the loss on the block's input (B, S, H)."""
        return self.loss(module(_read(inputs, batch)), batch)


Objective = OutputLoss | TokenObjective | ValueObjective


def _read(inputs: Tensor, batch: Batch) -> Tensor:
    """The part of the last block's input that has labels: a last block treats each token by itself."""
    return inputs if batch.reads is None else inputs.index_select(1, batch.reads[0])


def check_objective(last: nn.Module, objective: object) -> None:
    """Raise `ModelError` where a loss of values has no head of values as `last` block, or the reverse."""
    if isinstance(last, decoder.ValueHead) != isinstance(objective, ValueObjective):
        raise ModelError(
            f"a loss of values needs a ValueHead as last block, and a ValueHead such a loss; this is a "
            f"{type(last).__name__} with a {type(objective).__name__}: give a ValueObjective, or another model"
        )


def reading_tokens(objective: object) -> tuple[TokenObjective, list[TokenNumbers]]:
    """`objective` with a loss that puts the numbers of each micro-batch into the list.

    Raises `ModelError` for another than a `TokenObjective`.
    """
    found = list[TokenNumbers]()
    if not isinstance(objective, TokenObjective):
        raise ModelError("only an engine with a loss of token numbers scores tokens: give it a TokenObjective")

    def read(numbers: TokenNumbers, batch: Batch) -> Tensor:
        found.append(numbers)
        return cross_entropy(numbers, batch)

    return replace(objective, loss=read), found


def reading_values(objective: object) -> tuple[ValueObjective, list[Tensor]]:
    """As `reading_tokens`, for values (B, S) of a `ValueObjective`."""
    found = list[Tensor]()
    if not isinstance(objective, ValueObjective):
        raise ModelError("only an engine with a loss of values reads values: give it a ValueObjective")

    def read(values: Tensor, batch: Batch) -> Tensor:
        found.append(values)
        return values.masked_fill(batch.labels == decoder.IGNORE_INDEX, 0.0).sum()

    return ValueObjective(read), found


def cross_entropy(numbers: TokenNumbers, batch: Batch) -> Tensor:
    """SUM of the cross entropies of a micro-batch: `token_loss` as a loss of token numbers."""
    return -numbers.log_probs.sum()


def ignored_label(objective: object) -> int:
    """The label that does not count: the `ignore_index` of a loss module or of `functools.partial`, else -100."""
    given = objective.keywords if isinstance(objective, partial) else {}
    found = given.get("ignore_index", getattr(objective, "ignore_index", decoder.IGNORE_INDEX))
    return found if isinstance(found, int) else decoder.IGNORE_INDEX


def num_counted(batch: Batch, ignored: int) -> Tensor:
    """Contribution of a micro-batch to the divisor of losses and gradients, an fp64 scalar."""
    counted = batch.labels != ignored
    if batch.weights is None:
        return counted.sum().double()
    return torch.where(counted, batch.weights, 0.0).sum(dtype=torch.float64)

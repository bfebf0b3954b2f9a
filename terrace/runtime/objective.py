"""Training objectives: a loss of the last block's output, or of per-token numbers and the columns of a batch.

Losses are sums, divided once, over all ranks and micro-batches, by the number of labels that count or by the sum of
the batches' `weights` (`num_counted`), never per micro-batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from terrace.base.errors import ModelError
from terrace.model import decoder
from terrace.runtime.batch import Batch
from terrace.runtime.head import chunked_head
from terrace.runtime.token_numbers import TokenNumbers, token_numbers

OutputLoss = Callable[[Tensor, Tensor], Tensor]  # (output of the last block, labels) -> sum of the losses
Numbers = Callable[[nn.Module, Tensor, Tensor], TokenNumbers]  # of (last block, its input, labels)
# (Input of the last block, batch, scale of gradients) -> unscaled sum of the losses; runs the backward, too
ChunkedLoss = Callable[[Tensor, Batch, float], Tensor]


def head_numbers(module: nn.Module, inputs: Tensor, labels: Tensor) -> TokenNumbers:
    """Token numbers from a decoder's head and its input (B, S, H). Raises `ModelError` for another block."""
    if not isinstance(module, decoder.Head):
        raise ModelError(
            f"losses of token numbers need a decoder's Head as last block, not {type(module).__name__}: give a loss of "
            "its output instead"
        )
    return token_numbers(module.entering(inputs), module.weight, labels, module.cap)


@dataclass(frozen=True)
class TokenObjective:
    """A loss of token numbers: `loss` maps the numbers of a micro-batch and the batch to a sum, a scalar.

    `numbers` computes them from the last block; a tensor axis replaces it.
    """

    loss: Callable[[TokenNumbers, Batch], Tensor]
    numbers: Numbers = head_numbers

    def __call__(self, module: nn.Module, inputs: Tensor, batch: Batch) -> Tensor:
        """Run the last block and the loss on the block's input (B, S, H)."""
        return self.loss(self.numbers(module, _read(inputs, batch), batch.labels), batch)

    def in_chunks(self, module: nn.Module) -> ChunkedLoss | None:
        """The loss of a whole last block with its backward, in chunks of tokens, or None if it has no such form."""
        return None


@dataclass(frozen=True)
class ValueObjective:
    """A loss of per-token values: `loss` maps the values of a micro-batch, (B, S), and the batch to a sum."""

    loss: Callable[[Tensor, Batch], Tensor]

    def __call__(self, module: nn.Module, inputs: Tensor, batch: Batch) -> Tensor:
        """Run the last block and the loss on the block's input (B, S, H)."""
        return self.loss(module(_read(inputs, batch)), batch)


Objective = OutputLoss | TokenObjective | ValueObjective


def chunked_loss(module: nn.Module, objective: Objective) -> ChunkedLoss | None:
    """The objective's loss of a last block that runs in chunks, both backwards included, or None."""
    if isinstance(objective, TokenObjective):
        return objective.in_chunks(module)
    run = chunked_head(module, objective)
    return None if run is None else lambda inputs, batch, scale: run(inputs, batch.labels, scale)


def _read(inputs: Tensor, batch: Batch) -> Tensor:
    """The last block's input at the tokens that have labels; a last block processes each token separately."""
    return inputs if batch.reads is None else inputs.index_select(1, batch.reads[0])


def check_objective(last: nn.Module, objective: object) -> None:
    """Raise `ModelError` unless the loss is a loss of values exactly if the last block is a `ValueHead`."""
    if isinstance(last, decoder.ValueHead) != isinstance(objective, ValueObjective):
        raise ModelError(
            f"a loss of values needs a ValueHead as last block, and a ValueHead such a loss; this is a "
            f"{type(last).__name__} with a {type(objective).__name__}: give a ValueObjective, or another model"
        )
    if getattr(last, "depths", 1) > 1 and not getattr(objective, "reads_further_tokens", False):
        raise ModelError(
            "layers of the model predict further tokens, which only terrace.runtime.further_tokens.FurtherTokens "
            "learns: give it as the objective, or a model with num_nextn_predict_layers = 0"
        )


def reading_tokens(objective: object) -> tuple[TokenObjective, list[TokenNumbers]]:
    """`objective` with a loss that appends the numbers of each micro-batch to the returned list.

    Raises `ModelError` unless it is a `TokenObjective`.
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
    """Sum of the cross entropies of a micro-batch: `token_loss` in terms of token numbers."""
    return -numbers.log_probs.sum()


def ignored_label(objective: object) -> int:
    """The label that is not counted: `ignore_index` of a loss module or `functools.partial`, or else -100."""
    given = objective.keywords if isinstance(objective, partial) else {}
    found = given.get("ignore_index", getattr(objective, "ignore_index", decoder.IGNORE_INDEX))
    return found if isinstance(found, int) else decoder.IGNORE_INDEX


def num_counted(batch: Batch, ignored: int) -> Tensor:
    """What a micro-batch adds to the divisor of losses and gradients, an fp64 scalar."""
    counted = batch.labels != ignored
    if batch.weights is None:
        return counted.sum().double()
    return torch.where(counted, batch.weights, 0.0).sum(dtype=torch.float64)

"""Reads the last hidden states of a model, which another model's loss multiplies with the same output matrix.

A hidden state has H numbers and logits have V, so hidden states are what is kept and sent. The output matrix is read
with them: it is gathered for the forward, which then frees it, so a copy of this rank's part is taken.

Shape legend: B rows, S tokens of a row, H hidden, V vocabulary, V' this rank's rows of the output matrix.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from terrace.base.errors import ModelError
from terrace.model import decoder
from terrace.runtime.batch import Batch
from terrace.runtime.objective import TokenObjective, cross_entropy
from terrace.runtime.tensor.modules import VocabParallelHead


@dataclass(eq=False)
class OutputMatrix:
    """A model's output matrix as a loss reads it: `weight` (V', H) holds the rows `part`; `cap` bounds logits, 0: none.

    On a rank that has not read any, `weight` is empty.
    """

    weight: Tensor = field(default_factory=lambda: torch.empty(0, 0))
    part: slice = field(default_factory=lambda: slice(0))
    cap: float = 0.0

    def take(self, other: "OutputMatrix") -> None:
        """Hold the same rows and cap as `other`."""
        self.weight, self.part, self.cap = other.weight, other.part, other.cap

    def rows(self, part: slice) -> Tensor:
        """The rows `part` of the whole matrix, which must be among those held."""
        return self.weight[part.start - self.part.start : part.stop - self.part.start]


@dataclass(frozen=True)
class HiddenReader(TokenObjective):
    """An objective that reads hidden states (B, S, H) before the output matrix, and has no loss.

    Specs of the blocks must say so (terrace.model.blocks.reading_hidden): tensor ranks then exchange no numbers.
    """

    found: list[Tensor] = field(default_factory=list)
    matrix: OutputMatrix = field(default_factory=OutputMatrix)
    reads_matrix: bool = True
    copies: bool = True  # the matrix, whose memory is released after the forward

    def __call__(self, module: nn.Module, inputs: Tensor, batch: Batch) -> Tensor:
        """Read a micro-batch. Raises `ModelError` for a last block that is no decoder's head."""
        if not isinstance(module, (decoder.Head, VocabParallelHead)):
            raise ModelError(f"hidden states are read before a decoder's Head, and this is a {type(module).__name__}")
        if self.reads_matrix and not self.found:
            weight = module.weight.detach()
            part = module.part if isinstance(module, VocabParallelHead) else slice(0, len(module.weight))
            self.matrix.weight = weight.clone() if self.copies else weight
            self.matrix.part, self.matrix.cap = part, module.cap
        self.found.append(module.entering(inputs))
        return inputs.new_zeros((), dtype=torch.float64)


def hidden_reader() -> HiddenReader:
    """The objective of an engine whose hidden states are read (`Engine.hidden`)."""
    return HiddenReader(cross_entropy)


def reading(objective: object, *, reads_matrix: bool, copies: bool) -> HiddenReader:
    """`objective` with nothing read yet. Raises `ModelError` unless it is a `HiddenReader`."""
    if not isinstance(objective, HiddenReader):
        raise ModelError("only an engine whose objective reads hidden states has them: give it hidden_reader()")
    return replace(objective, found=[], matrix=OutputMatrix(), reads_matrix=reads_matrix, copies=copies)

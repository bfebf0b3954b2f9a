"""The loss of a model that also predicts tokens after the next one (DeepSeek-V3, arXiv 2412.19437, section 2.2).

With D layers of `terrace.model.decoder.FurtherTokenLayer`, token i has D + 1 representations. With w = `weight` and
the cross entropies C_k of the tokens i + k + 1, summed over the tokens i of a micro-batch,

    gradient of  C_0  +  w / D  sum over k of C_k

is divided by the tokens that count at depth 0, as the paper's 1/T does. The value of the loss is C_0 alone, which
compares with a model that has no such layers; the mean of C_1 .. C_D is a figure of its own. A token that is not of
the same document as token i is neither looked up nor predicted from i.

Shape legend: B rows, S tokens of a row, D depths beyond the next token, n = D + 1, H hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from terrace.base.errors import ModelError
from terrace.model import decoder
from terrace.model.decoder import IGNORE_INDEX
from terrace.runtime.batch import Batch
from terrace.runtime.head import loss_and_gradients
from terrace.runtime.objective import ChunkedLoss, TokenObjective, cross_entropy
from terrace.runtime.tensor.loss import vocabulary_losses
from terrace.runtime.tensor.modules import VocabParallelHead

AHEAD, LABELS = "further.tokens", "further.labels"  # columns of a batch, (B, S, D) each: tokens i + k, their labels


def further_tokens(inputs: Tensor, labels: Tensor, positions: Tensor | None, depths: int) -> tuple[Tensor, Tensor]:
    """Tokens i + k, for k of 1 .. D, and their labels; (B, S, D) each, of whole rows (B, S).

    Beyond the document of token i a token is 0 and its label is ignored.
    """
    ahead, later = (given.new_full((*given.shape, depths), value) for given, value in ((inputs, 0), (labels, -100)))
    for k in range(1, min(depths, inputs.shape[1] - 1) + 1):
        ahead[:, :-k, k - 1], later[:, :-k, k - 1] = inputs[:, k:], labels[:, k:]
        if positions is not None:
            # Inside a document positions rise by one.
            beyond = positions[:, k:] != positions[:, :-k] + k
            ahead[:, :-k, k - 1].masked_fill_(beyond, 0)
            later[:, :-k, k - 1].masked_fill_(beyond, IGNORE_INDEX)
    return ahead, later


def with_further_tokens(batch: Batch, depths: int) -> Batch:
    """The batch with the columns of `further_tokens`, which a part of rows has already."""
    if not depths or AHEAD in batch.columns:
        return batch
    ahead, labels = further_tokens(batch.inputs, batch.labels, batch.positions, depths)
    return replace(batch, columns={**batch.columns, AHEAD: ahead, LABELS: labels})


def further_columns(parts: Sequence[Tensor]) -> dict[str, Tensor]:
    """The columns from the tokens at each depth, then their labels, (B, S) each; none of no depths."""
    depths = len(parts) // 2
    return {AHEAD: torch.stack([*parts[:depths]], -1), LABELS: torch.stack([*parts[depths:]], -1)} if depths else {}


@dataclass(eq=False)
class Sums:
    """Cross entropies of further tokens, and their number, since the last `take` on this rank."""

    values: Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.float64))

    def add(self, entropy: Tensor, labels: Tensor) -> None:
        own = torch.stack([entropy.detach().double(), (labels != IGNORE_INDEX).sum()])
        self.values = self.values.to(own.device) + own

    def take(self) -> list[float]:
        taken: list[float] = self.values.tolist()
        self.values = torch.zeros_like(self.values)
        return taken


@dataclass(frozen=True)
class FurtherTokens(TokenObjective):
    """The loss of a micro-batch; an evaluation runs the same messages and has the loss of the next token alone."""

    reads_further_tokens = True

    weight: float = 0.0
    sums: Sums = field(default_factory=Sums)

    def __call__(self, module: nn.Module, inputs: Tensor, batch: Batch) -> Tensor:
        """Run the last block and the loss on the block's input; the vocabulary is cut over tensor ranks."""
        if not isinstance(module, VocabParallelHead):
            raise ModelError(f"further tokens need a decoder's Head as last block, not {type(module).__name__}")
        later = batch.columns[LABELS]
        labels = torch.cat((batch.labels.unsqueeze(-1), later), -1)  # (B, S, n)
        wide = module.entering(inputs)  # (B, S, n H)
        hidden = wide.reshape(len(labels), -1, wide.shape[-1] // labels.shape[-1])  # (B, S n, H)
        losses = vocabulary_losses(hidden, module.weight, labels.flatten(1), module.part, module.ranks, module.cap)
        losses = losses.view(labels.shape)
        further = losses[..., 1:].sum()
        if torch.is_grad_enabled():
            self.sums.add(further, later)
        weighted = further * (self.weight / later.shape[-1])
        return losses[..., 0].sum() + (weighted - weighted.detach())

    def in_chunks(self, module: nn.Module) -> ChunkedLoss | None:
        """The loss with its backward, for a whole `Head`."""
        if type(module) is not decoder.Head:
            return None

        def run(inputs: Tensor, batch: Batch, scale: float) -> Tensor:
            later = batch.columns[LABELS]
            depths = later.shape[-1]
            each = [(batch.labels, 1.0), *((later[..., k], self.weight / depths) for k in range(depths))]
            hidden = inputs.detach().flatten(0, 1).chunk(len(each), -1)
            gradient, found, rests = torch.empty_like(inputs), list[Tensor](), list[Tensor]()
            parts = gradient.flatten(0, 1).chunk(len(each), -1)
            for rows, part, (labels, weight) in zip(hidden, parts, each, strict=True):
                given = rows.contiguous(), module.weight, labels.flatten(), weight * scale
                loss, of_rows, rest = loss_and_gradients(*given, module.to_gradient, module.cap)
                part.copy_(of_rows)
                found.append(loss)
                rests += [] if rest is None else [rest]
            roots = [inputs, *(module.weight for _ in rests)]
            torch.autograd.backward(roots, [gradient, *rests])
            self.sums.add(torch.stack(found[1:]).sum(), later)
            return found[0]

        return run


def next_and_further_tokens(weight: float) -> FurtherTokens:
    """The objective of a model with layers that predict further tokens."""
    return FurtherTokens(cross_entropy, weight=weight)

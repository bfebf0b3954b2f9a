"""The loss of a student that learns from a teacher's distributions (Hinton et al., arXiv 1503.02531, section 2).

With logits x of the student and y of the teacher, a temperature T, p = softmax(y / T), q = softmax(x / T), a label l
and a weight w, a token's loss and its gradient are

    L = (1 - w) (log sum exp x - x[l])  +  w T^2 sum p (log p - log q)
    dL/dx = (1 - w) (softmax(x) - onehot(l))  +  w T (q - p)

Where rows are mixed in pairs (MixKD, Liang et al., arXiv 2011.00593, section 3), both models embed a share s of a row
and 1 - s of another, and a token has the labels of both: the first term is the mean of their cross entropies with these
shares. A label that is ignored takes its share of both terms with it. Every label of a pair has a whole share in all,
so the divisor of the loss stays the number of labels.

The factor T^2 keeps the size of the second gradient when T changes. Neither model's logits are ever whole: a chunk of
tokens has both, and its gradient is known at once, so all products run in the BACKWARD of the last block
(terrace.runtime.head). From the teacher, a token has its hidden state of H numbers, or k kept tokens.

Of the k kept tokens, the first k - m are the most probable, the set A, and m = max(1, k / 4) are drawn from all others
in proportion to their probabilities. With r = 1 - the sum of p over A, the second term is estimated by

    sum over A of p_i (log p_i - log q_i)  +  r / m  sum over draws j of (log p_j - log q_j)

and p in the gradient by p_i in A and r / m for each draw. Both estimates are unbiased (Anshumann et al., 2503.16870).
One outcome for all tokens outside A would give a lower bound instead, which is further off at a higher temperature.

Shape legend: N tokens, n tokens of a part, B rows, S tokens of a row, H hidden, V vocabulary, k tokens kept, L labels
of a token: 2 where rows are mixed, else 1.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from terrace.base.errors import ModelError
from terrace.model import decoder
from terrace.model.decoder import IGNORE_INDEX, other_of_pair
from terrace.model.loss_chunks import part_rows, slices
from terrace.runtime.batch import Batch
from terrace.runtime.head import cap_, loss_and_gradients
from terrace.runtime.hidden import OutputMatrix
from terrace.runtime.objective import ChunkedLoss, TokenObjective, cross_entropy
from terrace.runtime.tensor.distilled import vocabulary_divergences
from terrace.runtime.tensor.loss import vocabulary_losses
from terrace.runtime.tensor.modules import VocabParallelHead

HIDDEN = "teacher.hidden"  # column of a batch: the teacher's hidden states (B, S, H)
IDS, LOG_PROBS = "teacher.ids", "teacher.log_probs"  # k of its tokens, at the temperature: (B, S, k) each

_OPERANDS = 6  # as large as the logits of a part, in fp32 at least, while its gradient is computed

# (Tokens of a chunk (n), their student's log q (n, V)) -> the teacher's log p where p is not 0, and p, (n, V) each
Targets = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(eq=False)
class Sums:
    """Sums over tokens since the last `take` on this rank: cross entropies, divergences, number of tokens."""

    values: Tensor = field(default_factory=lambda: torch.zeros(3, dtype=torch.float64))

    def add(self, entropy: Tensor, divergence: Tensor, labels: Tensor) -> None:
        """Add the sums of a micro-batch with these labels."""
        own = torch.stack([entropy.detach().double(), divergence.detach().double(), (labels != IGNORE_INDEX).sum()])
        self.values = self.values.to(own.device) + own

    def take(self) -> list[float]:
        taken: list[float] = self.values.tolist()
        self.values = torch.zeros_like(self.values)
        return taken


@dataclass(frozen=True, kw_only=True)
class Blend:
    """The weight w of the teacher, above 0 and at most 1, and the temperature T, above 0."""

    weight: float
    temperature: float

    def loss(self, entropy: Tensor, divergence: Tensor) -> Tensor:
        """Loss from sums of cross entropies and of divergences."""
        return (1.0 - self.weight) * entropy + self.weight * self.temperature**2 * divergence


@dataclass(frozen=True)
class Distilled(TokenObjective):
    """The loss of a batch with a column of the teacher's; without one, as in an evaluation, cross entropy alone.

    `matrix` is the teacher's output matrix for batches with hidden states, set before each step. `num_labels` is that
    of the declared loss.
    """

    blend: Blend = field(default_factory=lambda: Blend(weight=1.0, temperature=1.0))
    matrix: OutputMatrix = field(default_factory=OutputMatrix)
    sums: Sums = field(default_factory=Sums)
    num_labels: int = 1

    def __call__(self, module: nn.Module, inputs: Tensor, batch: Batch) -> Tensor:
        """Run the last block and the loss on the block's input; the vocabulary is cut over tensor ranks."""
        if not isinstance(module, VocabParallelHead):
            raise ModelError(f"a teacher needs a decoder's Head as last block, not {type(module).__name__}")
        student = OutputMatrix(module.weight, module.part, module.cap)
        hidden = module.entering(inputs)
        if HIDDEN not in batch.columns:
            # Padded to the messages that the program declares.
            given = module.weight, batch.labels, module.part, module.ranks, module.cap
            return vocabulary_losses(hidden, *given, unused=3 + self.num_labels).sum()
        entropies, divergences = vocabulary_divergences(
            hidden, student, batch.columns[HIDDEN], self.matrix, *labels_of(batch), self.blend.temperature, module.ranks
        )
        entropy, divergence = entropies.sum(), divergences.sum()
        self.sums.add(entropy, divergence, batch.labels)
        return self.blend.loss(entropy, divergence)

    def in_chunks(self, module: nn.Module) -> ChunkedLoss | None:
        """The loss with its backward, for a whole `Head`. A batch must have a column of the teacher's."""
        if type(module) is not decoder.Head:
            return None

        def run(inputs: Tensor, batch: Batch, scale: float) -> Tensor:
            hidden: Tensor = module.entering(inputs)  # (B, S, H)
            flat, (labels, shares) = hidden.detach().flatten(0, 1), labels_of(batch)
            targets, found = self._targets(batch), torch.zeros(2, dtype=torch.float64, device=flat.device)

            def to_gradient(logits: Tensor, tokens: Tensor, scale: float) -> Tensor:
                found.add_(gradient_(logits, labels[tokens], shares[tokens], tokens, targets, self.blend, scale))
                return found.new_zeros(())

            # A chunk's tokens by index, since its labels are not all that the gradient reads.
            indices = torch.arange(len(flat), device=flat.device)
            _, gradient, rest = loss_and_gradients(flat, module.weight, indices, scale, to_gradient, module.cap)
            of_weight = () if rest is None else ((module.weight, rest),)
            roots, gradients = zip((hidden, gradient.view_as(hidden)), *of_weight, strict=True)
            torch.autograd.backward(roots, gradients)
            self.sums.add(found[0], found[1], batch.labels)
            return self.blend.loss(found[0], found[1])

        return run

    def _targets(self, batch: Batch) -> Targets:
        if HIDDEN in batch.columns:
            return of_hidden(batch.columns[HIDDEN].flatten(0, 1), self.matrix, self.blend.temperature)
        return of_top_tokens(batch.columns[IDS].flatten(0, 1), batch.columns[LOG_PROBS].flatten(0, 1))


def distilled(blend: Blend, num_labels: int = 1) -> Distilled:
    """The objective of a student; with two labels of a token, for batches whose rows are mixed."""
    return Distilled(cross_entropy, blend=blend, num_labels=num_labels)


def labels_of(batch: Batch) -> tuple[Tensor, Tensor]:
    """Labels of each token and their shares, (N, L) each; a label that is ignored has the share 0."""
    labels = batch.labels.unsqueeze(-1)
    shares = torch.ones_like(labels, dtype=torch.float64)
    if batch.mix is not None:
        own = batch.mix[:, None, None].expand_as(labels)
        labels, shares = torch.cat([labels, other_of_pair(labels)], -1), torch.cat([own, 1 - own], -1)
    shares = shares.masked_fill(labels == IGNORE_INDEX, 0.0)
    return labels.flatten(0, 1), shares.flatten(0, 1)


def of_hidden(hidden: Tensor, matrix: OutputMatrix, temperature: float) -> Targets:
    """Targets from the teacher's hidden states (N, H) and its output matrix."""

    def targets(tokens: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
        logits = cap_(hidden[tokens] @ matrix.weight.t(), matrix.cap).to(log_q.dtype)
        log_p = torch.log_softmax(logits.div_(temperature), -1)
        return log_p, log_p.exp()

    return targets


def num_drawn(k: int) -> int:
    """How many of k kept tokens are drawn from those that are not the most probable; they come last."""
    return max(1, k // 4)


def of_top_tokens(ids: Tensor, log_probs: Tensor) -> Targets:
    """Targets from k kept tokens (N, k) and their log-probabilities at the temperature."""
    m = num_drawn(ids.shape[1])

    def targets(tokens: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
        at, kept = ids[tokens].long(), log_probs[tokens].to(log_q.dtype)
        weights = kept.exp()
        # Rounded probabilities may add up to more than 1.
        weights[:, -m:] = (1.0 - weights[:, :-m].sum(-1, keepdim=True)).clamp_(min=0.0) / m
        p = torch.zeros_like(log_q).scatter_add_(-1, at, weights)  # a token may be drawn twice
        return torch.zeros_like(log_q).scatter_(-1, at, kept), p

    return targets


def gradient_(
    logits: Tensor, labels: Tensor, shares: Tensor, tokens: Tensor, targets: Targets, blend: Blend, scale: float = 1.0
) -> Tensor:
    """Replace logits (n, V) by `scale` times the gradient of the loss, in place; labels and shares are (n, L).

    Returns the sums of the cross entropies and of the divergences over tokens that count, (2) in fp64.
    """
    wide, t, w = torch.promote_types(logits.dtype, torch.float32), blend.temperature, blend.weight
    at, shares = labels.masked_fill(labels == IGNORE_INDEX, 0), shares.to(wide)
    whole = shares.sum(-1, keepdim=True)
    found = logits.new_empty(2, len(logits), dtype=wide)
    for rows in slices(len(logits), part_rows(len(logits), logits.shape[1], logits.device.type, _OPERANDS)):
        x = logits[rows].to(wide)
        log_q = torch.log_softmax(x / t, -1)
        log_p, p = targets(tokens[rows], log_q)
        q = log_q.exp()
        # A token of probability 0 has the log-probability -inf, and 0 x inf would be NaN.
        found[1, rows] = log_p.clamp_(min=torch.finfo(wide).min).sub_(log_q).mul_(p).sum(-1)
        hard = torch.log_softmax(x, -1)
        found[0, rows] = -(hard.gather(-1, at[rows]) * shares[rows]).sum(-1)
        hard.exp_().mul_(whole[rows]).scatter_add_(-1, at[rows], -shares[rows])
        soft = q.sub_(p).mul_(whole[rows])
        logits[rows] = hard.mul_(1.0 - w).add_(soft, alpha=w * t).mul_(scale)
    found[1] *= whole.squeeze(-1)
    return found.masked_fill_(whole.squeeze(-1) == 0, 0.0).sum(1, dtype=torch.float64)

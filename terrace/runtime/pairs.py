"""Training on pairs of a preferred and a rejected response: losses, and objectives for an engine.

Losses are sums over pairs, to be divided by the number of pairs in a step. A micro-batch for the objectives holds
whole pairs: rows 2 k and 2 k + 1 are the preferred and the rejected response to one prompt.

Shape legend: P pairs, B = 2 P rows of a micro-batch, S tokens of a row.
"""

from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from terrace.model.decoder import IGNORE_INDEX
from terrace.runtime.batch import Batch
from terrace.runtime.objective import TokenObjective, ValueObjective
from terrace.runtime.shapes import check_shapes
from terrace.runtime.token_numbers import TokenNumbers

REFERENCE = "reference"  # the column with the reference's log-probability of a response, at each of its tokens


def bradley_terry(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Sum of -ln sigmoid(r_chosen - r_rejected) over pairs of rewards (P) (Ouyang et al., 2203.02155, eq. 1).

    Raises `DataError` if shapes differ.
    """
    check_shapes(chosen=chosen, rejected=rejected)
    return -F.logsigmoid(chosen - rejected).sum()


def dpo(
    chosen: Tensor, rejected: Tensor, reference_chosen: Tensor, reference_rejected: Tensor, *, beta: float
) -> Tensor:
    """Sum of -ln sigmoid(beta (margin - reference's margin)) over pairs (Rafailov et al., 2305.18290, eq. 7).

    Arguments are log-probabilities (P) of whole responses, summed over their tokens. A margin is the preferred
    response's minus the rejected one's. Raises `DataError` if shapes differ.
    """
    check_shapes(
        chosen=chosen, rejected=rejected, reference_chosen=reference_chosen, reference_rejected=reference_rejected
    )
    return bradley_terry(beta * (chosen - reference_chosen), beta * (rejected - reference_rejected))


@dataclass(eq=False)
class PairFigures:
    """Sums over pairs since the last `take` on this rank: correct pairs, reward margins, number of pairs.

    A pair is correct if the preferred response has the higher reward. Under DPO the reward of a response is beta (ln
    pi - ln pi_reference).
    """

    sums: Tensor = field(default_factory=lambda: torch.zeros(3, dtype=torch.float64))

    def add(self, chosen: Tensor, rejected: Tensor) -> None:
        """Count pairs with these rewards, (P) each."""
        margins = (chosen - rejected).detach().double()
        seen = torch.stack([(margins > 0).sum().double(), margins.sum(), margins.new_full((), len(margins))])
        self.sums = self.sums.to(seen.device) + seen

    def take(self) -> list[float]:
        taken: list[float] = self.sums.tolist()
        self.sums = torch.zeros_like(self.sums)
        return taken


def reward_objective(figures: PairFigures) -> ValueObjective:
    """Bradley-Terry loss of the values at each row's single label."""

    def loss(values: Tensor, batch: Batch) -> Tensor:
        # All other tokens add nothing; choosing the one by a mask would wait for the device.
        rewards = values.masked_fill(batch.labels == IGNORE_INDEX, 0.0).sum(1)
        chosen, rejected = rewards.view(-1, 2).unbind(1)
        figures.add(chosen, rejected)
        return bradley_terry(chosen, rejected)

    return ValueObjective(loss)


def dpo_objective(figures: PairFigures, beta: float) -> TokenObjective:
    """DPO loss of each row's labels, with the reference's log-probabilities in the column `REFERENCE`."""

    def loss(numbers: TokenNumbers, batch: Batch) -> Tensor:
        policy = numbers.log_probs.sum(1)
        # The same at every label of a row.
        reference = batch.columns[REFERENCE].amin(1).to(policy.dtype)
        rewards = beta * (policy - reference)
        chosen, rejected = rewards.view(-1, 2).unbind(1)
        figures.add(chosen, rejected)
        return dpo(*policy.view(-1, 2).unbind(1), *reference.view(-1, 2).unbind(1), beta=beta)

    return TokenObjective(loss)


def reward_batch(batch: Batch) -> Batch:
    """A micro-batch of pairs whose rows take their reward at the response's last token.

    That token is the one that the last label names. Each row adds 1/2 to the divisor.
    """
    places = torch.arange(batch.labels.shape[1])
    last = torch.where(batch.labels != IGNORE_INDEX, places, -1).amax(1, keepdim=True) + 1
    is_last = places == last
    labels = torch.where(is_last, batch.inputs, IGNORE_INDEX)
    return replace(batch, labels=labels, weights=0.5 * is_last.double())


def dpo_batch(batch: Batch, reference: Tensor) -> Batch:
    """A micro-batch of pairs with each response's `reference` log-probability, (B). Rows add 1/2 to the divisor."""
    counted = batch.labels != IGNORE_INDEX
    # At the first label alone, so that sums over a row are exact.
    is_first = counted & (counted.cumsum(1) == 1)
    columns = {REFERENCE: reference.unsqueeze(1).expand(batch.labels.shape).contiguous()}
    return replace(batch, columns=columns, weights=0.5 * is_first.double())

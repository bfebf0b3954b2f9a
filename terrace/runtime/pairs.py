"""Learning from pairs of responses, a preferred and a rejected one: losses, and objectives of an engine.

Losses are SUMS over pairs, to be divided by all pairs of a step. A micro-batch for the objectives has whole pairs: rows
2 k and 2 k + 1 are the preferred and the rejected response to one prompt.

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
    """Sum of -ln sigmoid(r_chosen - r_rejected) over rewards (P) each (Ouyang et al., 2203.02155, eq. 1).

    Raises `DataError` for tensors of other shapes.
    """
    check_shapes(chosen=chosen, rejected=rejected)
    return -F.logsigmoid(chosen - rejected).sum()


def dpo(
    chosen: Tensor, rejected: Tensor, reference_chosen: Tensor, reference_rejected: Tensor, *, beta: float
) -> Tensor:
    """Sum of -ln sigmoid(beta (margin - reference's margin)) over pairs (Rafailov et al., 2305.18290, eq. 7).

    All are log-probabilities of whole responses, (P): sums over their tokens. A margin is that of the
    preferred response over the rejected one. Raises `DataError` for tensors of other shapes.
    """
    check_shapes(
        chosen=chosen, rejected=rejected, reference_chosen=reference_chosen, reference_rejected=reference_rejected
    )
    return bradley_terry(beta * (chosen - reference_chosen), beta * (rejected - reference_rejected))


@dataclass(eq=False)
class PairFigures:
    """Sums over the pairs that a rank has seen since they were taken: right ones, margins of rewards, pairs.

    A pair is right where the preferred response has the higher reward; under DPO the reward of a response is
    beta (ln pi - ln pi_reference).
    """

    sums: Tensor = field(default_factory=lambda: torch.zeros(3, dtype=torch.float64))

    def add(self, chosen: Tensor, rejected: Tensor) -> None:
        """Count pairs with rewards (P) each."""
        margins = (chosen - rejected).detach().double()
        seen = torch.stack([(margins > 0).sum().double(), margins.sum(), margins.new_tensor(float(len(margins)))])
        self.sums = self.sums.to(seen.device) + seen

    def take(self) -> list[float]:
        """The sums so far, which begin anew."""
        taken: list[float] = self.sums.tolist()
        self.sums = torch.zeros_like(self.sums)
        return taken


def reward_objective(figures: PairFigures) -> ValueObjective:
    """Bradley-Terry of the values at the one label of each row."""

    def loss(values: Tensor, batch: Batch) -> Tensor:
        # All other tokens add nothing; choosing the one by a mask would wait for the device.
        rewards = values.masked_fill(batch.labels == IGNORE_INDEX, 0.0).sum(1)
        chosen, rejected = rewards.view(-1, 2).unbind(1)
        figures.add(chosen, rejected)
        return bradley_terry(chosen, rejected)

    return ValueObjective(loss)


def dpo_objective(figures: PairFigures, beta: float) -> TokenObjective:
    """DPO of the labels of each row, with the reference's log-probabilities in the column `REFERENCE`."""

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
    """A micro-batch of pairs whose rows have their reward at the last token of the response.

    That is where the last label points; each row adds 1/2 to the divisor.
    """
    places = torch.arange(batch.labels.shape[1])
    last = torch.where(batch.labels != IGNORE_INDEX, places, -1).amax(1, keepdim=True) + 1
    is_last = places == last
    labels = torch.where(is_last, batch.inputs, IGNORE_INDEX)
    return replace(batch, labels=labels, weights=0.5 * is_last.double())


def dpo_batch(batch: Batch, reference: Tensor) -> Batch:
    """A micro-batch of pairs with the `reference` log-probability of each row's response, (B); divisor as above."""
    counted = batch.labels != IGNORE_INDEX
    # At the first label alone, so that sums over a row are exact.
    is_first = counted & (counted.cumsum(1) == 1)
    columns = {REFERENCE: reference.unsqueeze(1).expand(batch.labels.shape).contiguous()}
    return replace(batch, columns=columns, weights=0.5 * is_first.double())

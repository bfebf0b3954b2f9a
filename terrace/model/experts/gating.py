"""What gates and losses of routers know of a pass: which of its tokens take part, and where these stand in the run.

Padding and documents without a label take no part: no router scores them, no expert gets them, no loss and no choice
counts them, and a mixture adds only its shared expert to them. A model without a `Gating` counts all tokens, and has no
losses of routers.

Shape legend: T tokens of a pass that take part, B sequences of it, E experts, k experts of a token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from terrace.model.experts.balance import LOSSES, BalanceConfig
from terrace.model.experts.config import ExpertsConfig
from terrace.model.experts.gates import Choice
from terrace.model.experts.losses import add_losses, sequence_loss, z_loss


@dataclass(frozen=True, eq=False)
class Passage:
    """The tokens of one micro-batch that take part in choices."""

    kept: Tensor | None  # (T) int64, their indexes among all tokens; None: all take part
    sequences: Tensor | None  # (T) int64, ascending, the sequence of each; None where ranks share sequences
    num_sequences: int = 0


class Gating:
    """The passage of the micro-batch that runs, and the losses of all routers of a rank, summed up by backwards.

    A backward runs once for each forward that counts, so a recomputed forward counts nothing twice.
    """

    def __init__(self, balance: BalanceConfig, device: torch.device | str = "cpu") -> None:
        self.balance = balance
        self.passage: Passage | None = None
        self.trains = False
        self.sums = torch.zeros(len(LOSSES), dtype=torch.float64, device=device)

    def balanced(self, choice: Choice, logits: Tensor, config: ExpertsConfig) -> Choice:
        """`choice` of logits (T, E), with the losses of the run at its weights."""
        balance = self.balance
        if not (self.trains and balance.losses and torch.is_grad_enabled()):
            return choice
        losses = [logits.new_zeros(())] * len(LOSSES)
        if balance.sequence:
            passage, scores = self.passage, choice.scores
            assert passage is not None, "a micro-batch runs"
            assert scores is not None, "gates have scores"
            assert passage.sequences is not None, "checked before the first step"
            each = sequence_loss(scores, choice.experts, passage.sequences, passage.num_sequences)
            losses[LOSSES.index("sequence")] = balance.sequence * each
        if balance.z:
            losses[LOSSES.index("z")] = balance.z * z_loss(logits)
        return choice._replace(weights=add_losses(choice.weights, torch.stack(losses), self.sums))

"""The tokens of a pass that take part in choices, and their places in the run, as gates and losses of routers see them.

Padding and documents without a label take no part: no router scores them, no expert gets them, no loss and no choice
counts them, and a mixture adds only its shared expert to them. A model without a `Gating` counts all tokens, and has no
losses of routers.

Shape legend: T tokens of a pass that take part, B sequences of it, E experts, k experts of a token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from terrace.model.experts.balance import FIGURES, BalanceConfig
from terrace.model.experts.capacity import bounded
from terrace.model.experts.config import ExpertsConfig
from terrace.model.experts.gates import Choice
from terrace.model.experts.gates.noisy import normal
from terrace.model.experts.losses import add_losses, sequence_loss, z_loss


@dataclass(frozen=True, eq=False)
class Passage:
    """The tokens of one micro-batch that take part in choices."""

    kept: Tensor | None  # (T) int64, their indexes among all tokens; None: all take part
    sequences: Tensor | None  # (T) int64, ascending, the sequence of each; None where ranks share sequences
    num_sequences: int = 0
    places: Tensor | None = None  # (T) int64, in the run

    @staticmethod
    def of_rows(shape: torch.Size, device: torch.device) -> "Passage":
        """Whole rows of tokens (B, S), all of which take part."""
        rows = torch.arange(shape[0], device=device)
        return Passage(None, rows.repeat_interleave(shape[1]), shape[0])


class Gating:
    """The passage of the micro-batch that runs, and the figures of all routers of a rank, summed up by backwards.

    A backward runs once for each forward that counts, so a recomputed forward counts nothing twice.
    """

    def __init__(self, balance: BalanceConfig, device: torch.device | str = "cpu", seed: int = 0) -> None:
        self.balance, self.seed = balance, seed
        self.passage: Passage | None = None
        self.trains = False
        self.sums = torch.zeros(len(FIGURES), dtype=torch.float64, device=device)

    def noise(self, layer: int, passage: Passage, num_experts: int) -> Tensor | None:
        """The noise (T, E) on the logits of a layer; None outside training."""
        if not self.trains:
            return None
        assert passage.places is not None, "checked before the first step"
        return normal(self.seed, layer, passage.places, num_experts)

    def balanced(self, choice: Choice, logits: Tensor, passage: Passage, config: ExpertsConfig) -> Choice:
        """`choice` of logits (T, E) within the capacity of experts, with the losses of the run at its weights."""
        balance = self.balance
        if not (self.trains and (balance.losses or balance.capacity)):
            return choice
        figures = dict.fromkeys(FIGURES, logits.new_zeros(()))
        if balance.z:
            figures["z"] = balance.z * z_loss(logits)
        if balance.sequence or balance.capacity:
            assert passage.sequences is not None, "checked before the first step"
            rows = passage.sequences, passage.num_sequences
        if balance.sequence:
            assert choice.scores is not None, "gates have scores"
            figures["sequence"] = balance.sequence * sequence_loss(choice.scores, choice.experts, *rows)
        if balance.capacity:
            choice, dropped = bounded(choice, *rows, balance.capacity, config)
            figures["dropped"] = dropped.to(logits.dtype)
        return choice._replace(weights=add_losses(choice.weights, torch.stack(list(figures.values())), self.sums))

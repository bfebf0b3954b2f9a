"""The tokens of a pass that take part in choices, and their places in the run, as gates and losses of routers see them.

Padding and documents without a label take no part: no router scores them, no expert gets them, no loss and no choice
counts them, and a mixture adds only its shared expert to them. A model without a `Gating` counts all tokens, and has no
losses of routers.

Shape legend: T tokens of a pass that take part, B sequences of it, E experts, k experts of a token.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from terrace.model.balance import FIGURES, BalanceConfig
from terrace.model.experts.capacity import bounded, without
from terrace.model.experts.config import ExpertsConfig
from terrace.model.experts.gates import Choice
from terrace.model.experts.gates.noisy import normal
from terrace.model.experts.losses import add_losses, choices_by_sequence, loads_of, share_loss, z_loss


@dataclass(frozen=True, eq=False)
class Passage:
    """The tokens of one micro-batch that take part in choices."""

    kept: Tensor | None  # (T) int64, their indexes among all tokens; None: all take part
    sequences: Tensor | None  # (T) int64, the sequence of each, ascending on one rank; None: not needed
    num_sequences: int = 0
    places: Tensor | None = None  # (T) int64, in the run
    weights: Tensor | None = None  # (T) fp64, what each counts in losses of routers; None: 1

    @staticmethod
    def of_rows(shape: torch.Size, device: torch.device) -> "Passage":
        """Whole rows of tokens (B, S), all of which take part."""
        rows = torch.arange(shape[0], device=device)
        return Passage(None, rows.repeat_interleave(shape[1]), shape[0])


@dataclass(eq=False)
class Kept:
    """The choices of a recomputed block's first forward on a micro-batch, which its second forward repeats.

    Chosen again, equal scores or rounding could send rows another way.
    """

    # (T, k) int32; of a gate that chooses for tokens, `~i` is expert i beyond its capacity; where experts choose, -1 is
    # none (the two exclude each other)
    experts: Tensor | None = None
    choices: Tensor | None = None  # (B, E), of whole sequences where ranks share them

    def keep(self, chosen: Tensor, within: Tensor) -> None:
        """Remember choices (T, k), of which those `within` capacity were made: the same tensor where there is none."""
        self.experts = (chosen if chosen is within else torch.where(within < 0, ~chosen, chosen)).int()


class Gating:
    """The passage of the micro-batch that runs, and the figures of all routers of a rank, summed up by backwards.

    A backward runs once for each forward that counts, so a recomputed forward counts nothing twice. `choices` has the
    tokens of each expert (E) in the step before, by layer. `kept` is of the block that runs, if it runs twice.
    `add_up` sums choices by sequence (B, E) over the ranks that share sequences, if any do.
    """

    def __init__(self, balance: BalanceConfig, device: torch.device | str = "cpu", seed: int = 0) -> None:
        self.balance, self.seed = balance, seed
        self.passage: Passage | None = None
        self.kept: Kept | None = None
        self.add_up: Callable[[Tensor], Tensor] | None = None
        self.choices: Mapping[int, Tensor] = {}
        self.trains = False
        self.sums = torch.zeros(len(FIGURES), dtype=torch.float64, device=device)

    def noise(self, layer: int, passage: Passage, num_experts: int) -> Tensor | None:
        """The noise (T, E) on the logits of a layer; None outside training."""
        if not self.trains:
            return None
        assert passage.places is not None, "checked before the first step"
        return normal(self.seed, layer, passage.places, num_experts)

    def again(self) -> Tensor | None:
        """The choices (T, k) of the first forward, as in `Kept`; None in that forward, and where it is the only one."""
        experts = None if self.kept is None else self.kept.experts
        return None if experts is None else experts.long()

    def balanced(self, choice: Choice, logits: Tensor, passage: Passage, config: ExpertsConfig, layer: int) -> Choice:
        """`choice` of a layer's logits (T, E) within the capacity of experts, with the run's losses at its weights."""
        balance = self.balance
        if not self.trains and balance.sequence and self.add_up is not None:
            self._of_sequences(choice, passage, config)  # an evaluation sends what a step sends
        if not (self.trains and (balance.losses or balance.capacity)):
            return choice
        figures, weights = dict.fromkeys(FIGURES, logits.new_zeros(())), passage.weights
        if balance.z:
            figures["z"] = balance.z * z_loss(logits, weights)
        if balance.step:
            assert choice.scores is not None, "gates have scores"
            figures["step"] = balance.step * share_loss(
                choice.scores, loads_of(self.choices[layer], logits.dtype), weights
            )
        if balance.sequence or balance.capacity:
            assert passage.sequences is not None, "checked before the first step"
            rows = passage.sequences, passage.num_sequences
        if balance.sequence:
            assert choice.scores is not None, "gates have scores"
            loads = loads_of(self._of_sequences(choice, passage, config), logits.dtype)
            figures["sequence"] = balance.sequence * share_loss(choice.scores, loads.index_select(0, rows[0]), weights)
        if balance.capacity:
            again = self.again()
            if again is None:
                choice, dropped = bounded(choice, *rows, balance.capacity, config)
            else:
                choice, dropped = without(choice, again < 0), (again < 0).sum()
            figures["dropped"] = dropped.to(logits.dtype)
        return choice._replace(weights=add_losses(choice.weights, torch.stack(list(figures.values())), self.sums))

    def _of_sequences(self, choice: Choice, passage: Passage, config: ExpertsConfig) -> Tensor:
        """The choices of each expert in whole sequences (B, E)."""
        kept = self.kept
        if kept is not None and kept.choices is not None:
            return kept.choices
        assert passage.sequences is not None, "checked before the first step"
        found = choices_by_sequence(choice.experts, passage.sequences, passage.num_sequences, config.num_experts)
        if self.add_up is not None:
            found = self.add_up(found)
            if kept is not None:
                kept.choices = found
        return found

"""State of routing during a micro-batch: which tokens are routed, and the router losses.

Padding and documents without labels are not routed: they are not scored, counted or sent to experts, and a mixture
applies only its shared expert to them. Without a `Gating`, all tokens are routed and there are no router losses.

Shape legend: T routed tokens of a micro-batch, B sequences, E experts, k experts of a token.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from terrace.accelerator import occurrences
from terrace.model.balance import FIGURES, BalanceConfig
from terrace.model.experts.config import ExpertsConfig
from terrace.model.experts.gates import Choice, coarse
from terrace.model.experts.gates.noisy import normal
from terrace.model.experts.losses import add_losses, choices_by_sequence, loads_of, share_loss, z_loss

_NONE = torch.empty(0, dtype=torch.int64)  # in place of sequences or positions that no loss and no gate needs


@dataclass(frozen=True, eq=False)
class Passage:
    kept: Tensor | None  # (T) int64, their indices among all tokens; None: all tokens
    sequences: Tensor = _NONE  # (T) int64, sequence of each token, ascending on one rank; empty: not needed
    num_sequences: int = 0
    places: Tensor = _NONE  # (T) int64, position of each token in the run; empty: not needed
    weights: Tensor | None = None  # (T) fp64, weight of each token in router losses; None: 1

    @staticmethod
    def of_rows(shape: torch.Size, device: torch.device) -> "Passage":
        """All tokens of rows of shape (B, S)."""
        rows = torch.arange(shape[0], device=device)
        return Passage(None, rows.repeat_interleave(shape[1]), shape[0])


@dataclass(eq=False)
class Kept:
    """Choices of the first forward of a recomputed block, to be repeated in the recomputation.

    Choosing again could give other experts, because of rounding or equal scores.
    """

    # (T, k) int32. If tokens choose, `~i` means that expert i was dropped by its capacity; with expert choice, -1 means
    # none. The two never occur together.
    experts: Tensor | None = None
    choices: Tensor | None = None  # (B, E), summed over the ranks that share sequences

    def keep(self, chosen: Tensor, within: Tensor) -> None:
        """Store the choices (T, k); `within` has those left by the capacity, or is `chosen` itself without one."""
        self.experts = (chosen if chosen is within else torch.where(within < 0, ~chosen, chosen)).int()


class Gating:
    """The current micro-batch's passage, and the sums of router figures over all routers of a rank.

    Figures are added in the backward, so that a recomputed forward is not counted twice. `choices` has the tokens per
    expert (E) of the previous step, by layer. `kept` belongs to the current block, if it is recomputed. `add_up` sums
    per-sequence choices (B, E) over the ranks that share sequences, if any.
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
        """Noise (T, E) for the logits of a layer; None outside training."""
        if not self.trains:
            return None
        return normal(self.seed, layer, passage.places, num_experts)

    def replayed(self) -> Tensor | None:
        """Choices (T, k) of the first forward, encoded as in `Kept`; None unless this is a recomputation."""
        experts = None if self.kept is None else self.kept.experts
        return None if experts is None else experts.long()

    def balanced(self, choice: Choice, logits: Tensor, passage: Passage, config: ExpertsConfig, layer: int) -> Choice:
        """Apply the capacity to `choice`, made from logits (T, E), and attach the router losses to its weights."""
        balance = self.balance
        if not self.trains and balance.sequence and self.add_up is not None:
            self._of_sequences(choice, passage, config)  # an evaluation sends the same messages
        if not (self.trains and (balance.losses or balance.capacity)):
            return choice
        figures, weights = dict.fromkeys(FIGURES, logits.new_zeros(())), passage.weights
        if balance.z:
            figures["z"] = balance.z * z_loss(logits, weights)
        if balance.step:
            loads = loads_of(self.choices[layer], logits.dtype)
            figures["step"] = balance.step * share_loss(choice.scores, loads, weights)
        rows = passage.sequences, passage.num_sequences
        if balance.sequence:
            loads = loads_of(self._of_sequences(choice, passage, config), logits.dtype)
            figures["sequence"] = balance.sequence * share_loss(choice.scores, loads.index_select(0, rows[0]), weights)
        if balance.capacity:
            replayed = self.replayed()
            if replayed is None:
                choice, dropped = bounded(choice, *rows, balance.capacity, config)
            else:
                choice, dropped = without(choice, replayed < 0), (replayed < 0).sum()
            figures["dropped"] = dropped.to(logits.dtype)
        return choice._replace(weights=add_losses(choice.weights, torch.stack(list(figures.values())), self.sums))

    def _of_sequences(self, choice: Choice, passage: Passage, config: ExpertsConfig) -> Tensor:
        """Number of choices per sequence and expert (B, E), summed over the ranks that share sequences."""
        kept = self.kept
        if kept is not None and kept.choices is not None:
            return kept.choices
        found = choices_by_sequence(choice.experts, passage.sequences, passage.num_sequences, config.num_experts)
        if self.add_up is not None:
            found = self.add_up(found)
            if kept is not None:
                kept.choices = found
        return found


def bounded(
    choice: Choice, sequences: Tensor, num_sequences: int, factor: float, config: ExpertsConfig
) -> tuple[Choice, Tensor]:
    """Drop choices beyond the capacity. Returns the remaining choice and the number of dropped ones, a scalar.

    An expert takes at most C = ceil(factor k S / E) of the S tokens of a sequence. Choices with the smallest weight are
    dropped first; of equal weights, the later one. The limit applies per sequence, so the same choices are dropped for
    any micro-batches and ranks. Evaluation drops nothing, since its loss would depend on how documents are packed (a
    difference of 0.11 in marin-community/marin#8134).

    `sequences` (T), ascending, is the sequence of each token; the tokens of a sequence are in order. A dropped choice
    is -1 with weight 0; the other weights of its token are unchanged.
    """
    cells = (sequences.unsqueeze(-1) * config.num_experts + choice.experts).flatten()
    by_weight = coarse(choice.weights).flatten().sort(descending=True, stable=True).indices
    # Two stable sorts: by sequence and expert, then by weight, then by position.
    order = by_weight[cells[by_weight].sort(stable=True).indices]
    counts = occurrences(cells, num_sequences * config.num_experts)
    begins = (counts.cumsum(0) - counts)[cells[order]]
    ranks = torch.empty_like(order)
    ranks[order] = torch.arange(len(order), device=order.device) - begins
    lengths = occurrences(sequences, num_sequences)
    beyond = ranks.view_as(choice.experts) >= capacities(lengths, factor, config)[sequences].unsqueeze(-1)
    return without(choice, beyond), beyond.sum()


def without(choice: Choice, beyond: Tensor) -> Choice:
    """Drop the choices that are true in `beyond` (T, k)."""
    experts, weights = choice.experts.masked_fill(beyond, -1), choice.weights.masked_fill(beyond, 0.0)
    return choice._replace(experts=experts, weights=weights, is_whole=False)


def capacities(lengths: Tensor, factor: float, config: ExpertsConfig) -> Tensor:
    """Capacity C for sequences of `lengths`, int64."""
    # In integers, since ceil would round up a float product that is slightly too large. The factor is clamped: beyond
    # E / k an expert takes all tokens, and the lower limit still gives one token, so that nothing overflows.
    least, most = Fraction(1, 10**6), Fraction(config.num_experts, config.per_token)
    exact = min(max(Fraction(factor).limit_denominator(10**6), least), most)
    return -(-exact.numerator * config.per_token * lengths // (exact.denominator * config.num_experts))

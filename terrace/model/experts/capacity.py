"""Expert capacity: a limit, in training only, on the tokens of a sequence that an expert takes.

An expert takes at most C = ceil(factor k S / E) of S tokens. Choices with the smallest weight are dropped first; of
equal weights, the later one. The limit applies per sequence, so the same choices are dropped for any micro-batches and
ranks. Evaluation drops nothing, since its loss would depend on how documents are packed (a difference of 0.11 in
marin-community/marin#8134).

Shape legend: T tokens, B sequences, E experts, k experts of a token.
"""

from fractions import Fraction

import torch
from torch import Tensor

from terrace.accelerator import occurrences
from terrace.model.experts.config import ExpertsConfig
from terrace.model.experts.gates import Choice, coarse


def bounded(
    choice: Choice, sequences: Tensor, num_sequences: int, factor: float, config: ExpertsConfig
) -> tuple[Choice, Tensor]:
    """Drop choices beyond the capacity. Returns the remaining choice and the number of dropped ones, a scalar.

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

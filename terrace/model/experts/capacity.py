"""A bound on the tokens of a sequence that an expert takes, in training alone: others leave it out.

An expert takes C = ceil(factor k S / E) of S tokens. The choices of least weight are dropped first, the later of two
equal ones. Counted in a sequence, this drops the same choices whatever the micro-batches and ranks. Evaluation
drops nothing: its loss would depend on how texts are put together (marin-community/marin#8134 found 0.11 more).

Shape legend: T tokens, B sequences, E experts, k experts of a token.
"""

from fractions import Fraction

import torch
from torch import Tensor

from terrace.model.experts.config import ExpertsConfig
from terrace.model.experts.gates import Choice, coarse


def bounded(
    choice: Choice, sequences: Tensor, num_sequences: int, factor: float, config: ExpertsConfig
) -> tuple[Choice, Tensor]:
    """`choice` with the choices within the capacity alone, and the number of choices dropped, a scalar.

    `sequences` (T), ascending, has the sequence of each token; tokens of a sequence are in the order of their places.
    A dropped choice is -1 with a weight of 0; the other weights of its token stay as they are.
    """
    cells = (sequences.unsqueeze(-1) * config.num_experts + choice.experts).flatten()
    by_weight = coarse(choice.weights).flatten().sort(descending=True, stable=True).indices
    # Stable twice: by expert and sequence, in them by weight, of equal weights by place.
    order = by_weight[cells[by_weight].sort(stable=True).indices]
    counts = torch.bincount(cells, minlength=num_sequences * config.num_experts)
    begins = (counts.cumsum(0) - counts)[cells[order]]
    ranks = torch.empty_like(order)
    ranks[order] = torch.arange(len(order), device=order.device) - begins
    lengths = torch.bincount(sequences, minlength=num_sequences)
    beyond = ranks.view_as(choice.experts) >= capacities(lengths, factor, config)[sequences].unsqueeze(-1)
    return without(choice, beyond), beyond.sum()


def without(choice: Choice, beyond: Tensor) -> Choice:
    """`choice` with the choices of `beyond` (T, k) dropped."""
    experts, weights = choice.experts.masked_fill(beyond, -1), choice.weights.masked_fill(beyond, 0.0)
    return choice._replace(experts=experts, weights=weights, is_whole=False)


def capacities(lengths: Tensor, factor: float, config: ExpertsConfig) -> Tensor:
    """C for sequences of `lengths`, int64."""
    # In whole numbers: a product of floats that is just above one would round up. Beyond E / k an expert takes all, and
    # the smallest fraction still takes one token: no factor of a file overflows, and none drops every choice.
    least, most = Fraction(1, 10**6), Fraction(config.num_experts, config.per_token)
    exact = min(max(Fraction(factor).limit_denominator(10**6), least), most)
    return -(-exact.numerator * config.per_token * lengths // (exact.denominator * config.num_experts))

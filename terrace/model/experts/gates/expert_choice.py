"""Each expert takes the tokens of a sequence that score best for it (2202.09368, section 3.2).

An expert takes C = ceil(k S / E) of S tokens, so all have the same load, and a token passes k of them on average, any
number from none to all. A choice depends on later tokens: a decoder that is trained so cannot be sampled from.

Shape legend: T tokens, B sequences, E experts.
"""

import torch
from torch import Tensor

from terrace.model.experts.config import ExpertsConfig
from terrace.model.experts.gates import Choice, coarse


def choose(
    logits: Tensor, sequences: Tensor, num_sequences: int, config: ExpertsConfig, again: Tensor | None = None
) -> Choice:
    """Choose by the softmax of logits (T, E) over the experts; `sequences` (T), ascending, has each token's sequence.

    The choices are (T, E), -1 where an expert leaves a token to others; of equal scores the earlier token is taken.
    `again` (T, E) are choices to be made as before.
    """
    scores = logits.softmax(-1)
    taken = _taken(scores, sequences, num_sequences, config) if again is None else again >= 0
    experts = torch.arange(config.num_experts, device=logits.device).expand_as(taken)
    weights = scores.masked_fill(~taken, 0.0)
    if config.scale != 1.0:
        weights = weights * config.scale
    return Choice(experts.masked_fill(~taken, -1), weights, scores, is_whole=False)


def _taken(scores: Tensor, sequences: Tensor, num_sequences: int, config: ExpertsConfig) -> Tensor:
    ranks = places_in_sequences(coarse(scores), sequences, num_sequences)
    lengths = torch.bincount(sequences, minlength=num_sequences)
    most = -(-config.per_token * lengths // config.num_experts)  # C of each sequence
    return ranks < most[sequences].unsqueeze(1)


def places_in_sequences(scores: Tensor, sequences: Tensor, num_sequences: int) -> Tensor:
    """The rank, from 0, of every token of scores (T, E) in its sequence for each expert, the largest score first."""
    by_score = scores.sort(dim=0, descending=True, stable=True).indices  # (T, E)
    # Stable, so that the tokens of a sequence stay in the order of their scores.
    order = by_score.gather(0, sequences[by_score].sort(dim=0, stable=True).indices)
    lengths = torch.bincount(sequences, minlength=num_sequences)
    begins = (lengths.cumsum(0) - lengths)[sequences]  # (T): sequences follow one another
    ranks = torch.arange(len(scores), device=scores.device) - begins
    return torch.empty_like(order).scatter_(0, order, ranks.unsqueeze(1).expand_as(order))

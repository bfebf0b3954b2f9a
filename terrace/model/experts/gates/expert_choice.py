"""Expert-choice gate (2202.09368, section 3.2): each expert takes the tokens of a sequence with the highest scores.

An expert takes C = ceil(k S / E) of S tokens, so that all loads are equal; a token gets k experts on average, between
none and all. Choices depend on later tokens, so that a decoder trained this way cannot be sampled from.

Shape legend: T tokens, B sequences, E experts.
"""

import torch
from torch import Tensor

from terrace.accelerator import occurrences
from terrace.model.experts.config import ExpertsConfig
from terrace.model.experts.gates import Choice, coarse


def choose(
    logits: Tensor, sequences: Tensor, num_sequences: int, config: ExpertsConfig, replayed: Tensor | None = None
) -> Choice:
    """Choose by the softmax of logits (T, E) over experts; `sequences` (T), ascending, is the sequence of each token.

    Choices are (T, E), -1 where an expert does not take a token; of equal scores the earlier token wins. If given,
    `replayed` (T, E) are earlier choices to repeat.
    """
    scores = logits.softmax(-1)
    taken = _taken(scores, sequences, num_sequences, config) if replayed is None else replayed >= 0
    experts = torch.arange(config.num_experts, device=logits.device).expand_as(taken)
    weights = scores.masked_fill(~taken, 0.0)
    if config.scale != 1.0:
        weights = weights * config.scale
    return Choice(experts.masked_fill(~taken, -1), weights, scores, is_whole=False)


def _taken(scores: Tensor, sequences: Tensor, num_sequences: int, config: ExpertsConfig) -> Tensor:
    ranks = places_in_sequences(coarse(scores), sequences, num_sequences)
    lengths = occurrences(sequences, num_sequences)
    most = -(-config.per_token * lengths // config.num_experts)  # C of each sequence
    return ranks < most[sequences].unsqueeze(1)


def places_in_sequences(scores: Tensor, sequences: Tensor, num_sequences: int) -> Tensor:
    """Rank (T, E) of every token in its sequence by descending score for each expert, from 0."""
    by_score = scores.sort(dim=0, descending=True, stable=True).indices  # (T, E)
    # Stable, so that the tokens of a sequence stay sorted by score.
    order = by_score.gather(0, sequences[by_score].sort(dim=0, stable=True).indices)
    lengths = occurrences(sequences, num_sequences)
    begins = (lengths.cumsum(0) - lengths)[sequences]  # (T): sequences are contiguous
    ranks = torch.arange(len(scores), device=scores.device) - begins
    return torch.empty_like(order).scatter_(0, order, ranks.unsqueeze(1).expand_as(order))

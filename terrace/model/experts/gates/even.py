"""Replaces a gate's choices by a fixed, even table, with weights from the gate's scores (terrace.model.experts.even).

Shape legend: T tokens, E experts, k experts of a token.
"""

from functools import lru_cache

import torch
from torch import Tensor

from terrace.accelerator import placed
from terrace.model.experts.config import ExpertsConfig
from terrace.model.experts.even import drawn
from terrace.model.experts.gates import Choice


def instead(choice: Choice, config: ExpertsConfig) -> Choice:
    """Replace the experts of `choice`, for the tokens of a rank in order, by those of the table."""
    experts = _table(len(choice.experts), config.num_experts, config.per_token, choice.experts.device)
    weights = choice.scores.gather(-1, experts)
    if config.normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    return Choice(experts, weights if config.scale == 1.0 else weights * config.scale, choice.scores)


@lru_cache(maxsize=16)
def _table(num_tokens: int, num_experts: int, per_token: int, device: torch.device) -> Tensor:
    groups = -(-num_tokens // num_experts)
    numbers = torch.tensor([drawn(group, num_experts, per_token) for group in range(groups)], dtype=torch.int64)
    shifts = torch.arange(num_experts).view(1, -1, 1)
    found = (numbers.view(groups, 1, per_token) + shifts) % num_experts
    return placed(found.flatten(0, 1)[:num_tokens].contiguous(), device)

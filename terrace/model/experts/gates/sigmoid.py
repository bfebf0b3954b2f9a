"""Sigmoid gate with a choice bias and groups (DeepSeek-V3, 2412.19437, section 2.1.2).

The score of a group is the sum of its two best experts; a token uses experts of its best `kept_groups`.

Shape legend: T tokens, E experts, G groups, k experts of a token.
"""

import torch
from torch import Tensor

from terrace.model.experts.config import ExpertsConfig
from terrace.model.experts.gates import TINY, Choice, best


def choose(logits: Tensor, bias: Tensor | None, config: ExpertsConfig, replayed: Tensor | None = None) -> Choice:
    """Choose by sigmoid(logits (T, E)) + `bias` (E), or repeat the choices `replayed` (T, k); weights omit the bias."""
    scores = logits.sigmoid()
    experts = _chosen(scores.detach(), bias, config) if replayed is None else replayed
    weights = scores.gather(-1, experts)
    if config.normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + TINY)
    return Choice(experts, weights if config.scale == 1.0 else weights * config.scale, scores)


def _chosen(scores: Tensor, bias: Tensor | None, config: ExpertsConfig) -> Tensor:
    ranked = scores if bias is None else scores + bias
    if config.num_groups > 1:
        grouped = ranked.view(-1, config.num_groups, config.num_experts // config.num_groups)  # (T, G, E/G)
        kept = best(grouped.topk(2, -1).values.sum(-1), config.kept_groups)
        dropped = torch.ones(grouped.shape[:2], dtype=torch.bool, device=scores.device).scatter_(1, kept, False)
        # -inf, below any score plus bias.
        ranked = grouped.masked_fill(dropped.unsqueeze(-1), -torch.inf).flatten(1)
    return best(ranked, config.per_token)

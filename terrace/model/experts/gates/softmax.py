"""Softmax gate: the k most likely experts (Shazeer et al. 1701.06538; Mixtral, 2401.04088, section 2.1).

Shape legend: T tokens, E experts, k experts of a token.
"""

from torch import Tensor

from terrace.model.experts.config import ExpertsConfig
from terrace.model.experts.gates import Choice, best


def choose(logits: Tensor, bias: Tensor | None, config: ExpertsConfig, replayed: Tensor | None = None) -> Choice:
    """Choose by softmax(logits (T, E)) + `bias` (E), or repeat the choices `replayed` (T, k).

    Weights are the probabilities of the chosen experts, without bias, divided by their sum if `normalized`.
    """
    likely = logits.softmax(-1)
    experts = best(likely if bias is None else likely + bias, config.per_token) if replayed is None else replayed
    weights = likely.gather(-1, experts)
    if config.normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    return Choice(experts, weights if config.scale == 1.0 else weights * config.scale, likely)

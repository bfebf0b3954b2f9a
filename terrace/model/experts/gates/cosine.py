"""Cosine gate (X-MoE, 2204.09179, section 3.2): cosine between a projection of the token and a vector per expert.

    z_i = cos(P x, r_i) / tau, then as in the softmax gate

P, r and tau are learned; tau is stored as its logarithm, so that it stays positive.

Shape legend: T tokens, E experts, H hidden, D dims of the projection.
"""

import torch.nn.functional as F
from torch import Tensor


def logits(x: Tensor, projection: Tensor, weight: Tensor, temperature: Tensor) -> Tensor:
    """Logits (T, E) of x (T, H), from the projection P (D, H), vectors r (E, D) and log tau (1)."""
    directions = F.normalize(F.linear(x, projection), dim=-1)
    return F.linear(directions, F.normalize(weight, dim=-1)) / temperature.exp()

"""The cosine between a token, projected to few dims, and a vector of each expert (X-MoE, 2204.09179, section 3.2).

    z_i = cos(P x, r_i) / tau, then as with a softmax

P, r and tau are learned; tau is kept as its logarithm, so that it stays positive.

Shape legend: T tokens, E experts, H hidden, D dims of the projection.
"""

import torch.nn.functional as F
from torch import Tensor


def logits(x: Tensor, projection: Tensor, weight: Tensor, temperature: Tensor) -> Tensor:
    """Logits (T, E) of x (T, H) by the projection P (D, H), vectors r (E, D) and the logarithm of tau (1)."""
    directions = F.normalize(F.linear(x, projection), dim=-1)
    return F.linear(directions, F.normalize(weight, dim=-1)) / temperature.exp()

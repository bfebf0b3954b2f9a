"""Configuration of latent attention. Needs no torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from terrace.base.errors import ModelError
from terrace.model.rope_scaling import RopeScaling
from terrace.model.sizes import LARGEST_SIZE


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, 2405.04434, section 2.1); rank 0: none.

    With a `key_value_rank`, keys and values are projected from a latent vector of this size. The last `shared_dim`
    elements of a key are the same for all heads, and RoPE rotates these alone, or nothing (Kimi Linear, 2510.26692,
    section 4). With a `query_rank`, queries are projected from a latent vector of this size.
    """

    key_value_rank: int = 0
    query_rank: int = 0
    shared_dim: int = 0
    value_dim: int = 0  # elements of a value head; query and key heads have `head_dim`
    interleaved: bool = True  # RoPE rotates adjacent elements, else elements `shared_dim` / 2 apart
    mscale: float = 0.0  # of yarn (`mscale_all_dim`): scores are multiplied by (0.1 mscale ln factor + 1)^2

    def check(self, names: Mapping[str, str], head_dim: int, rotary_dim: int) -> None:
        """Raise `ModelError` for invalid sizes. `names` maps fields to the keys of the file, for messages."""
        if not self.key_value_rank:
            return
        for field, least in (("key_value_rank", 1), ("value_dim", 1), ("query_rank", 0)):
            if not least <= (size := getattr(self, field)) <= LARGEST_SIZE:
                raise ModelError(
                    f"{names.get(field, field)} = {size} must be at least {least} and at most {LARGEST_SIZE}"
                )
        if not 0 < self.shared_dim < head_dim or rotary_dim not in (0, self.shared_dim):
            raise ModelError(
                f"a head of {head_dim} elements, {self.shared_dim} of them shared by all heads and {rotary_dim} "
                "rotated by RoPE, is not implemented with latent attention: both parts must have elements, and RoPE "
                "rotates all that are shared, or none"
            )
        if self.value_dim > head_dim:
            raise ModelError(
                f"{names.get('value_dim', 'value_dim')} = {self.value_dim} is not implemented beyond the {head_dim} "
                "elements of a query: make it smaller"
            )
        if not 0 <= self.mscale < 1e3:
            raise ModelError(f"mscale_all_dim = {self.mscale} must be at least 0 and below 1000")

    def score_factor(self, scaling: RopeScaling | None) -> float:
        """Factor of attention scores in addition to 1 / sqrt(head_dim)."""
        if scaling is None or not self.mscale or scaling.factor <= 1:
            return 1.0
        return (0.1 * self.mscale * math.log(scaling.factor) + 1.0) ** 2

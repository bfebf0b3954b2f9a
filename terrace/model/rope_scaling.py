"""Configuration of RoPE scaling for longer sequences; the formulas are in `rotary`. Needs no torch."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from terrace.base.errors import ModelError, did_you_mean

RopeType = Literal["linear", "dynamic", "llama3", "yarn", "longrope"]

_OF_ORIGINAL = ("llama3", "yarn", "longrope")


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """A `rope_type` other than the default; fields are named as in a Hugging Face `config.json`.

    - `linear` divides every frequency by `factor` (Chen et al. 2306.15595);
    - `dynamic` increases the base with the row length, beyond the model's `max_positions`;
    - `llama3` divides frequencies by `factor` if their wavelength is above
      `original_max_position_embeddings / low_freq_factor`, keeps them if it is below
      `original_max_position_embeddings / high_freq_factor`, and interpolates in between (the Llama 3.1 release);
    - `yarn` interpolates between the frequencies with `beta_slow` and `beta_fast` rotations in the original length
      (Peng et al. 2309.00071, section 3.2);
    - `longrope` divides each frequency by a factor of its own, `long_factor` for rows beyond the original length, else
      `short_factor` (Ding et al. 2402.13753).

    `yarn` and `longrope` multiply cosines and sines by `attention_factor`. Fields of other types keep their defaults.
    Raises `ModelError` for invalid numbers.
    """

    rope_type: RopeType
    factor: float = 1.0
    low_freq_factor: float = 0.0
    high_freq_factor: float = 0.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # whether yarn rounds the ends of its ramp to whole frequencies
    attention_factor: float = 1.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        kind = self.rope_type
        if kind not in get_args(RopeType):
            known = did_you_mean(str(kind), ("default", *get_args(RopeType)))
            raise ModelError(f"rope_type = {kind!r} is not implemented{known}")
        for name in ("factor", "beta_fast", "beta_slow", "attention_factor"):
            if not 0 < getattr(self, name) < math.inf:
                raise ModelError(f"{name} = {getattr(self, name)} of {kind} RoPE scaling must be positive and finite")
        if kind in _OF_ORIGINAL and self.original_max_position_embeddings < 1:
            raise ModelError(
                f"original_max_position_embeddings = {self.original_max_position_embeddings} of {kind} RoPE scaling "
                "must be at least 1"
            )
        if kind == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor < math.inf:
            raise ModelError(
                f"low_freq_factor = {self.low_freq_factor} of llama3 RoPE scaling must be positive and below "
                f"high_freq_factor = {self.high_freq_factor}"
            )
        if kind == "yarn" and self.beta_fast < self.beta_slow:
            raise ModelError(
                f"beta_fast = {self.beta_fast} of yarn RoPE scaling must be at least beta_slow = {self.beta_slow}"
            )
        for name in ("short_factor", "long_factor"):
            for each in getattr(self, name):
                if not 0 < each < math.inf:
                    raise ModelError(f"{name} of longrope RoPE scaling has {each}: all must be positive and finite")

    def check(self, rotary_dim: int, theta: float) -> None:
        """Raise `ModelError` if it is not applicable to `rotary_dim` elements with the base `theta`."""
        if self.rope_type == "yarn" and theta <= 1:
            raise ModelError(f"rope_theta = {theta} must be above 1 for yarn RoPE scaling, which divides by its log")
        if self.rope_type == "dynamic" and rotary_dim <= 2:
            raise ModelError(f"dynamic RoPE needs more than 2 rotated elements of a head, not {rotary_dim}")
        if self.rope_type != "longrope":
            return
        for name in ("short_factor", "long_factor"):
            if len(getattr(self, name)) != rotary_dim // 2:
                raise ModelError(
                    f"{name} of longrope RoPE scaling has {len(getattr(self, name))} numbers, and "
                    f"{rotary_dim} rotated elements of a head need {rotary_dim // 2}"
                )

    def limit(self, max_positions: int) -> int:
        """Largest row length up to which frequencies do not depend on the length; 0: no limit."""
        if self.rope_type == "dynamic":
            return max_positions
        return self.original_max_position_embeddings if self.rope_type == "longrope" else 0

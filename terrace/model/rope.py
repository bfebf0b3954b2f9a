"""How the frequencies of rotary positions are changed for longer sequences. Pure: the formula is in `layers`."""

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from terrace.base.errors import ModelError, did_you_mean

RopeType = Literal["linear", "llama3"]


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """A `rope_type` other than the default; the fields are named as in a Hugging Face `config.json`.

    `linear` divides every frequency by `factor` (Chen et al. 2306.15595). `llama3` divides by `factor` the frequencies
    with a wavelength above `original_max_position_embeddings / low_freq_factor`, leaves wavelengths below the same over
    `high_freq_factor`, and interpolates smoothly between them (the Llama 3.1 release). `linear` has no other field than
    `factor`. Raises `ModelError` for meaningless numbers.
    """

    rope_type: RopeType
    factor: float
    low_freq_factor: float = 0.0
    high_freq_factor: float = 0.0
    original_max_position_embeddings: int = 0

    def __post_init__(self) -> None:
        if self.rope_type not in get_args(RopeType):
            known = did_you_mean(str(self.rope_type), ("default", *get_args(RopeType)))
            raise ModelError(f"rope_type = {self.rope_type!r} is not implemented{known}")
        if not 0 < self.factor < math.inf:
            raise ModelError(f"factor = {self.factor} of {self.rope_type} RoPE scaling must be positive and finite")
        if self.rope_type == "linear":
            return
        if self.original_max_position_embeddings < 1:
            raise ModelError(
                f"original_max_position_embeddings = {self.original_max_position_embeddings} of llama3 RoPE scaling "
                "must be at least 1"
            )
        if not 0 < self.low_freq_factor < self.high_freq_factor < math.inf:
            raise ModelError(
                f"low_freq_factor = {self.low_freq_factor} of llama3 RoPE scaling must be positive and below "
                f"high_freq_factor = {self.high_freq_factor}"
            )

    def table(self) -> dict[str, Any]:
        """Keys and values as in a `config.json`, `rope_type` included."""
        keys = scaling_keys(self.rope_type)
        return {"rope_type": self.rope_type} | {key: getattr(self, key) for key in keys}


def scaling_keys(rope_type: str) -> tuple[str, ...]:
    """Further keys that a `rope_type` needs."""
    if rope_type == "llama3":
        return ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    return ("factor",) if rope_type == "linear" else ()

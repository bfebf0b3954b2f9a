"""Rotary positions: the tables of cosines and sines, and the turn.

Shape legend: B batch, S sequence, N heads, D head_dim, R rotary_dim.
"""

import math

import torch
from torch import Tensor

from terrace.base.errors import ModelError
from terrace.model.attention import PerLength, PerMicroBatch, on_host
from terrace.model.config import ModelConfig
from terrace.model.rope_scaling import RopeScaling


class Rotary:
    """Rotary position embedding in the rotate-half convention, on the first `dim` elements of a head.

    Pair i is elements i and i + R/2; position s turns it by s * theta^(-2i/R), or by less as `scaling` says.
    The tables are computed on first use and kept here, not in module buffers, so that a model built on the meta
    device holds nothing but its parameters. One object serves all layers that turn alike.

    Rows longer than `limit` have other frequencies (`RopeScaling.limit`); 0: all rows have the same.
    """

    def __init__(self, dim: int, theta: float, scaling: RopeScaling | None = None, limit: int = 0) -> None:
        self.dim = dim
        self.theta = theta
        self.scaling = scaling
        self.limit = limit
        self._tables = PerLength()
        self._packed = PerMicroBatch()

    def tables(self, sequence: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin, each (S, R/2), computed in fp32 (fp64 for fp64) and cast to `dtype`."""
        return self._tables.made(
            (sequence, device, dtype), lambda: self._compute(torch.arange(sequence, device=device), dtype, sequence)
        )

    def _compute(self, positions: Tensor, dtype: torch.dtype, length: int) -> tuple[Tensor, Tensor]:
        compute = torch.promote_types(dtype, torch.float32)
        exponents = torch.arange(0, self.dim, 2, device=positions.device, dtype=compute) / self.dim  # (R/2)
        frequencies = _frequencies(exponents, self.theta, self.scaling, length, self.limit)
        angles = positions.to(compute).unsqueeze(-1) * frequencies  # (S, R/2) or (B, S, R/2)
        factor = 1.0 if self.scaling is None else self.scaling.attention_factor
        return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)

    def _of_documents(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        # Positions of one rank, or of one turn of generation, do not show the length of the longest row of all.
        if self.limit and (last := int(on_host(positions).max())) >= self.limit:
            assert self.scaling is not None, "only a scaling has a limit"
            raise ModelError(
                f"a document has position {last}, and {self.scaling.rope_type} RoPE changes its frequencies from "
                f"{self.limit} on, by the longest row of all: use shorter documents, or rows of one document"
            )
        return self._compute(positions, dtype, 0)

    def __call__(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Turn x (B, N, S, D) by `positions` (B, S) int64, or else by 0 .. S-1.

        The result has the heads of a token side by side in memory. Attention lays its output out as its query, so
        that merging the heads there is a view, where it would be a copy that is kept for the backward. Raises
        `ModelError` for positions of documents beyond the limit.
        """
        return self.turn(x, *self.tables_of(x, positions))

    def both(self, query: Tensor, key: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Query (B, N, S, D) and key (B, K, S, D), each turned as by the call; raises as it does."""
        return self.turn_both(query, key, *self.tables_of(query, positions))

    def tables_of(self, x: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        """The tables for x (B, N, S, D), each (S, R/2), or (B, S, R/2) with positions."""
        if positions is None:
            return self.tables(x.shape[-2], x.device, x.dtype)
        return self._packed.get(positions, x.dtype, lambda: self._of_documents(positions, x.dtype))

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Turn x (B, N, S, D) by tables (S, R/2) or (B, S, R/2); see the call."""
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # (S, 1, R/2) or (B, S, 1, R/2)
        x = x.transpose(-3, -2)  # (B, S, N, D)
        half = self.dim // 2
        first, second, rest = x[..., :half], x[..., half : self.dim], x[..., self.dim :]
        # Halves are rotated against each other, as in Hugging Face's layout.
        parts = [first * cos - second * sin, second * cos + first * sin]
        if self.dim < x.shape[-1]:
            parts.append(rest)
        return torch.cat(parts, dim=-1).transpose(-3, -2)

    def turn_last(self, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        """Turn the last R elements of x (B, N, S, D) by tables as `turn` takes them.

        Pairs are neighbours if `interleaved`; their results stand apart, so that the elements of a result are in
        another order than those of x, the same for queries and keys.
        """
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
        x = x.transpose(-3, -2)  # (B, S, N, D)
        rest, turned = torch.split(x, [x.shape[-1] - self.dim, self.dim], -1)
        first, second = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
        parts = [rest, first * cos - second * sin, second * cos + first * sin]
        return torch.cat(parts[0 if rest.shape[-1] else 1 :], dim=-1).transpose(-3, -2)

    def turn_both(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Query and key, each as by `turn`; a kernel for both may stand here."""
        return self.turn(query, cos, sin), self.turn(key, cos, sin)


def rotary_of(config: ModelConfig) -> Rotary | None:
    """The rotary positions of a layer; None where it has none."""
    if not config.rotary_dim:
        return None
    return Rotary(config.rotary_dim, config.rope_theta, config.rope_scaling, config.rope_limit)


def _frequencies(exponents: Tensor, theta: float, scaling: RopeScaling | None, length: int, limit: int) -> Tensor:
    # Of rows of `length` tokens; 0: within the limit.
    if scaling is not None and scaling.rope_type == "dynamic" and length > limit:
        dim = 2 * len(exponents)
        stretch = scaling.factor * length / limit - (scaling.factor - 1)
        theta = theta * stretch ** (dim / (dim - 2))
    frequencies = 1.0 / theta**exponents
    if scaling is None or scaling.rope_type == "dynamic":
        return frequencies
    if scaling.rope_type == "longrope":
        factors = scaling.long_factor if length > limit else scaling.short_factor
        return frequencies / torch.tensor(factors, device=frequencies.device, dtype=frequencies.dtype)
    slow = frequencies / scaling.factor
    if scaling.rope_type == "linear":
        return slow
    kept = _ramp(theta, scaling, frequencies) if scaling.rope_type == "yarn" else _by_turns(scaling, frequencies)
    return (1.0 - kept) * slow + kept * frequencies


def _by_turns(scaling: RopeScaling, frequencies: Tensor) -> Tensor:
    # How many turns the positions of the original training hold: few turns are slowed down, many stay as they are.
    turns = frequencies * (scaling.original_max_position_embeddings / (2 * math.pi))
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    return ((turns - low) / (high - low)).clamp(0.0, 1.0)


def _ramp(theta: float, scaling: RopeScaling, frequencies: Tensor) -> Tensor:
    # The share of each frequency that stays as it is, falling along the index from the fast ones to the slow ones.
    num = len(frequencies)

    def index_of(turns: float) -> float:
        wavelengths = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return 2 * num * math.log(wavelengths) / (2 * math.log(theta))

    low, high = index_of(scaling.beta_fast), index_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * num - 1)
    # A ramp of no length would divide by zero; the reference makes it a thousandth.
    span = high - low if high != low else 0.001
    index = torch.arange(num, device=frequencies.device, dtype=frequencies.dtype)
    return 1.0 - ((index - low) / span).clamp(0.0, 1.0)

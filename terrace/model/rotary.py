"""Rotary position embedding (RoPE): tables of cosines and sines, and the rotation.

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

    Pair i is elements i and i + R/2; at position s it is rotated by s * theta^(-2i/R), changed by `scaling`. Tables are
    computed on first use and cached here, not in module buffers, so that models on the meta device have only
    parameters. Layers with equal RoPE share one object.

    Rows longer than `limit` have other frequencies (`RopeScaling.limit`); 0: no limit.
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
        # The positions of one rank, or of one generation step, do not show the length of the longest row.
        if self.limit and (last := int(on_host(positions).max())) >= self.limit:
            assert self.scaling is not None, "only a scaling has a limit"
            raise ModelError(
                f"a document has position {last}, and {self.scaling.rope_type} RoPE changes its frequencies from "
                f"{self.limit} on, by the longest row of all: use shorter documents, or rows of one document"
            )
        return self._compute(positions, dtype, 0)

    def __call__(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Rotate x (B, N, S, D) by `positions` (B, S) int64, by default 0 .. S-1.

        In the result the heads of a token are contiguous in memory. The output of attention has the layout of its
        query, so merging its heads is then a view instead of a copy that is saved for the backward. Raises
        `ModelError` if positions are given and exceed the limit.
        """
        return self.rotate(x, *self.tables_of(x, positions))

    def both(self, query: Tensor, key: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Rotate query (B, N, S, D) and key (B, K, S, D) as `__call__` does."""
        return self.rotate_both(query, key, *self.tables_of(query, positions))

    def tables_of(self, x: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        """Tables cos and sin for x (B, N, S, D), each (S, R/2), or (B, S, R/2) with positions."""
        if positions is None:
            return self.tables(x.shape[-2], x.device, x.dtype)
        return self._packed.get(positions, x.dtype, lambda: self._of_documents(positions, x.dtype))

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate x (B, N, S, D) by tables (S, R/2) or (B, S, R/2); layout of the result as in `__call__`."""
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # (S, 1, R/2) or (B, S, 1, R/2)
        x = x.transpose(-3, -2)  # (B, S, N, D)
        half = self.dim // 2
        first, second, rest = x[..., :half], x[..., half : self.dim], x[..., self.dim :]
        # Pairs are split across the halves, as in Hugging Face's layout.
        parts = [first * cos - second * sin, second * cos + first * sin]
        if self.dim < x.shape[-1]:
            parts.append(rest)
        return torch.cat(parts, dim=-1).transpose(-3, -2)

    def rotate_last(self, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        """Rotate the last R elements of x (B, N, S, D); tables as in `rotate`.

        If `interleaved`, pairs are adjacent elements of x, but in different halves of the result. This permutation is
        the same for queries and keys.
        """
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
        x = x.transpose(-3, -2)  # (B, S, N, D)
        rest, rotated = torch.split(x, [x.shape[-1] - self.dim, self.dim], -1)
        first, second = (rotated[..., 0::2], rotated[..., 1::2]) if interleaved else rotated.chunk(2, -1)
        parts = [rest, first * cos - second * sin, second * cos + first * sin]
        return torch.cat(parts[0 if rest.shape[-1] else 1 :], dim=-1).transpose(-3, -2)

    def rotate_both(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Apply `rotate` to query and key; may be replaced by a kernel for both."""
        return self.rotate(query, cos, sin), self.rotate(key, cos, sin)


def rotary_of(config: ModelConfig) -> Rotary | None:
    if not config.rotary_dim:
        return None
    return Rotary(config.rotary_dim, config.rope_theta, config.rope_scaling, config.rope_limit)


def _frequencies(exponents: Tensor, theta: float, scaling: RopeScaling | None, length: int, limit: int) -> Tensor:
    # For rows of `length` tokens; 0: a length within the limit.
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
    kept = _ramp(theta, scaling, frequencies) if scaling.rope_type == "yarn" else _by_rotations(scaling, frequencies)
    return (1.0 - kept) * slow + kept * frequencies


def _by_rotations(scaling: RopeScaling, frequencies: Tensor) -> Tensor:
    # Frequencies with few rotations in the original length are slowed down, those with many are kept.
    rotations = frequencies * (scaling.original_max_position_embeddings / (2 * math.pi))
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    return ((rotations - low) / (high - low)).clamp(0.0, 1.0)


def _ramp(theta: float, scaling: RopeScaling, frequencies: Tensor) -> Tensor:
    # The unscaled fraction of each frequency, decreasing from fast to slow frequencies.
    num = len(frequencies)

    def index_of(rotations: float) -> float:
        wavelengths = scaling.original_max_position_embeddings / (rotations * 2 * math.pi)
        return 2 * num * math.log(wavelengths) / (2 * math.log(theta))

    low, high = index_of(scaling.beta_fast), index_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * num - 1)
    # A ramp of length zero would divide by zero; the reference uses 0.001.
    span = high - low if high != low else 0.001
    index = torch.arange(num, device=frequencies.device, dtype=frequencies.dtype)
    return 1.0 - ((index - low) / span).clamp(0.0, 1.0)

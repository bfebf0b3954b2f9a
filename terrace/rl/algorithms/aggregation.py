"""How token losses are aggregated into one: each token's weight in the sum, and its contribution to the divisor.

A micro-batch returns a weighted sum over its own tokens. The divisor is summed over all micro-batches and ranks of a
step and applied once, so that the result is never a mean of means.
"""

from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from terrace.base.errors import ConfigError
from terrace.rl.algorithms.algorithm import Form


@dataclass(frozen=True)
class Aggregation:
    """Aggregates the token losses of R responses with T_i tokens each (the names are verl's):

        form                       weight   count               divisor
        token-mean                 1        1                   sum of T_i     DAPO (2503.14476)
        seq-mean-token-mean        1 / T_i  1 / T_i             R              GRPO (2402.03300), GSPO, RLOO
        seq-mean-token-sum         1        1 / T_i             R              ReMax (2310.10505)
        seq-mean-token-sum-norm    1        max_length / T_i    R max_length   Dr. GRPO (2503.20783)

    Empty responses do not count in R. Raises `ConfigError` for an unknown form, for seq-mean-token-sum-norm without a
    `max_length`, and for any other form with one.
    """

    form: Form
    max_length: int | None = None

    def __post_init__(self) -> None:
        if self.form not in get_args(Form):
            raise ConfigError(f"aggregation {self.form!r}: must be one of {', '.join(get_args(Form))}")
        if (self.form == "seq-mean-token-sum-norm") != (self.max_length is not None):
            raise ConfigError(
                f"aggregation {self.form} with max_length {self.max_length}: only seq-mean-token-sum-norm is over a "
                "constant length, and it needs one"
            )
        if self.max_length is not None and self.max_length < 1:
            raise ConfigError(f"max_length {self.max_length} of an aggregation: must be 1 or more")

    def weights(self, lengths: Tensor, dtype: torch.dtype) -> Tensor:
        """Weight of each token in the loss, (N), for responses of `lengths`, which may be any subset of a step."""
        return self._by_token(lengths, 1, self.form == "seq-mean-token-mean", dtype)

    def counts(self, lengths: Tensor) -> Tensor:
        """Contribution of each token to the divisor, (N) in fp64: the `weights` of a `terrace.runtime.batch.Batch`."""
        return self._by_token(lengths, self.max_length or 1, self.form != "token-mean", torch.float64)

    def _by_token(self, lengths: Tensor, of_row: int, is_shared: bool, dtype: torch.dtype) -> Tensor:
        # `of_row` at each token, or divided by the response's length. The inf of an empty response is repeated 0 times.
        by_row = torch.full_like(lengths, of_row, dtype=dtype)
        return (by_row / lengths if is_shared else by_row).repeat_interleave(lengths)

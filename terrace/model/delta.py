"""Sizes of linear attention by the gated delta rule. Needs no torch."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from terrace.base.errors import ModelError
from terrace.model.sizes import LARGEST_SIZE

CHUNK = 64  # tokens of a chunk (2412.06464, section 3.3); shorter rows are one chunk


@dataclass(frozen=True, kw_only=True)
class DeltaSizes:
    """Heads of the layers with the gated delta rule (Gated DeltaNet, 2412.06464); 0 key heads: no layer has it.

    A key head serves `value_heads` / `key_heads` consecutive value heads, as in grouped attention. Each value head has
    a state of `key_dim` x `value_dim` numbers, whatever the length of the sequence.
    """

    key_heads: int = 0
    value_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    taps: int = 0  # tokens that the short convolution of queries, keys and values reads: itself and those before it

    def check(self, names: Mapping[str, str]) -> None:
        """Raise `ModelError` for invalid sizes. `names` maps fields to the keys of the file, for messages."""
        for field, size in asdict(self).items():
            if not 1 <= size <= LARGEST_SIZE:
                raise ModelError(f"{names[field]} = {size} must be at least 1 and at most {LARGEST_SIZE}")
        if self.value_heads % self.key_heads:
            raise ModelError(
                f"{names['value_heads']} = {self.value_heads} is not a multiple of {names['key_heads']} = "
                f"{self.key_heads}: change one of them"
            )

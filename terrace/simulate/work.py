"""Work: what one rank computes of one micro-batch, in the numbers that costs and activations depend on."""

from dataclasses import dataclass
from typing import Literal

from terrace.model.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Work:
    """A micro-batch of `micro_batch` sequences of `sequence` tokens, cut over tensor and context ranks.

    `recompute` tells what a layer's backward runs again: nothing, the core of attention (QK^T, softmax and
    the product with V; Korthikanti et al. 2205.05198, section 5), or all of it. `flash` tells a kernel that never
    writes the S x S scores; such a kernel recomputes the core by itself, so `selective` then changes nothing.
    """

    model: ModelConfig
    sequence: int
    micro_batch: int = 1
    tensor: int = 1
    context: int = 1
    sequence_parallel: bool = True  # norms and residual cut over the tensor ranks; without effect at tensor = 1
    recompute: Literal["none", "selective", "full"] = "none"
    flash: bool = True
    causal: bool = True
    dropout: bool = False  # whether dropout masks are kept, one byte an element
    compute: Literal["bf16", "fp32", "fp64"] = "bf16"

    @property
    def tokens(self) -> int:
        """Tokens of the micro-batch on one context rank."""
        return self.micro_batch * self.sequence // self.context

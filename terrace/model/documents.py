"""Attention with torch's varlen kernel: flash attention 2 over packed documents.

All rows of a micro-batch are concatenated; documents begin at the offsets `starts`. The kernel needs no mask and
supports grouped heads and windows: a window of W, a token and the W - 1 before it, is (W - 1, 0) in its arguments. It
needs the number of documents and the length of the longest one on the host.

Shape legend: B batch, S sequence, N query heads, K key-value heads, D head_dim.
"""

import inspect
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Documents:
    """Mask plan of packed documents: document i has tokens `starts[i]` ... `starts[i + 1] - 1` of all B S."""

    starts: Tensor  # int32 (documents + 1), on the device of the queries
    longest: int
    window: int  # 0: none

    @classmethod
    def of(cls, begins: Tensor, window: int, device: torch.device) -> "Documents":
        """Build the plan from `begins` (B, S) on the host, true at the first token of each document and row."""
        starts = [*torch.nonzero(begins.flatten()).flatten().tolist(), begins.numel()]
        sizes = [end - begin for begin, end in pairwise(starts)]
        longest = max(sizes)
        placed = torch.tensor(starts, dtype=torch.int32, pin_memory=device.type == "cuda")
        return cls(placed.to(device, non_blocking=True), longest, window if 0 < window < longest else 0)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention output (B, N, S, D) of query over key and value (B, K, S, D)."""
        batch, heads, sequence, size = query.shape
        # Views, since the heads of a token are contiguous.
        flat = [part.transpose(1, 2).flatten(0, 1) for part in (query, key, value)]  # (B S, ., D)
        window = (self.window - 1, 0) if self.window else (-1, 0)
        starts, longest = self.starts, self.longest
        options = _options(is_grouped=key.shape[1] != heads)
        mixed: Tensor = kernel()(*flat, starts, starts, longest, longest, window_size=window, **options)
        return mixed.view(batch, sequence, heads, size).transpose(1, 2)


@cache
def kernel() -> Any:
    """`torch.nn.attention.varlen.varlen_attn`. Raises `ImportError` if torch has none that supports windows."""
    # Imported on first use: it loads torch's compiler, which takes seconds.
    from torch.nn.attention.varlen import varlen_attn

    if "window_size" not in inspect.signature(varlen_attn).parameters:
        raise ImportError(f"torch {torch.__version__}: its varlen_attn takes no window_size")
    return varlen_attn


def _options(*, is_grouped: bool) -> dict[str, Any]:
    # torch 2.11 supports grouped heads without this option.
    told = "enable_gqa" in inspect.signature(kernel()).parameters
    return {"enable_gqa": is_grouped} if told else {}

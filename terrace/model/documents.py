"""Attention by torch's varlen kernel: flash attention 2 over documents that lie end to end.

All rows of a micro-batch are one run of tokens, in which documents begin at the places `starts`. No mask exists,
grouped heads are taken as they are, and a window of W is the kernel's own: a token sees itself and the W - 1 before it,
which the kernel calls (W - 1, 0). The kernel needs the number of documents and the longest one on the host.

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
    """The mask plan of documents end to end: document i holds tokens `starts[i]` ... `starts[i + 1] - 1` of B S."""

    starts: Tensor  # int32 (documents + 1), on the device of the queries
    longest: int
    window: int  # 0: none

    @classmethod
    def of(cls, begins: Tensor, window: int, device: torch.device) -> "Documents":
        """Documents begin where `begins` (B, S), on the host, is true; each row begins one."""
        starts = [*torch.nonzero(begins.flatten()).flatten().tolist(), begins.numel()]
        sizes = [end - begin for begin, end in pairwise(starts)]
        longest = max(sizes)
        placed = torch.tensor(starts, dtype=torch.int32, pin_memory=device.type == "cuda")
        return cls(placed.to(device, non_blocking=True), longest, window if 0 < window < longest else 0)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention output (B, N, S, D) of query over key and value (B, K, S, D)."""
        batch, heads, sequence, size = query.shape
        # Heads of a token lie side by side, so these are views.
        flat = [part.transpose(1, 2).flatten(0, 1) for part in (query, key, value)]  # (B S, ., D)
        window = (self.window - 1, 0) if self.window else (-1, 0)
        starts, longest = self.starts, self.longest
        options = _options(is_grouped=key.shape[1] != heads)
        mixed: Tensor = kernel()(*flat, starts, starts, longest, longest, window_size=window, **options)
        return mixed.view(batch, sequence, heads, size).transpose(1, 2)


@cache
def kernel() -> Any:
    """`torch.nn.attention.varlen.varlen_attn`; raises `ImportError` where torch has none that takes windows."""
    # Imported at its first use: it brings the compiler of torch, seconds in every process.
    from torch.nn.attention.varlen import varlen_attn

    if "window_size" not in inspect.signature(varlen_attn).parameters:
        raise ImportError(f"torch {torch.__version__}: its varlen_attn takes no window_size")
    return varlen_attn


def _options(*, is_grouped: bool) -> dict[str, Any]:
    # torch 2.11 takes grouped heads without being told.
    told = "enable_gqa" in inspect.signature(kernel()).parameters
    return {"enable_gqa": is_grouped} if told else {}

"""Attention by FlexAttention, which skips blocks of keys that no query of a block of queries sees.

Token q of a row sees the keys first(q) ... q (terrace.model.attention), and first never falls along a row. So a block
of queries sees some key of block j where its least first(q) is at most the block's last key, and every query sees all
of a block before its own where its largest first(q) is at most the block's first key. Both follow from two elements of
`first` for each block of queries: no mask of (S, S) is ever made, not even to build this one. Inside blocks that some
queries see in part, the kernel masks. Source: Dong et al. 2412.05496; torch.nn.attention.flex_attention.

Compiled on CUDA. Elsewhere torch runs it unfused, which is for tests.

Shape legend: B batch, S sequence, N query heads, K key-value heads, D head_dim, Q blocks of a row.
"""

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128  # tokens of a block, torch's default


@dataclass(frozen=True)
class BlockMasked:
    """The mask plan of rows whose tokens see the keys `first` ... their own place; a `cap` of scores, 0 for none."""

    mask: "BlockMask"
    cap: float = 0.0

    @classmethod
    def of(cls, first: Tensor, cap: float = 0.0) -> "BlockMasked":
        """`first` (B, S) int64 is the first key that each token sees; (1, S) for rows that are alike."""
        # Imported at its first use: it brings the compiler of torch, seconds in every process.
        from torch.nn.attention.flex_attention import BlockMask

        seen, whole = seen_blocks(first)
        mask = BlockMask.from_kv_blocks(
            *_ordered(seen),
            *_ordered(whole),
            BLOCK_SIZE=BLOCK,
            mask_mod=_of_rows(first) if len(first) > 1 else _of_all_rows(first[0]),
            seq_lengths=(first.shape[1], first.shape[1]),
        )
        return cls(mask, cap)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention output (B, N, S, D) of query over key and value (B, K, S, D)."""
        is_grouped = key.shape[1] != query.shape[1]
        options: dict[str, Any] = {"score_mod": _capped(self.cap)} if self.cap else {}
        kernel = _kernel(query.device.type)
        mixed: Tensor = kernel(query, key, value, block_mask=self.mask, enable_gqa=is_grouped, **options)
        return mixed


def seen_blocks(first: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks of keys that each block of queries sees in part, and wholly: bool (B, 1, Q, Q), from `first` (B, S)."""
    sequence = first.shape[1]
    num = -(-sequence // BLOCK)
    places = torch.arange(num, device=first.device)
    begins = places * BLOCK  # of keys, and of queries
    lasts = (begins + BLOCK - 1).clamp(max=sequence - 1)
    least, largest = first[:, begins].unsqueeze(2), first[:, lasts].unsqueeze(2)  # (B, Q, 1)
    before = places.unsqueeze(1) > places
    # The last block may have places that no token has; torch masks these, so it is never whole.
    is_full = (begins + BLOCK <= sequence).unsqueeze(1)
    whole = before & is_full & (largest <= begins)
    seen = (before & (least <= lasts)) | torch.eye(num, dtype=torch.bool, device=first.device)
    return (seen & ~whole).unsqueeze(1), whole.unsqueeze(1)


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers of blocks (B, 1, Q), and their indices (B, 1, Q, Q), int32, the marked ones first."""
    indices = torch.argsort(blocks.int(), dim=-1, descending=True, stable=True)
    return blocks.sum(-1).int(), indices.int().contiguous()


def _of_rows(first: Tensor) -> Any:
    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key >= first[row, query])

    return sees


def _of_all_rows(first: Tensor) -> Any:
    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key >= first[query])

    return sees


@cache
def _capped(cap: float) -> Any:
    # One function for a cap: another object would be compiled again.
    def capped(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return capped


@cache
def _kernel(device_type: str) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention) if device_type == "cuda" else flex_attention

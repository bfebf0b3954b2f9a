"""FlexAttention with a block mask: blocks of keys that no query of a block sees are skipped.

Token q of a row sees the keys first(q) ... q (terrace.model.attention), and first(q) is non-decreasing. A block of
queries therefore sees some key of an earlier block if its smallest first(q) is at most that block's last key, and all
keys of it if its largest first(q) is at most that block's first key. Both need only two elements of `first` per block
of queries, so no (S, S) mask is ever created. Blocks that are seen in part are masked in the kernel. Source: Dong et
al. 2412.05496; torch.nn.attention.flex_attention.

Compiled on CUDA; on other devices torch runs it unfused, for tests only.

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
    """FlexAttention mask plan; `cap` is the soft cap of scores, 0 for none."""

    mask: "BlockMask"
    cap: float = 0.0

    @classmethod
    def of(cls, first: Tensor, cap: float = 0.0) -> "BlockMasked":
        """Build the plan from the first key that each token sees, int64 (B, S), or (1, S) if all rows are alike."""
        # Imported on first use: it loads torch's compiler, which takes seconds.
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
    """Key blocks that each query block sees partly, and completely: two bool (B, 1, Q, Q), from `first` (B, S)."""
    sequence = first.shape[1]
    num = -(-sequence // BLOCK)
    places = torch.arange(num, device=first.device)
    begins = places * BLOCK  # of keys, and of queries
    lasts = (begins + BLOCK - 1).clamp(max=sequence - 1)
    least, largest = first[:, begins].unsqueeze(2), first[:, lasts].unsqueeze(2)  # (B, Q, 1)
    before = places.unsqueeze(1) > places
    # The last block may extend beyond the row; torch masks that part, so the block is never complete.
    is_full = (begins + BLOCK <= sequence).unsqueeze(1)
    whole = before & is_full & (largest <= begins)
    seen = (before & (least <= lasts)) | torch.eye(num, dtype=torch.bool, device=first.device)
    return (seen & ~whole).unsqueeze(1), whole.unsqueeze(1)


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Number (B, 1, Q) and indices (B, 1, Q, Q) of the marked blocks, which come first in each row; int32."""
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
    # Cached, since FlexAttention recompiles for every new function object.
    def capped(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return capped


@cache
def _kernel(device_type: str) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention) if device_type == "cuda" else flex_attention

"""Mask plans of torch's fused kernels for documents and windows on CUDA; neither makes an (S, S) mask.

**varlen** (`Documents`): flash attention 2 over packed documents. All rows of a micro-batch are concatenated; documents
begin at the offsets `starts`. The kernel supports grouped heads and windows: a window of W, a token and the W - 1
before it, is (W - 1, 0) in its arguments. It needs the number of documents and the length of the longest one on the
host.

**flex** (`BlockMasked`): FlexAttention with a block mask, which skips blocks of keys that no query of a block sees.
Token q of a row sees the keys first(q) ... q (terrace.model.attention), and first(q) is non-decreasing. A block of
queries therefore sees some key of an earlier block if its smallest first(q) is at most that block's last key, and all
keys of it if its largest first(q) is at most that block's first key. Both need only two elements of `first` per block
of queries. Blocks that are seen in part are masked in the kernel. Source: Dong et al. 2412.05496;
torch.nn.attention.flex_attention. Compiled on CUDA; on other devices torch runs it unfused, for tests only.

Shape legend: B batch, S sequence, N query heads, K key-value heads, D head_dim, Q blocks of a row.
"""

import inspect
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from terrace.accelerator import placed
from terrace.model.attention import NO_SINKS, sinks_gradient, with_sinks

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128  # tokens of a block, torch's default


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
        on_device = placed(torch.tensor(starts, dtype=torch.int32), device)
        return cls(on_device, longest, window if 0 < window < longest else 0)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor = NO_SINKS) -> Tensor:
        """Attention output (B, N, S, D) of query over key and value (B, K, S, D), with `sinks` (N)."""
        batch, heads, sequence, size = query.shape
        # Views, since the heads of a token are contiguous.
        flat = [part.transpose(1, 2).flatten(0, 1) for part in (query, key, value)]  # (B S, ., D)
        window = (self.window - 1, 0) if self.window else (-1, 0)
        starts, longest = self.starts, self.longest
        if len(sinks):
            sunk: Tensor = _AttendDocuments.apply(*flat, sinks, self)  # type: ignore[no-untyped-call]
            return sunk.view(batch, sequence, heads, size).transpose(1, 2)
        options = _options(is_grouped=key.shape[1] != heads)
        mixed: Tensor = varlen_kernel()(*flat, starts, starts, longest, longest, window_size=window, **options)
        return mixed.view(batch, sequence, heads, size).transpose(1, 2)


class _AttendDocuments(torch.autograd.Function):
    # The kernel below `varlen_attn`, whose backward takes the output and lse with sinks: (T, ., D) each, lse (N, T).

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, plan: Documents) -> Tensor:
        ctx.lengths = plan.starts, plan.starts, plan.longest, plan.longest, 0.0, not plan.window
        ctx.window = {"window_size_left": plan.window - 1, "window_size_right": 0}
        flash: Any = torch.ops.aten._flash_attention_forward
        out, lse = flash(query, key, value, *ctx.lengths, False, **ctx.window)[:2]
        out, lse = (each[0] for each in with_sinks(out.transpose(0, 1).unsqueeze(0), lse.unsqueeze(0), sinks))
        ctx.save_for_backward(query, key, value, sinks, out.transpose(0, 1), lse)
        return out.transpose(0, 1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, lse = ctx.saved_tensors
        flash: Any = torch.ops.aten._flash_attention_backward
        dropout = torch.zeros(2, dtype=torch.uint64, device=query.device), torch.empty(0, device=query.device)
        grads = flash(grad.contiguous(), query, key, value, out, lse, *ctx.lengths, *dropout, **ctx.window)
        rows = grad.transpose(0, 1).unsqueeze(0), out.transpose(0, 1).unsqueeze(0), lse.unsqueeze(0)
        of_sinks = sinks_gradient(*rows, sinks) if ctx.needs_input_grad[3] else None
        return *grads, of_sinks, None


@cache
def varlen_kernel() -> Any:
    """`torch.nn.attention.varlen.varlen_attn`."""
    # Imported on first use: it loads torch's compiler, which takes seconds.
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn


def _options(*, is_grouped: bool) -> dict[str, Any]:
    # torch 2.11 supports grouped heads without this option.
    return {"enable_gqa": is_grouped} if "enable_gqa" in inspect.signature(varlen_kernel()).parameters else {}


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

    def attend(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor = NO_SINKS) -> Tensor:
        """Attention output (B, N, S, D) of query over key and value (B, K, S, D), with `sinks` (N)."""
        is_grouped = key.shape[1] != query.shape[1]
        options: dict[str, Any] = {"score_mod": _capped(self.cap)} if self.cap else {}
        kernel = _flex_kernel(query.device.type)
        if len(sinks):
            from torch.nn.attention.flex_attention import AuxRequest

            options["return_aux"] = AuxRequest(lse=True)
            out, aux = kernel(query, key, value, block_mask=self.mask, enable_gqa=is_grouped, **options)
            # Autograd differentiates lse too, which the kernel's backward takes.
            share: Tensor = (aux.lse - sinks.to(aux.lse.dtype).view(-1, 1)).sigmoid().to(out.dtype)
            sunk: Tensor = out * share.unsqueeze(-1)
            return sunk
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
def _flex_kernel(device_type: str) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention) if device_type != "cpu" else flex_attention

"""Effect of documents and sliding windows on attention, by kernel: bytes and keys.

terrace.model.attention_kernel lists the kernels and chooses one. In pieces, on a CPU, the output of each piece is kept
in addition to the whole output, and under a window each piece keeps a copy of the keys and values that it sees. Varlen
attention keeps one number per document, FlexAttention block indices. Other kernels use one mask over whole rows, and on
CUDA grouped heads are repeated for a kernel that takes a mask. For memory the documents are unknown here, so everything
that depends on them is counted at its upper bound: in bf16 on a CPU as if all pieces were plain products. Their
lengths, if known, give what is left of a row's attention (`core_shares`).
"""

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from terrace.model.attention_kernel import AttentionCase, AttentionChoice, AttentionKernel, expected
from terrace.model.operations import Core, Operations
from terrace.plan.wire import FORMATS

if TYPE_CHECKING:
    from terrace.cluster.device import Device
    from terrace.model.spec import BlockSpec
    from terrace.sequence.ragged import Shares
    from terrace.simulate.work import Work

# `terrace.model.attention` attends with plain products in bf16 on a CPU up to this length; a test compares the two.
CPU_PLAIN_SEQUENCE = 128
_LONGEST_FLASH_HEAD = 256
CPU_SHORT_PIECE = 64  # likewise: tokens of short documents attended together, and the smallest piece under a window

FLEX_BLOCK = 128  # of `terrace.model.fused_attention`, likewise
# From terrace.model.pair_kernels, likewise: cuDNN's longest head, and the number that divides its lengths.
CUDNN_HEAD, CUDNN_LENGTHS = 128, 128


def piece_tokens(window: int, sequence: int) -> int:
    """Maximum tokens of a one-document row that attend together on a CPU."""
    return min(sequence, max(window, CPU_SHORT_PIECE)) if window else sequence


def causal_pairs(sequence: int, window: int = 0) -> int:
    """(query, key) pairs of one causal sequence in which a query sees at most `window` tokens (0: all)."""
    seen = min(sequence, window) if window else sequence
    return seen * (seen + 1) // 2 + (sequence - seen) * seen


def core_keys(work: "Work", backend: str) -> tuple[int, bool]:
    """Mean number of keys per query that the attention core multiplies, and whether its kernel is causal.

    Rows are assumed to hold one document each, so a price from these keys is an upper bound. Varlen and FlexAttention
    skip keys beyond a window but for half a tile, so a windowed row is priced as a causal one with twice the keys seen.
    """
    window, sequence = work.layer.core.window, work.sequence
    # A window of the whole sequence or more masks nothing.
    if not 0 < window < sequence:
        return sequence, work.causal
    kernel = work.kernel_on(backend)
    if kernel in ("varlen", "flex") and not work.is_spread:
        return min(sequence, 2 * causal_pairs(sequence, window) // sequence + FLEX_BLOCK), True
    length = piece_tokens(window, sequence)
    # Under a mask the kernel computes the whole square and cannot skip the causal half.
    if backend != "cpu" or kernel == "sdpa" or length == sequence:
        return sequence, False
    # The first piece sees its own keys, each later piece also the piece before.
    return (length + 2 * (sequence - length)) * length // sequence, False


def core_shares(device: "Device", work: "Work") -> "Shares":
    """Shares of the attention of `work.layer`, of 1 where its kernel computes whole rows under a mask."""
    from terrace.sequence.ragged import Shares, drawn_shares  # here, as most steps know no lengths

    ragged, kernels, window = work.ragged, device.kernels, work.layer.core.window
    if not ragged.lengths or (not work.is_spread and work.kernel_on(device.type) == "sdpa"):
        return Shares()
    if work.balance == "cost":
        dealt = ragged.dealt
        return Shares((dealt.slowest,) * 2, (0.0, 0.0), dealt.slowest, dealt.mean, dealt.spread)
    forward = kernels.attention_half_keys * work.flash
    halves = forward, kernels.attention_half_keys_backward * work.flash or forward
    return drawn_shares(ragged, work.sequence, work.micro_batch, work.ring, work.pooled, window, halves)


def spread_kernel(work: "Work") -> AttentionKernel:
    """The kernel for attention over several ranks, as in terrace.model.pair_kernels: torch's own, or flash attention 2.

    Both return log-sum-exps. A ring rank has two parts of every row.
    """
    length = work.sequence // (2 * work.ring if work.ring > 1 else 1)
    repeats = not work.documents and length % CUDNN_LENGTHS == 0
    return "sdpa" if repeats and work.layer.core.head_dim <= CUDNN_HEAD else "varlen"


def has_flash_attention(
    core: Core, sequence: int, compute: str, backend: str, documents: bool = False, attention: AttentionChoice = "auto"
) -> bool:
    """Whether the decoder attends with a fused kernel, which never writes the scores, or with plain products.

    Varlen and FlexAttention are fused. Of the kernels behind `scaled_dot_product_attention` on CUDA the flash kernel
    takes half precision and heads of up to 256; the other fused one takes fp32, longer heads and masks too, but no
    grouped heads (torch's documentation): under a mask these are repeated. All other cases use plain products. On a CPU
    plain products are used for short rows, or pieces of rows, in bf16; with documents, pieces may be short, so plain
    products are assumed. Among fused kernels only flex caps scores.
    """
    masked, capped = documents or 0 < core.window < sequence, core.cap > 0
    kernel = expected(AttentionCase(backend, compute, core.head_dim, core.is_grouped, masked, capped), attention)
    if kernel in ("varlen", "flex") or capped:
        return kernel == "flex"
    if backend == "cpu":
        if kernel == "sdpa":  # whole rows
            return compute != "bf16" or sequence > CPU_PLAIN_SEQUENCE
        # Short pieces in bf16 attend by plain products, and documents may be short.
        longest = piece_tokens(core.window, sequence)
        return compute != "bf16" or (longest > CPU_PLAIN_SEQUENCE and not documents)
    grouped = core.is_grouped and not masked
    return compute != "fp64" and not (grouped and (compute == "fp32" or core.head_dim > _LONGEST_FLASH_HEAD))


def work_in(work: "Work", block: "BlockSpec", backend: str) -> "Work":
    """The micro-batch's work in a block; a block without declared operations counts as the shared layer."""
    layer = block.declared
    return work if layer is work.layer or not layer.each else _work_in(work, layer, backend)


@lru_cache(maxsize=65536)
def _work_in(work: "Work", layer: Operations, backend: str) -> "Work":
    if layer == work.layer:
        return work
    core, flash = layer.core, work.flash
    if core.heads:
        flash &= has_flash_attention(core, work.sequence, work.compute, backend, work.documents, work.attention)
    return replace(work, layer=layer, flash=flash)


def copied_bytes(work: "Work", backend: str, key_bytes: int, query_bytes: int) -> int:
    """Bytes of keys (or of values) that attention copies to make them contiguous, out of `key_bytes`.

    In pieces with a window, every piece but the first copies its own keys and those of the previous piece.
    """
    kernel = work.kernel_on(backend)
    if not work.is_masked or kernel in ("varlen", "flex"):
        return 0
    if kernel == "sdpa":
        if backend == "cpu":
            return 0
        return query_bytes if work.layer.core.is_grouped else 0
    sequence = work.sequence
    length = piece_tokens(work.layer.core.window, sequence)
    return key_bytes * ((-(-sequence // length) - 1) * length + sequence - length) // sequence


def mask_bytes(work: "Work", backend: str) -> int:
    """Bytes of a micro-batch's masks, shared by all layers; an upper bound where they depend on documents.

    Without documents the masks of one row serve all micro-batches.
    """
    kernel, sequence = work.kernel_on(backend), work.sequence
    if kernel == "varlen":
        return 4 * (1 + (work.tokens if work.documents else work.micro_batch))  # where documents begin
    if kernel == "flex":
        rows, blocks = work.tokens // sequence if work.documents else 1, -(-sequence // FLEX_BLOCK)
        # The first key of each token; counts and indices of partial and full blocks, by queries and by keys.
        return rows * (8 * sequence + 4 * 4 * blocks * (1 + blocks))
    if not work.is_masked:
        return 0
    item, window = FORMATS[work.compute].element_bytes, work.layer.core.window
    if kernel == "sdpa":
        return item * (work.tokens if work.documents else sequence) * sequence
    length = piece_tokens(window, sequence)
    bands = 0
    if length < sequence:
        rest = (sequence - 1) % length + 1
        bands = (length * length if window < length else 0) + 2 * length * length
        # A shorter last piece needs a mask of its own.
        bands += rest * (length + rest) if rest < length else 0
    if not work.documents:
        return item * (bands or sequence * sequence)
    # Groups of short documents, or the last piece of each document that is longer than a window.
    return item * (bands + work.tokens * (2 * length if bands else min(sequence, CPU_SHORT_PIECE)))

"""Lossless codec of bf16: exponents in 4 bits relative to the largest of their block, signs and mantissas unchanged.

A message of n elements in nb = ceil(n / B) blocks (B = 128 by default), all parts in bytes:

    bases     nb            of each block: max(largest exponent - 15, 0)
    counts    nb            of each block: its number of listed exponents, or `ZEROS`; of the first also `TOO_WIDE`
    nibbles   ceil(n / 2)   max(exponent - base, 0), in halves of a block as in int4
    rests     n             the sign in bit 7, the mantissa below
    listed    the rest      exponents at or below their base, in the order of the elements, then zeros

A nibble above 0 says base + nibble. A nibble of 0 says that the exponent is 0 where the base is 0 or the count is
`ZEROS`, as of zeros and subnormals, and otherwise that the exponent is listed. So infinities, nans and their payload,
signed zeros and subnormals all come back. The size of a message does not depend on its values: 12.25 bits an element,
with room for one listed exponent in 64. Of normally distributed numbers in blocks of 128, about one exponent in ten
thousand is 15 or more below the largest.

A row with more of them does not fit and is marked `TOO_WIDE`. The sender then also sends its plain values, and the
receiver, which reads the mark in the packed message, waits for them (terrace.comm.collectives, stage_p2p and
group_p2p). A fixed size saves the latency of a message with sizes; in return, a message that does not fit is followed
by its plain values. The mark is read on the host, which on a device with streams waits for each packed message.

The same code runs on every device; on a CPU it works on chunks that stay in the cache, because eager torch makes one
pass over memory for each operation.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from terrace.plan.wire import WireFormat

CHUNK = 1 << 18  # elements on a CPU, measured best: fewer pay more for calls than they gain from the cache
ZEROS, TOO_WIDE = 255, 254  # values of a count that a block of 128 cannot have
_WINDOW = 15  # an exponent at the largest has nibble 15
_REST = -0x8000 + 0x7F  # sign and mantissa of a bf16, as int16


@dataclass(frozen=True)
class _Parts:
    counts: int
    nibbles: int
    rests: int
    listed: int
    total: int

    @staticmethod
    def of(wire: WireFormat, numel: int) -> "_Parts":
        blocks = -(-numel // wire.block)
        rests = 2 * blocks - (-numel // 2)
        return _Parts(blocks, 2 * blocks, rests, rests + numel, wire.message_bytes(numel))


@dataclass(frozen=True)
class _Blocks:
    """Blocks of one width, of all rows: their elements and their places in each part of the messages."""

    elements: Tensor  # [rows, blocks, width]
    bases: Tensor  # [rows, blocks], uint8
    counts: Tensor  # [rows, blocks], uint8
    nibbles: Tensor  # [rows, blocks, ceil(width / 2)], uint8
    rests: Tensor  # [rows, blocks, width], int8

    def chunks(self, size: int) -> Iterator["_Blocks"]:
        """Some whole rows, or some blocks of one row, of at most `size` elements or one block."""
        _, num, width = self.elements.shape
        rows, blocks = max(1, size // (num * width)), max(1, size // width)
        views = (self.elements, self.bases, self.counts, self.nibbles, self.rests)
        # Split, because a view made by slicing costs as much as a pass over a tenth of a chunk.
        for band in zip(*(torch.split(view, rows, 0) for view in views), strict=True):
            for parts in zip(*(torch.split(view, blocks, 1) for view in band), strict=True):
                yield _Blocks(*parts)

    def wide(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """(Row, index) of blocks whose count is not 0, in order, of at most `size` elements at once."""
        row, block = self.counts.nonzero(as_tuple=True)
        at_once = max(1, size // self.elements.shape[2])
        yield from zip(torch.split(row, at_once), torch.split(block, at_once), strict=True)


def encode(values: Tensor, wire: WireFormat, out: Tensor, residual: Tensor | None = None) -> None:
    """Encode each row, rounded to bf16 if it is wider; see above. A row that does not fit is marked `TOO_WIDE`."""
    assert residual is None, "a lossless format leaves no residual"
    parts, scratch = _Parts.of(wire, values.shape[1]), _Scratch(values)
    out[:, parts.listed :].zero_()
    rows, listed = list[Tensor](), list[Tensor]()
    for blocks in _sections(values, wire, out):
        for each in blocks.chunks(scratch.size):
            words = scratch.words(each.elements)
            exponents = scratch.exponents(words)
            each.rests.copy_(scratch.rests(words))
            bases = exponents.amax(-1, keepdim=True).clamp_(min=_WINDOW).sub_(_WINDOW)
            each.bases.copy_(bases[..., 0])
            # A block that reaches its base is looked at again below, unless the base is 0 itself.
            each.counts.copy_((exponents.amin(-1, keepdim=True) <= bases).logical_and_(bases)[..., 0])
            nibbles = torch.maximum(exponents, bases, out=exponents).sub_(bases)
            half = each.nibbles.shape[2]
            each.nibbles.copy_(nibbles[..., :half])
            each.nibbles[..., : nibbles.shape[2] - half].add_(nibbles[..., half:], alpha=16)
        for row, block in blocks.wide(scratch.size):
            exponents = _exponents(blocks.elements[row, block])
            at_base = exponents <= blocks.bases[row, block][:, None]
            some = (at_base & (exponents != 0)).any(-1)
            blocks.counts[row, block] = torch.where(some, at_base.sum(-1), ZEROS).to(torch.uint8)
            at_base &= some[:, None]
            rows.append(row[:, None].expand_as(at_base)[at_base])
            listed.append(exponents[at_base])
    if rows:
        _write_listed(out, parts, torch.cat(rows), torch.cat(listed))


def decode(messages: Tensor, wire: WireFormat, out: Tensor) -> None:
    """Decode every message into `out` [rows, n]. None of them may be too wide."""
    numel = out.shape[1]
    assert not too_wide(messages, wire, numel), "a message that does not fit is followed by its plain values"
    parts, scratch = _Parts.of(wire, numel), _Scratch(out)
    for blocks in _sections(out, wire, messages):
        for each in blocks.chunks(scratch.size):
            exponents = _with_nibbles(each.nibbles, scratch.bytes(each.elements.shape)).add_(each.bases[..., None])
            # Of sign and mantissa, extended by sign, one bit of the sign is kept.
            high = scratch.second(each.elements.shape).copy_(exponents)
            low = scratch.third(each.elements.shape).copy_(each.rests).bitwise_and_(_REST)
            if out.dtype == torch.bfloat16:
                torch.add(low, high, alpha=128, out=each.elements.view(torch.int16))
            else:
                words = torch.add(low, high, alpha=128, out=scratch.first(each.elements.shape))
                each.elements.copy_(words.view(torch.bfloat16))
    counts = messages[:, parts.counts : parts.nibbles]
    if not bool(counts.any()):
        return
    # The first listed exponent of each block.
    lengths = torch.where(counts == ZEROS, 0, counts.to(torch.int64))
    starts = lengths.cumsum(1) - lengths + parts.listed
    before = 0
    for blocks in _sections(out, wire, messages):
        for row, block in blocks.wide(scratch.size):
            _restore(blocks, row, block, starts[row, before + block], messages)
        before += blocks.elements.shape[1]


def decode_add(messages: Tensor, wire: WireFormat, out: Tensor) -> None:
    """Decode the messages and add them to `out` in row order; see `terrace.comm.codecs`."""
    values = torch.empty(1, out.shape[0], dtype=torch.bfloat16, device=out.device)
    for message in messages:
        decode(message[None], wire, values)
        out.add_(values[0])


def decode_sum(messages: Tensor, own: Tensor, position: int, wire: WireFormat, out: Tensor) -> None:
    """Write the sum of the messages and `own`, which is row `position` among them, to `out`, added in row order."""
    if position:
        decode(messages[:1], wire, out[None])
        decode_add(messages[1:position], wire, out)
        out.add_(own)
    else:
        out.copy_(own)
    decode_add(messages[position:], wire, out)


def too_wide(messages: Tensor, wire: WireFormat, numel: int) -> bool:
    """Whether a row of `messages`, of `numel` elements each, does not fit, so that plain values follow."""
    return bool(numel) and bool((messages[:, _Parts.of(wire, numel).counts] == TOO_WIDE).any())


def mark_all(messages: Tensor, wire: WireFormat, numel: int) -> None:
    """Mark all rows if one of them does not fit, so that whoever reads any of them knows that plain values follow."""
    if too_wide(messages, wire, numel):
        mark(messages, wire, numel)


def mark(messages: Tensor, wire: WireFormat, numel: int) -> None:
    """Say in all rows that plain values follow."""
    messages[:, _Parts.of(wire, numel).counts] = TOO_WIDE


class _Scratch:
    def __init__(self, like: Tensor) -> None:
        self.size = CHUNK if like.device.type == "cpu" else max(1, like.numel())
        numel = min(self.size, like.numel())
        self._words = [torch.empty(numel, dtype=torch.int16, device=like.device) for _ in range(3)]
        self._bytes = torch.empty(numel, dtype=torch.uint8, device=like.device)

    def first(self, shape: torch.Size) -> Tensor:
        return self._words[0][: shape.numel()].view(shape)

    def second(self, shape: torch.Size) -> Tensor:
        return self._words[1][: shape.numel()].view(shape)

    def third(self, shape: torch.Size) -> Tensor:
        return self._words[2][: shape.numel()].view(shape)

    def bytes(self, shape: torch.Size) -> Tensor:
        return self._bytes[: shape.numel()].view(shape)

    def words(self, x: Tensor) -> Tensor:
        """The bits of x, rounded to bf16, as int16."""
        if x.dtype == torch.bfloat16:
            return x.view(torch.int16)
        words = self.first(x.shape)
        words.view(torch.bfloat16).copy_(x)
        return words

    def exponents(self, words: Tensor) -> Tensor:
        # Narrowing keeps the low 8 bits, which the sign is not among.
        shifted = torch.bitwise_right_shift(words, 7, out=self.second(words.shape))
        return self.bytes(words.shape).copy_(shifted)

    def rests(self, words: Tensor) -> Tensor:
        # The shift leaves -1 or 0 of the sign; -128 is bit 7 of a byte.
        sign = torch.bitwise_right_shift(words, 15, out=self.second(words.shape))
        return torch.bitwise_and(words, 0x7F, out=self.third(words.shape)).add_(sign, alpha=128)


def _exponents(x: Tensor) -> Tensor:
    return (x.to(torch.bfloat16).contiguous().view(torch.int16) >> 7).to(torch.uint8)


def _with_nibbles(nibbles: Tensor, out: Tensor) -> Tensor:
    half = nibbles.shape[-1]
    torch.bitwise_and(nibbles, 15, out=out[..., :half])
    torch.bitwise_right_shift(nibbles[..., : out.shape[-1] - half], 4, out=out[..., half:])
    return out


def _write_listed(out: Tensor, parts: _Parts, rows: Tensor, listed: Tensor) -> None:
    # Short last blocks come after the others of all rows.
    order = rows.argsort(stable=True)
    rows, listed = rows[order], listed[order]
    lengths = torch.bincount(rows, minlength=len(out))
    places = torch.arange(len(rows), device=rows.device) - (lengths.cumsum(0) - lengths)[rows]
    fits = lengths <= parts.total - parts.listed
    out[~fits, parts.counts] = TOO_WIDE
    kept = fits[rows]
    out[rows[kept], parts.listed + places[kept]] = listed[kept]


def _restore(blocks: _Blocks, row: Tensor, block: Tensor, starts: Tensor, messages: Tensor) -> None:
    # Write blocks whose count is not 0 again: an exponent of nibble 0 is 0, or listed.
    nibbles, rests = blocks.nibbles[row, block], blocks.rests[row, block]
    exponents = _with_nibbles(nibbles, torch.empty_like(rests, dtype=torch.uint8))
    at_base = exponents == 0
    exponents.add_(blocks.bases[row, block][:, None]).masked_fill_(at_base, 0)
    at_base &= (blocks.counts[row, block] != ZEROS)[:, None]
    places = starts[:, None] + at_base.cumsum(-1) - 1
    exponents[at_base] = messages[row[:, None].expand_as(at_base)[at_base], places[at_base]]
    words = (rests.to(torch.int16) & _REST).add_(exponents.to(torch.int16), alpha=128)
    blocks.elements[row, block] = words.view(torch.bfloat16).to(blocks.elements.dtype)


def _sections(values: Tensor, wire: WireFormat, messages: Tensor) -> Iterator[_Blocks]:
    # The full blocks, and a short last one.
    rows, numel = values.shape
    parts, full = _Parts.of(wire, numel), numel // wire.block
    for first, num, width in ((0, full, wire.block), (full, 1, numel - full * wire.block)):
        if not num or not width:
            continue
        start, half = first * wire.block, -(-width // 2)
        nibbles, rests = parts.nibbles + start // 2, parts.rests + start
        yield _Blocks(
            elements=values[:, start : start + num * width].view(rows, num, width),
            bases=messages[:, first : first + num],
            counts=messages[:, parts.counts + first : parts.counts + first + num],
            nibbles=messages[:, nibbles : nibbles + num * half].view(rows, num, half),
            rests=messages[:, rests : rests + num * width].view(torch.int8).view(rows, num, width),
        )

"""Constants of the block codecs and the layout of a message, shared by all implementations.

Nothing here touches data. The arithmetic is described in the package's docstring and implemented in `reference.py`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from terrace.plan.wire import SCALE_BYTES, WireFormat

MIN_SCALE_BITS = 0x00800000  # 2^-126: zeros and subnormals need no case of their own, and 1 / scale is finite
INF_BITS = 0x7F800000  # a magnitude of these bits or more is inf or nan
NAN_SCALE_BITS = 0x7FC00000  # the scale of a block that holds inf or nan, where nothing can be raised


@dataclass(frozen=True)
class Grid:
    """Rounding grid of a codec.

    `reciprocal` is the largest fp32 not above 1 / qmax: if it were rounded up, qmax s * reciprocal could exceed s,
    and values already on the grid would get another scale. `max_scale_bits` are the fp32 bits of the largest bf16
    whose product with qmax is a finite bf16, so that no finite block decodes to inf.
    """

    qmax: float
    reciprocal: float
    max_scale_bits: int


GRIDS = {
    "int8": Grid(127.0, float.fromhex("0x1.020408p-7"), 0x7C000000),  # 1 * 2^121
    "int4": Grid(7.0, float.fromhex("0x1.249248p-3"), 0x7E110000),  # (1 + 17/128) * 2^125
    "fp8": Grid(448.0, float.fromhex("0x1.249248p-9"), 0x7B110000),  # (1 + 17/128) * 2^119
}


@dataclass(frozen=True)
class Parts:
    """Byte layout of one message: scales from 0, codes from `codes`, zeros from `padding`."""

    codes: int
    padding: int
    total: int


def message_parts(wire: WireFormat, numel: int) -> Parts:
    codes = SCALE_BYTES * -(-numel // wire.block)
    return Parts(codes, codes + -(-numel * wire.bits // 8), wire.message_bytes(numel))


@dataclass(frozen=True)
class Section:
    """Consecutive blocks of one width, equal in every row: `num_blocks` of `width` elements from block `block` on.

    A message has at most two: the full blocks, and a short last one.
    """

    block: int
    num_blocks: int
    width: int
    start: int  # first element
    code: int  # first byte of the codes
    code_width: int  # bytes of the codes of a block

    @property
    def stop(self) -> int:
        return self.start + self.num_blocks * self.width

    @property
    def code_stop(self) -> int:
        return self.code + self.num_blocks * self.code_width


def sections(wire: WireFormat, numel: int) -> Iterator[Section]:
    num_full, rest = divmod(numel, wire.block)
    codes = message_parts(wire, numel).codes
    block_bytes = wire.block * wire.bits // 8
    if num_full:
        yield Section(0, num_full, wire.block, 0, codes, block_bytes)
    if rest:
        start = num_full * wire.block
        yield Section(num_full, 1, rest, start, codes + num_full * block_bytes, -(-rest * wire.bits // 8))

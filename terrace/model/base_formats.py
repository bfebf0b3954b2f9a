"""Formats in which the frozen matrices under adapters are held (`lora.base`). Needs no torch.

A matrix (out, in) is cut into blocks of consecutive elements of a row. A block has a scale, its largest magnitude, and
each of its elements is the index of the point nearest to element / scale. The scales of a matrix are stored in 8 bits
themselves: their mean is subtracted, and each `GROUP` of them, in the order of the blocks, shares a constant, the
largest magnitude of what is left. On a rank a block is one *record*:

    1 byte               the code of its scale (terrace.runtime.block_codes, signed)
    block bits / 8       the indices of its elements, the first one in the upper half of a byte

and a matrix has ceil(blocks / GROUP) + 1 constants in fp32, the last of which is the mean. Codes and constants are
those of the whole matrix, whichever ranks hold parts of it: records are sharded and gathered as bytes, and every rank
of a matrix has all of its constants.

`nf4` has 16 quantiles of the normal distribution as points, one of them 0 (QLoRA, arXiv 2305.14314, section 3 and
appendix E): 4 + 8 / 64 bits an element, and 32 / (64 * 256) of constants.
"""

from dataclasses import dataclass

GROUP = 256  # scales that share a constant, as in QLoRA; also the block of their codes (terrace.plan.state_formats)
CONSTANT_BYTES = 4  # fp32


@dataclass(frozen=True)
class BaseFormat:
    """2^bits `points` from -1 to 1, in ascending order; `block` elements share a scale."""

    points: tuple[float, ...]
    bits: int
    block: int

    @property
    def record_bytes(self) -> int:
        """Bytes of a block."""
        return 1 + self.block * self.bits // 8

    def coded_bytes(self, numel: int) -> int:
        """Bytes of the records of `numel` elements, a multiple of the block."""
        return numel // self.block * self.record_bytes

    def num_constants(self, numel: int) -> int:
        """Number of constants of a whole matrix of `numel` elements."""
        return -(-(numel // self.block) // GROUP) + 1


_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
BASE_FORMATS = {"nf4": BaseFormat(_NF4, bits=4, block=64)}

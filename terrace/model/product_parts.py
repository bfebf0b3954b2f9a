"""Size of the parts in which a weight gradient is converted to the dtype that gradients are summed in.

The runtime writes the gradient of a weight matrix into its place in the gradient buffer, without a tensor of its own
(terrace.runtime.weight_records). Only where the buffer is wider than the weights is the product a tensor, a part of the
rows at a time.
"""

PART_NUMEL = {"cpu": 1 << 19, "cuda": 1 << 24}  # elements of a part; on a GPU a guess


def part_rows(columns: int, device: str) -> int:
    """Number of rows of a weight gradient that are converted at a time, of `columns` elements each."""
    return max(1, PART_NUMEL[device] // max(1, columns))


def converted_bytes(numel: int, item: int, wide: int, device: str) -> int:
    """Bytes of the part of a weight gradient of `numel` elements that is converted at a time, at most.

    `item` is the bytes of an element, `wide` its bytes in fp32 at least.
    """
    return min(numel, PART_NUMEL[device]) * item if item < wide else 0

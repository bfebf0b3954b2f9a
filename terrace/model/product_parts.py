"""Chunk size for the conversion of weight gradients to the dtype of the gradient buffer.

The runtime writes weight gradients directly into the gradient buffer (terrace.runtime.weight_records). Only if the
buffer is wider than the weights does the product need a temporary, which holds a chunk of the rows at a time.
"""

PART_NUMEL = {"cpu": 1 << 19, "cuda": 1 << 24}  # elements of a chunk; a guess for GPUs


def part_rows(columns: int, device: str) -> int:
    """Number of rows, of `columns` elements each, that are converted at a time."""
    return max(1, PART_NUMEL[device] // max(1, columns))


def converted_bytes(numel: int, item: int, wide: int, device: str) -> int:
    """Largest size in bytes of the temporary chunk for a weight gradient of `numel` elements.

    `item` is the bytes of an element, `wide` its bytes in at least fp32.
    """
    return min(numel, PART_NUMEL[device]) * item if item < wide else 0

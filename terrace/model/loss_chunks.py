"""Chunk sizes of the loss, which bound the number of logits in memory (terrace.runtime.head)."""

# Smaller chunks read and write the weight gradient more often. On a CPU the time is constant within noise from 2^22 on
# (python -m bench.head), so this is the smallest such size. On a GPU the value is a guess: 1,024 tokens of a vocabulary
# of 128,000, 256 MB in bf16.
CHUNK_NUMEL = {"cpu": 1 << 22, "cuda": 1 << 27}

# On a CPU, elements of a chunk that are processed at a time in at least fp32, so that they stay in a cache.
CACHED_NUMEL = 1 << 18


def chunk_rows(vocab_size: int, device: str) -> int:
    """Number of tokens per chunk, on "cpu" or "cuda"."""
    return max(1, CHUNK_NUMEL[device] // max(1, vocab_size))


def part_rows(rows: int, vocab_size: int, device: str, operands: int) -> int:
    """Number of the `rows` of a chunk that are processed at a time, with `operands` temporaries in fp32.

    On a CPU they fit a cache. On a GPU all temporaries together are as large as one chunk, as `chunk_bytes` assumes.
    """
    return max(1, CACHED_NUMEL // max(1, vocab_size) if device == "cpu" else -(-rows // operands))


def slices(num: int, step: int) -> list[slice]:
    """Split `num` rows into slices of `step`; the last may extend beyond the end."""
    return [slice(start, start + step) for start in range(0, num, step)]


def chunk_bytes(
    tokens: int,
    vocab_size: int,
    hidden: int,
    item: int,
    wide: int,
    device: str,
    capped: bool = False,
    in_place: bool = False,
) -> int:
    """Bytes of a chunk: logits, temporaries of the softmax, and a wide accumulator of the weight gradient.

    `item` is the bytes of an element, `wide` its bytes in at least fp32. The accumulator exists only in half precision
    with several chunks. Logits that are `capped` have slopes of the same size. A kernel that works `in_place` has no
    temporaries.
    """
    rows = min(tokens, chunk_rows(vocab_size, device))
    cached = rows if device == "cuda" else min(rows, max(1, CACHED_NUMEL // vocab_size))
    copies = 2 if device == "cpu" and item < wide else 1 - in_place  # on a CPU torch converts first
    summed = vocab_size * hidden * wide if item < wide and rows < tokens else 0
    return rows * vocab_size * item * (2 if capped else 1) + copies * cached * vocab_size * wide + summed

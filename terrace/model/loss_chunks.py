"""Number of logits in memory at a time: the loss takes its tokens in chunks (terrace.runtime.head)."""

# On a CPU, from 2^22 on it makes no difference beyond noise (python -m bench.head): smaller chunks read and write the
# weight gradient more often. Smaller is less memory, so it is the least of those.
# On a GPU the figure is a guess: 1,024 tokens of a vocabulary of 128,000, which is 256 MB in bf16.
CHUNK_NUMEL = {"cpu": 1 << 22, "cuda": 1 << 27}

# Elements of a chunk that passes in fp32 or more work on at a time on a CPU, so that they stay in a cache.
CACHED_NUMEL = 1 << 18


def chunk_rows(vocab_size: int, device: str) -> int:
    """Number of tokens with logits over `vocab_size` words in memory at a time on a kind of device, cpu or cuda."""
    return max(1, CHUNK_NUMEL[device] // max(1, vocab_size))


def part_rows(rows: int, vocab_size: int, device: str, operands: int) -> int:
    """Number of rows, of the `rows` of a chunk, whose logits are worked on at a time, with `operands` as large in fp32.

    On a CPU they stay in a cache; on a GPU the operands together are one copy of the chunk, as `chunk_bytes` counts.
    """
    return max(1, CACHED_NUMEL // max(1, vocab_size) if device == "cpu" else -(-rows // operands))


def slices(num: int, step: int) -> list[slice]:
    """`num` rows in slices of `step`; the last may reach beyond the end."""
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
    """Bytes of a chunk: its logits, the operands of their softmax, a wide sum of weight gradients.

    `item` is the bytes of an element, `wide` its bytes in fp32 at least. The sum exists in half precision with several
    chunks. Logits that are `capped` have slopes beside them. A kernel that works `in_place` has no operands.
    """
    rows = min(tokens, chunk_rows(vocab_size, device))
    cached = rows if device == "cuda" else min(rows, max(1, CACHED_NUMEL // vocab_size))
    copies = 2 if device == "cpu" and item < wide else 1 - in_place  # on a CPU torch converts first
    summed = vocab_size * hidden * wide if item < wide and rows < tokens else 0
    return rows * vocab_size * item * (2 if capped else 1) + copies * cached * vocab_size * wide + summed

"""Document lengths from published histograms and two simple distributions, sampled deterministically.

Sample i of n is the quantile (j + 1/2) / n, where j is the position of i in a fixed permutation; lengths are uniform
inside a bin. So the n samples follow the distribution without random noise.
"""

import math
from collections.abc import Sequence

Bin = tuple[int, int, int]  # shortest and longest length, documents

# Documents of a long-context training corpus: the histogram that MagiAttention's benchmark samples from (SandAI-org/
# MagiAttention, exps/dist_attn/benchmark/datasets/default/doc_length_distribution.csv).
PUBLISHED: tuple[Bin, ...] = (
    (1, 10, 30254),
    (11, 50, 391188),
    (51, 100, 699596),
    (101, 200, 1377757),
    (201, 500, 3794735),
    (501, 1024, 3316785),
    (1025, 2048, 2106566),
    (2049, 4096, 988525),
    (4097, 8192, 410002),
    (8193, 16384, 173574),
    (16385, 32768, 115007),
    (32769, 65536, 18428),
    (65537, 131072, 22513),
    (131073, 196608, 18284),
)

# Thousandths of the documents of arXiv and of GitHub below 1k tokens, then in each power of two: the shares that public
# benchmarks of variable-length attention draw from, which do not say who counted them. Documents of more than 128k
# tokens are in the last bin.
_ARXIV = (32, 30, 80, 219, 338, 224, 77)
_GITHUB = (0, 340, 95, 104, 107, 102, 88, 64, 100)
ARXIV, GITHUB = (
    tuple((512 << at if at else 1, (1024 << at) - 1, count) for at, count in enumerate(counts) if count)
    for counts in (_ARXIV, _GITHUB)
)


def sample(num_documents: int, bins: Sequence[Bin] = PUBLISHED) -> tuple[int, ...]:
    """Lengths of `num_documents` documents that follow a histogram."""
    total = sum(count for *_, count in bins)
    lengths, index, below = [], 0, 0
    for number in range(num_documents):
        wanted = (2 * number + 1) * total / (2 * num_documents)
        while wanted >= below + bins[index][2]:
            below += bins[index][2]
            index += 1
        shortest, longest, count = bins[index]
        lengths.append(shortest + int((wanted - below) / count * (longest - shortest + 1)))
    return scattered(lengths)


def bimodal(num_documents: int, short: int = 512, long: int = 16384, one_in: int = 8) -> tuple[int, ...]:
    """Short documents, except that every `one_in`-th is long."""
    return tuple(long if number % one_in == one_in - 1 else short for number in range(num_documents))


def one_huge(num_documents: int, huge: int, short: int = 1024) -> tuple[int, ...]:
    """One huge document followed by short ones."""
    return (huge, *[short] * (num_documents - 1))


def scattered(lengths: Sequence[int]) -> tuple[int, ...]:
    """Permute the lengths (in golden-ratio steps) such that any run of neighbours is a representative sample."""
    number = len(lengths)
    step = max(1, round(number * (math.sqrt(5) - 1) / 2))
    while math.gcd(step, number) > 1:
        step += 1
    return tuple(lengths[index * step % number] for index in range(number))


def batches(num_tokens: int, number: int, lengths: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Document lengths of `number` batches of `num_tokens` tokens, taken cyclically from `lengths`.

    The last document of a batch is truncated at the end of the batch.
    """
    found, index = [], 0
    for _ in range(number):
        batch, room = [], num_tokens
        while room:
            batch.append(min(lengths[index % len(lengths)], room))
            room -= batch[-1]
            index += 1
        found.append(tuple(batch))
    return tuple(found)

"""Lengths of documents as data: read from a file or drawn from a distribution, and packed into rows.

Rows are cut as `data.documents = "separate"` cuts them: documents follow each other in a random order, and the end of a
row ends a document. Everything drawn is the same in every process.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from terrace.base.errors import DataError, did_you_mean
from terrace.base.hashing import hashed_once
from terrace.sequence.distributions import ARXIV, GITHUB, bimodal, one_huge, sample

Row = tuple[int, ...]  # lengths of its documents, which sum to the tokens of a row

_NUM_SAMPLES = 4096  # of a distribution
# Documents of a sequence of so many tokens; longer ones are cut.
DISTRIBUTIONS: Mapping[str, Callable[[int], tuple[int, ...]]] = {
    "magiattention": lambda sequence: sample(_NUM_SAMPLES),
    "arxiv": lambda sequence: sample(_NUM_SAMPLES, ARXIV),
    "github": lambda sequence: sample(_NUM_SAMPLES, GITHUB),
    "bimodal": lambda sequence: bimodal(_NUM_SAMPLES, long=sequence),
    "one-huge": lambda sequence: one_huge(_NUM_SAMPLES, sequence),
}
_MOST_ROWS, _MOST_DOCUMENTS = 1024, 1 << 16  # of the rows that are drawn


@hashed_once
@dataclass(frozen=True)
class Lengths:
    """Lengths of the documents of a data set; without any, every row is one document."""

    documents: tuple[int, ...] = ()
    name: str = ""

    def __bool__(self) -> bool:
        return bool(self.documents)


NO_LENGTHS = Lengths()


@hashed_once
@dataclass(frozen=True)
class MeanDealt:
    """A layer's attention under `balance = "cost"`: of whole rows, and what it waits for and sends."""

    slowest: float = 1.0  # computing of the ring rank that finishes last, over that of whole rows
    mean: float = 1.0
    spread: float = 0.0  # standard deviation of the slowest rank's seconds over their mean
    wait_s: float = 0.0  # of a forward, and as much of a backward
    sent_bytes: tuple[float, ...] = ()  # of a rank by tier, forwards and backward


@hashed_once
@dataclass(frozen=True)
class Ragged:
    """Documents of a micro-batch's rows; without lengths, one a row.

    `together` is the number of micro-batches after which data ranks wait for each other. `dealt` is of effect under
    `balance = "cost"` alone.
    """

    lengths: Lengths = NO_LENGTHS
    together: int = 1
    dealt: MeanDealt = MeanDealt()


WHOLE_ROWS = Ragged()


def read_lengths(given: str, sequence: int) -> Lengths:
    """Lengths of a distribution, or of a file with one a line. Raises `DataError`, in one line, for any other file."""
    if given in DISTRIBUTIONS:
        found = DISTRIBUTIONS[given](sequence)
        cut = (min(sequence, length - at) for length in found for at in range(0, length, sequence))
        return Lengths(tuple(cut), given)
    try:
        with open(given, encoding="utf-8") as file:
            lines = [(number, line.strip()) for number, line in enumerate(file, 1) if line.strip()]
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        hint = did_you_mean(given, DISTRIBUTIONS)
        raise DataError(
            f"--lengths {given} cannot be read ({why}): give a file with the tokens of a document on each line, or a "
            f"distribution{hint}"
        ) from error
    if not lines:
        raise DataError(f"--lengths {given} is empty: write the tokens of a document on each line")
    for number, line in lines:
        if not (line.isascii() and line.isdecimal()) or not int(line[:20]):
            raise DataError(
                f"--lengths {given}, line {number}: {line[:40]!r} is no length; write the tokens of a document, a "
                "whole number from 1 on, on each line"
            )
        if len(line) > 19 or int(line) > sequence:
            raise DataError(
                f"--lengths {given}, line {number}: a document of {line[:20]} tokens is longer than a sequence of "
                f"{sequence:,}: give longer sequences, or the lengths after documents are cut"
            )
    return Lengths(tuple(int(line) for _, line in lines), given)


@lru_cache(maxsize=64)
def drawn_rows(lengths: Lengths, sequence: int) -> tuple[Row, ...]:
    """Rows of `sequence` tokens, as many as say how rows differ; the row of one document without lengths."""
    if not lengths:
        return ((sequence,),)
    order, rows, num_documents = random.Random(0), list[Row](), 0
    documents, row, room = list[int](), list[int](), sequence
    while len(rows) < _MOST_ROWS and num_documents < _MOST_DOCUMENTS:
        if not documents:
            documents = list(lengths.documents)
            order.shuffle(documents)
        length = documents.pop()
        while length:
            row.append(min(length, room))
            length, room = length - row[-1], room - row[-1]
            if not room:
                rows.append(tuple(row))
                num_documents += len(row)
                row, room = [], sequence
    return tuple(rows)


@lru_cache(maxsize=256)
def drawn_micros(lengths: Lengths, sequence: int, num_rows: int, most: int) -> tuple[tuple[Row, ...], ...]:
    """Micro-steps of `num_rows` rows each: `most` of them, or as few as show how they differ where they are large."""
    rows, draw = drawn_rows(lengths, sequence), random.Random(1)
    number = max(4, min(most, 4 * len(rows) // num_rows))
    return tuple(tuple(draw.choices(rows, k=num_rows)) for _ in range(number))

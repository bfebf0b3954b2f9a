"""Segments: which places attend to which tokens. What a balancer says, and what a static ring is."""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from terrace.sequence.view import Run, merged_runs


@dataclass(frozen=True)
class Segment:
    """Tokens `start` ... `stop` - 1 of a micro-batch, attended to by `places` of the pool.

    One place attends to all of it. G places are a ring of the degrees `shape`, innermost first, whose product is G:
    the segment is cut into 2G chunks of `chunk` tokens, the last ones shorter or empty; the place at index k of
    `places`, which go with the innermost degree fastest, has chunks k and 2G-1-k, its *shard*. In step s = 1 ... G-1
    each passes the keys that it has on over the outermost degree l such that s is a multiple of shape[0] ...
    shape[l-1]: so keys cross a slow tier as seldom as can be, and all its ranks share that (Gu et al. 2401.09149,
    section 4, of two degrees; there a crossing goes on beside all rounds of the inner ring, here beside one).

    `chunk` 0: ceil(length / 2G); any other has what a shard lacks in tokens made up by padding, so that all its shards
    have as many rows.
    """

    start: int
    stop: int
    places: tuple[int, ...]
    shape: tuple[int, ...] = (1,)
    chunk: int = 0

    def __post_init__(self) -> None:
        assert math.prod(self.shape) == len(self.places), f"a ring {self.shape} of places {self.places}"
        assert self.num_chunks * self.chunk_tokens >= self.stop - self.start, f"{self} leaves tokens over"

    @cached_property
    def num_chunks(self) -> int:
        """Into how many chunks it is cut."""
        return 1 if len(self.places) == 1 else 2 * len(self.places)

    @cached_property
    def chunk_tokens(self) -> int:
        """Tokens of a chunk that is not one of the last."""
        return self.chunk or -(-(self.stop - self.start) // self.num_chunks)

    def shard(self, index: int) -> tuple[Run, ...]:
        """Return the runs of tokens, rising, of the place at an index; one where its chunks are neighbours."""
        chunks = (0,) if len(self.places) == 1 else (index, self.num_chunks - 1 - index)
        starts = (self.start + chunk * self.chunk_tokens for chunk in chunks)
        runs = ((start, min(start + self.chunk_tokens, self.stop)) for start in starts)
        return merged_runs((start, stop) for start, stop in runs if start < stop)

    def padding(self, index: int) -> int:
        """Return how many rows of padding the shard at `index` has."""
        if not self.chunk:
            return 0
        rows = self.chunk * (1 if len(self.places) == 1 else 2)
        return rows - sum(stop - start for start, stop in self.shard(index))

    def locate(self, token: int) -> tuple[int, int]:
        """Return the index whose shard has a token of the segment, and where the token's chunk ends."""
        chunk = (token - self.start) // self.chunk_tokens
        end = min(self.start + (chunk + 1) * self.chunk_tokens, self.stop)
        return min(chunk, self.num_chunks - 1 - chunk), end


class Step(NamedTuple):
    """What a place of a ring does in a step; all are indices of `Segment.places`."""

    source: int  # whose shard it has then
    to: int  # who gets the one that it had before
    by: int  # who had the one that it gets


@lru_cache(maxsize=1024)
def route(shape: tuple[int, ...], index: int) -> tuple[Step, ...]:
    """Return steps 0 ... G of the place at an index: 0 is the start, G, after the last, brings every shard home."""
    num_places = math.prod(shape)
    steps = [Step(index, index, index)]
    for step in range(1, num_places):
        source = _moved(shape, index, step, -1)
        to, by = _moved(shape, steps[-1].source, step, 1), _moved(shape, source, step - 1, 1)
        steps.append(Step(source, to, by))
    return (*steps, Step(index, steps[-1].source, _moved(shape, index, num_places - 1, 1)))


def _moved(shape: tuple[int, ...], index: int, step: int, sign: int) -> int:
    """Return the index as far from `index`, degree by degree, as a shard has come in so many steps."""
    moved, stride = 0, 1
    for degree in shape:
        index, digit = divmod(index, degree)
        passed = step - step // degree  # of the multiples of `stride`, those of none further out
        moved += (digit + sign * passed) % degree * stride
        step //= degree
        stride *= degree
    return moved

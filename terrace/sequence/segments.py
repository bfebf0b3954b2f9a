"""Segments: which ring ranks attend to which tokens. Created by the balancer and by static rings."""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from terrace.sequence.token_layout import Run, merged_runs


@dataclass(frozen=True)
class Segment:
    """Tokens `start` ... `stop` - 1 of a micro-batch, attended to by `ring_ranks` of the context group.

    A single ring rank attends to all of it. G ring ranks form a ring with degrees `shape`, innermost first, whose
    product is G. The segment is cut into 2G chunks of `chunk` tokens, the last ones shorter or empty. The rank at index
    k of `ring_ranks` (innermost degree fastest) owns chunks k and 2G-1-k, its *shard*.

    In step s = 1 ... G-1 each rank passes its current keys on along the outermost degree l such that s is a multiple of
    shape[0] ... shape[l-1]. So keys cross slow tiers as rarely as possible, using all links of the tier at once (Gu et
    al. 2401.09149, section 4, has two degrees; there a crossing overlaps all inner rounds, here one).

    `chunk` 0 stands for ceil(length / 2G). With any other value shards are padded to equal numbers of rows.
    """

    start: int
    stop: int
    ring_ranks: tuple[int, ...]
    shape: tuple[int, ...] = (1,)
    chunk: int = 0

    def __post_init__(self) -> None:
        assert math.prod(self.shape) == len(self.ring_ranks), f"a ring {self.shape} of ring ranks {self.ring_ranks}"
        assert self.num_chunks * self.chunk_tokens >= self.stop - self.start, f"{self} leaves tokens over"

    @cached_property
    def num_chunks(self) -> int:
        return 1 if len(self.ring_ranks) == 1 else 2 * len(self.ring_ranks)

    @cached_property
    def chunk_tokens(self) -> int:
        """Tokens of a chunk; the last chunks may have fewer."""
        return self.chunk or -(-(self.stop - self.start) // self.num_chunks)

    def shard(self, index: int) -> tuple[Run, ...]:
        """Ascending token runs of the rank at `index`: two chunks, or one run if they are adjacent."""
        chunks = (0,) if len(self.ring_ranks) == 1 else (index, self.num_chunks - 1 - index)
        starts = (self.start + chunk * self.chunk_tokens for chunk in chunks)
        runs = ((start, min(start + self.chunk_tokens, self.stop)) for start in starts)
        return merged_runs((start, stop) for start, stop in runs if start < stop)

    def padding(self, index: int) -> int:
        """Number of padding rows of the shard at `index`."""
        if not self.chunk:
            return 0
        rows = self.chunk * (1 if len(self.ring_ranks) == 1 else 2)
        return rows - sum(stop - start for start, stop in self.shard(index))

    def locate(self, token: int) -> tuple[int, int]:
        """(Index of the rank whose shard has `token`, end of the token's chunk)."""
        chunk = (token - self.start) // self.chunk_tokens
        end = min(self.start + (chunk + 1) * self.chunk_tokens, self.stop)
        return min(chunk, self.num_chunks - 1 - chunk), end


class RouteStep(NamedTuple):
    """One step of a rank in a ring; all fields are indices into `Segment.ring_ranks`."""

    source: int  # owner of the shard that the rank has in this step
    to: int  # receiver of its previous shard
    by: int  # sender of its new shard


@lru_cache(maxsize=1024)
def route(shape: tuple[int, ...], index: int) -> tuple[RouteStep, ...]:
    """Steps 0 ... G of the rank at `index`: step 0 is the start; step G returns every shard to its owner."""
    num_ring_ranks = math.prod(shape)
    steps = [RouteStep(index, index, index)]
    for step in range(1, num_ring_ranks):
        source = _moved(shape, index, step, -1)
        to, by = _moved(shape, steps[-1].source, step, 1), _moved(shape, source, step - 1, 1)
        steps.append(RouteStep(source, to, by))
    return (*steps, RouteStep(index, steps[-1].source, _moved(shape, index, num_ring_ranks - 1, 1)))


def _moved(shape: tuple[int, ...], index: int, step: int, sign: int) -> int:
    # Mixed radix: a shard moves along a degree in the steps that are multiples of its stride but of no outer stride.
    moved, stride = 0, 1
    for degree in shape:
        index, digit = divmod(index, degree)
        passed = step - step // degree  # multiples of `stride` that are not multiples further out
        moved += (digit + sign * passed) % degree * stride
        step //= degree
        stride *= degree
    return moved

"""A model of torch's caching allocator: which block a request gets, and how much memory is reserved.

From c10/cuda/CUDACachingAllocator.cpp of torch 2.13 (2.11 is the same in these respects):

    request     rounded up to 512 bytes; at most 1 MiB: pool of small blocks, else of large ones; pools by stream
    found       the smallest free block of the pool that is large enough, the one that a segment ends with last
    split       what is left is a block of its own: from 512 bytes if small or expandable, else above 1 MiB
    segment     small: 2 MiB; below 10 MiB: 20 MiB; else the request rounded up to 2 MiB
    expandable  one segment for each pool, which grows at its end by pages of 2 MiB (small) or 20 MiB (large)
    freed       joined with free neighbours of its segment

Not modelled: a device whose memory is short, private pools of graphs, and options other than `expandable_segments`.
"""

import pickle
from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass, field

MIB = 1 << 20
ROUNDED, SMALL = 512, MIB
SMALL_SEGMENT, LARGE_SEGMENT, LARGE, ROUNDED_LARGE = 2 * MIB, 20 * MIB, 10 * MIB, 2 * MIB


def rounded(num_bytes: int, unit: int = ROUNDED) -> int:
    """Bytes of a block for a request."""
    return max(unit, -(-num_bytes // unit) * unit)


@dataclass(eq=False)
class Block:
    """A piece of a segment."""

    pool: "_Pool"
    address: int
    size: int
    is_free: bool = True
    before: "Block | None" = None
    after: "Block | None" = None


@dataclass(eq=False)
class _Pool:
    """Blocks of one stream, small or large."""

    is_small: bool
    expandable: bool
    free: list[tuple[int, int]] = field(default_factory=list)  # size and address, sorted
    blocks: dict[int, Block] = field(default_factory=dict)  # by address
    last: Block | None = None  # at the end of an expandable segment

    def find(self, size: int) -> Block | None:
        place = bisect_left(self.free, (size, 0))
        found = [self.blocks[address] for _, address in self.free[place : place + 2]]
        if len(found) == 2 and self.expandable and found[0] is self.last:
            return found[1]
        return found[0] if found else None

    def take(self, block: Block) -> None:
        self.free.remove((block.size, block.address))
        block.is_free = False

    def put(self, block: Block) -> None:
        block.is_free = True
        insort(self.free, (block.size, block.address))

    def split(self, block: Block, size: int) -> None:
        left = block.size - size
        if left < ROUNDED if self.is_small or self.expandable else left <= SMALL:
            return
        rest = Block(self, block.address + size, left, before=block, after=block.after)
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        self.blocks[rest.address] = rest
        self.put(rest)
        if self.last is block:
            self.last = rest

    def join(self, block: Block, other: Block) -> Block:
        """Join a free block with the free one after it."""
        block.size += other.size
        block.after = other.after
        if other.after is not None:
            other.after.before = block
        del self.blocks[other.address]
        if self.last is other:
            self.last = block
        return block


class Allocator:
    """Blocks of one device."""

    def __init__(self, *, expandable: bool = True) -> None:
        self._expandable = expandable
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._next_address = 0
        self.allocated = self.reserved = self.requested = 0
        self.peaks: dict[str, int] = defaultdict(int)
        self._history: list[dict[str, object]] | None = None

    def record(self, enabled: str | None = "all", **_: object) -> None:
        """Begin or end a record of every block."""
        self._history = None if enabled is None else []

    def write(self, path: str) -> None:
        """The record in torch's form, without lines of code and segments."""
        with open(path, "wb") as file:
            pickle.dump({"segments": [], "device_traces": [self._history or []]}, file)

    def allocate(self, num_bytes: int, stream: int) -> Block:
        """The block for a request on a stream."""
        size = rounded(num_bytes)
        pool = self._pool(stream, size <= SMALL)
        block = pool.find(size)
        if block is None:
            block = self._grown(pool, size) if self._expandable else self._segment(pool, size)
        pool.take(block)
        pool.split(block, size)
        self.allocated += block.size
        if self._history is not None:
            self._history.append({"action": "alloc", "addr": block.address, "size": block.size, "stream": stream})
        self._note()
        return block

    def free(self, block: Block) -> None:
        """Give a block back to its pool."""
        pool = block.pool
        self.allocated -= block.size
        if self._history is not None:
            self._history.append({"action": "free_completed", "addr": block.address, "size": block.size})
        if block.before is not None and block.before.is_free:
            before = block.before
            pool.free.remove((before.size, before.address))
            block = pool.join(before, block)
        if block.after is not None and block.after.is_free:
            pool.free.remove((block.after.size, block.after.address))
            block = pool.join(block, block.after)
        pool.put(block)

    def reset_peaks(self) -> None:
        """Peaks begin at what is there now."""
        self.peaks.clear()
        self._note()

    def _note(self) -> None:
        for name, value in (("allocated", self.allocated), ("reserved", self.reserved)):
            self.peaks[name] = max(self.peaks[name], value)

    def _pool(self, stream: int, is_small: bool) -> _Pool:
        if (stream, is_small) not in self._pools:
            self._pools[stream, is_small] = _Pool(is_small, self._expandable)
        return self._pools[stream, is_small]

    def _segment(self, pool: _Pool, size: int) -> Block:
        large = LARGE_SEGMENT if size < LARGE else rounded(size, ROUNDED_LARGE)
        num_bytes = SMALL_SEGMENT if pool.is_small else large
        self.reserved += num_bytes
        block = Block(pool, self._next_address, num_bytes)
        self._next_address += 1 << 40
        pool.blocks[block.address] = block
        pool.put(block)
        return block

    def _grown(self, pool: _Pool, size: int) -> Block:
        last, page = pool.last, SMALL_SEGMENT if pool.is_small else LARGE_SEGMENT
        there = last.size if last is not None and last.is_free else 0
        num_bytes = rounded(size - there, page)
        self.reserved += num_bytes
        if last is not None and last.is_free:
            pool.free.remove((last.size, last.address))
            last.size += num_bytes
            block = last
        else:
            address = last.address + last.size if last is not None else self._next_address
            self._next_address += 0 if last is not None else 1 << 50
            block = Block(pool, address, num_bytes, before=last)
            if last is not None:
                last.after = block
            pool.blocks[address] = block
        pool.last = block
        pool.put(block)
        return block

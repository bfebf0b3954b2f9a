"""Paged keys and values on one device.

A pool is written and read through *spans*: the chunk of a sequence in the current step, the sequence's pages, and the
first position that the chunk reads. `prepare` is called once per step, `store` and `view` once per layer. The pool only
has the memory; the scheduler (terrace.generation.scheduler) assigns pages to sequences.

A position caches one token in every layer (terrace.generation.cache_shape): keys and values, or one tensor for both. A
*slot* is the index of a position among those of all pages.

Shape legend: T tokens of a step, K cached heads, D head_dim, P page_tokens, L positions that a span reads.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from terrace.generation.cache_shape import CacheShape


@dataclass(frozen=True)
class Span:
    """A chunk of a sequence: writes positions `first` ... `end` - 1 and reads positions `begin` ... `end` - 1.

    Position p is in page `pages[p // P]`; entries before the page of `begin` are not used. `holder` identifies the
    sequence across steps, until `forget`.
    """

    holder: int
    pages: Sequence[int]
    begin: int
    first: int
    end: int


class PagePool(Protocol):
    @property
    def nbytes(self) -> int: ...

    def prepare(self, spans: Sequence[Span]) -> None:
        """Set the spans of the next step; their new tokens are packed in this order."""

    def store(self, layer: int, *tensors: Tensor) -> None:
        """Write keys and values (T, K, D) of the new tokens of all spans."""

    def view(self, layer: int, index: int) -> list[Tensor]:
        """Keys and values (K, L, D) that span `index` reads, including those just stored.

        They may be views of the pool: do not write to them, nor keep them beyond the step.
        """
        ...

    def gather(self, layer: int, slots: Tensor) -> list[Tensor]:
        """Copies of the keys and values (n, K, D) at the slots `slots` (n)."""
        ...

    def copy(self, source: int, target: int) -> None:
        """Copy a page in all layers."""

    def forget(self, holder: int) -> None:
        """Drop what the pool keeps for a sequence, which has released its pages."""


# (shape of the cache, num_pages, page_tokens, device, dtype)
BuildPool = Callable[[CacheShape, int, int, torch.device, torch.dtype], PagePool]


def slots_of(pages: Sequence[int], begin: int, end: int, page_tokens: int) -> list[int]:
    """Slots of positions `begin` ... `end` - 1 of a sequence with these `pages`."""
    found: list[int] = []
    while begin < end:
        run = min(page_tokens - begin % page_tokens, end - begin)
        slot = pages[begin // page_tokens] * page_tokens + begin % page_tokens
        found.extend(range(slot, slot + run))
        begin += run
    return found


def targets_of(spans: Sequence[Span], page_tokens: int, device: torch.device) -> Tensor:
    """Slots (T) of the new tokens of `spans`."""
    targets = [slot for span in spans for slot in slots_of(span.pages, span.first, span.end, page_tokens)]
    return torch.tensor(targets, dtype=torch.int64, device=device)


class GatheredPages:
    """A pool in one tensor. Sequences with consecutive pages are read in place, all others are gathered (copied)."""

    def __init__(
        self, shape: CacheShape, num_pages: int, page_tokens: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        # Consecutive pages are contiguous, and so are the heads of a token, as a layer produces them. Memory may stay
        # uninitialised: slots are written before they are read.
        sizes = shape.layers, shape.tensors, num_pages, page_tokens, shape.heads, shape.size
        self._memory = torch.empty(sizes, device=device, dtype=dtype)
        self._layers = [layer.unbind() for layer in self._memory]  # (pages, P, K, D) each
        self._slots = [[kept.flatten(0, 1) for kept in layer] for layer in self._layers]
        self._page_tokens = page_tokens
        self._targets = torch.empty(0, dtype=torch.int64)
        self._reads: list[slice | tuple[Tensor, slice]] = []

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    def prepare(self, spans: Sequence[Span]) -> None:
        self._targets = targets_of(spans, self._page_tokens, self._memory.device)
        self._reads = [self._read(span) for span in spans]

    def store(self, layer: int, *tensors: Tensor) -> None:
        for kept, new in zip(self._slots[layer], tensors, strict=True):
            kept.index_copy_(0, self._targets, new)

    def view(self, layer: int, index: int) -> list[Tensor]:
        read = self._reads[index]
        if isinstance(read, slice):
            found = [kept[read] for kept in self._slots[layer]]
        else:
            pages, within = read
            found = [kept.index_select(0, pages).flatten(0, 1)[within] for kept in self._layers[layer]]
        return [each.transpose(0, 1) for each in found]  # (K, L, D)

    def gather(self, layer: int, slots: Tensor) -> list[Tensor]:
        return [kept.index_select(0, slots) for kept in self._slots[layer]]

    def copy(self, source: int, target: int) -> None:
        self._memory[:, :, target] = self._memory[:, :, source]

    def forget(self, holder: int) -> None:
        """Nothing to do: this pool keeps nothing per sequence."""

    def _read(self, span: Span) -> Any:
        first, offset = divmod(span.begin, self._page_tokens)
        pages = span.pages[first : -(-span.end // self._page_tokens)]
        within = slice(offset, offset + span.end - span.begin)
        if all(after == page + 1 for page, after in pairwise(pages)):
            begin = pages[0] * self._page_tokens
            return slice(begin + within.start, begin + within.stop)
        return torch.tensor(pages, device=self._memory.device), within

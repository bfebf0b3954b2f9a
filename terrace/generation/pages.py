"""Keys and values in pages, in the memory of one device.

A pool of pages is written and read by *spans*: the part of a text that passes the model now, the pages that the text
has, and from which place on it reads them. `prepare` is called once a turn, `store` and `view` once a layer. Which page
belongs to whom is decided elsewhere (terrace.generation.scheduler); a pool only has the memory.

A place has the numbers that a token leaves behind in every layer (terrace.generation.cache_shape): keys and values, or
one tensor that serves as both.

Shape legend: T tokens of a turn, K heads of a place, D elements of a head, P page_tokens, L places that a span reads.
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
    """Places `first` ... `end` - 1 of a text are written, and places `begin` ... `end` - 1 are read.

    Place p lies in page `pages[p // P]`; pages before the one of `begin` mean nothing. `holder` names the text from
    turn to turn, until `forget`.
    """

    holder: int
    pages: Sequence[int]
    begin: int
    first: int
    end: int


class PagePool(Protocol):
    """Memory of pages; all layers have the same."""

    @property
    def nbytes(self) -> int: ...

    def prepare(self, spans: Sequence[Span]) -> None:
        """Have these spans pass next, their new tokens end to end."""

    def store(self, layer: int, *tensors: Tensor) -> None:
        """Write keys and values (T, K, D) of the new tokens of all spans."""

    def view(self, layer: int, index: int) -> list[Tensor]:
        """Keys and values (K, L, D) that span `index` reads, stored ones included; not to be kept or written."""
        ...

    def gather(self, layer: int, places: Tensor) -> list[Tensor]:
        """Copies of the keys and values (n, K, D) at `places` (n) among those of all pages."""
        ...

    def copy(self, source: int, target: int) -> None:
        """Copy a page in all layers."""

    def forget(self, holder: int) -> None:
        """A text has given up its pages."""


# (numbers of a token, pages, page_tokens, device, dtype)
BuildPool = Callable[[CacheShape, int, int, torch.device, torch.dtype], PagePool]


def places_of(pages: Sequence[int], begin: int, end: int, page_tokens: int) -> list[int]:
    """The places that tokens `begin` ... `end` - 1 of a text have among those of all pages."""
    found: list[int] = []
    while begin < end:
        run = min(page_tokens - begin % page_tokens, end - begin)
        place = pages[begin // page_tokens] * page_tokens + begin % page_tokens
        found.extend(range(place, place + run))
        begin += run
    return found


def targets_of(spans: Sequence[Span], page_tokens: int, device: torch.device) -> Tensor:
    """The places (T) that the new tokens of spans have among those of all pages."""
    targets = [place for span in spans for place in places_of(span.pages, span.first, span.end, page_tokens)]
    return torch.tensor(targets, dtype=torch.int64, device=device)


class GatheredPages:
    """A pool in one tensor. A text whose pages follow each other is read where it lies, any other is gathered."""

    def __init__(
        self, shape: CacheShape, num_pages: int, page_tokens: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        # A page is a run of places, so that pages in a row are one tensor, and a token's heads lie side by side, as a
        # layer makes them. Places that nobody has written are never read.
        sizes = shape.layers, shape.tensors, num_pages, page_tokens, shape.heads, shape.size
        self._memory = torch.empty(sizes, device=device, dtype=dtype)
        self._layers = [layer.unbind() for layer in self._memory]  # (pages, P, K, D) each
        self._places = [[kept.flatten(0, 1) for kept in layer] for layer in self._layers]
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
        for kept, new in zip(self._places[layer], tensors, strict=True):
            kept.index_copy_(0, self._targets, new)

    def view(self, layer: int, index: int) -> list[Tensor]:
        read = self._reads[index]
        if isinstance(read, slice):
            found = [kept[read] for kept in self._places[layer]]
        else:
            pages, within = read
            found = [kept.index_select(0, pages).flatten(0, 1)[within] for kept in self._layers[layer]]
        return [each.transpose(0, 1) for each in found]  # (K, L, D)

    def gather(self, layer: int, places: Tensor) -> list[Tensor]:
        return [kept.index_select(0, places) for kept in self._places[layer]]

    def copy(self, source: int, target: int) -> None:
        self._memory[:, :, target] = self._memory[:, :, source]

    def forget(self, holder: int) -> None:
        """Nothing is kept by text."""

    def _read(self, span: Span) -> Any:
        first, offset = divmod(span.begin, self._page_tokens)
        pages = span.pages[first : -(-span.end // self._page_tokens)]
        within = slice(offset, offset + span.end - span.begin)
        if all(after == page + 1 for page, after in pairwise(pages)):
            begin = pages[0] * self._page_tokens
            return slice(begin + within.start, begin + within.stop)
        return torch.tensor(pages, device=self._memory.device), within

"""Keys and values in pages that each text sees as one tensor without gaps, through virtual memory.

    physical    page 0   page 1   page 2   page 3        text a sees  0 2      (a prompt in page 0, two samples of it)
                                                         text b sees  0 3

vTensor (Xu et al. 2407.15309) and vAttention (Prabhu et al. 2405.04437) do this on GPUs: the pages of a prompt are
mapped once for each of its samples, and attention reads plain tensors. A page has the places of all layers, so that a
text costs one mapping for each run of its pages that lie side by side:

    place p of layer l:   keys at [p, l, 0], values at [p, l, 1] of a text's tensor (places, layers, tensors, K, D)

`terrace generate` and `terrace rl` have mapped pages on a CPU under Linux (`platform_pages`), of as many tokens as fill
whole pages of the system (`mapped_tokens`). Pages that the system cannot map are gathered: all pages where their size
is no multiple of the system's, those of one text, with a warning, where the process has too many mappings.

Shape legend: K heads of a place, D elements of a head, P page_tokens, L places that a span reads.
"""

import functools
import math
import mmap
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from terrace.base.errors import ConfigError
from terrace.base.words import counted
from terrace.generation.cache_shape import CacheShape
from terrace.generation.host_memory import HostMemory, OutOfMappingsError, VirtualMemory
from terrace.generation.pages import GatheredPages, PagePool, Span, targets_of

# Tokens. With a larger page the samples of a prompt share little, and copy much of a page that is not full; a guess.
_LARGEST_STEP = 256
_AS_MANY = "the process has as many mappings as it may"


def mapped_pages(
    shape: CacheShape,
    num_pages: int,
    page_tokens: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    warns: bool = True,
) -> PagePool:
    """A pool of mapped pages; of gathered ones, with a warning unless not `warns`, where the system cannot map them."""
    try:
        return _mapped(shape, num_pages, page_tokens, device, dtype)
    except ConfigError as error:
        if warns:
            warnings.warn(f"pages of keys and values are gathered, not mapped: {error}", stacklevel=2)
        return GatheredPages(shape, num_pages, page_tokens, device, dtype)


# Of the commands, which say by `pages_words` which pages a model has here.
platform_pages = functools.partial(mapped_pages, warns=False)


def mapped_tokens(shape: CacheShape, dtype: torch.dtype, least: int) -> int:
    """The fewest tokens of a page that can be mapped, at least `least`; `least` where that would be far more."""
    step = _step(shape.num_bytes(1, dtype))
    return -(-least // step) * step if step <= _LARGEST_STEP else least


def pages_words(shape: CacheShape, page_tokens: int, device: torch.device, dtype: torch.dtype) -> tuple[str, bool]:
    """The pages that `platform_pages` makes, in words, and whether a CPU falls back to gathered ones."""
    try:
        _mapped(shape, 1, page_tokens, device, dtype)
    except ConfigError as error:
        words = f"keys and values in gathered pages of {counted(page_tokens, 'token')}: {error}"
        return words, device.type == "cpu"
    return f"keys and values in mapped pages of {counted(page_tokens, 'token')}", False


def _step(token_bytes: int) -> int:
    # Tokens that fill whole pages of the system.
    return math.lcm(token_bytes, mmap.PAGESIZE) // token_bytes


def _mapped(
    shape: CacheShape, num_pages: int, page_tokens: int, device: torch.device, dtype: torch.dtype
) -> "MappedPages":
    if device.type != "cpu":
        raise ConfigError(f"pages on {device.type} are mapped by CudaMemory, which has never run on hardware")
    one_bytes = shape.num_bytes(page_tokens, dtype)
    if one_bytes % mmap.PAGESIZE:
        fix = _step(one_bytes // page_tokens)
        raise ConfigError(f"{one_bytes} bytes are no multiple of {mmap.PAGESIZE}: use a multiple of {fix} tokens")
    return MappedPages(shape, num_pages, page_tokens, HostMemory(num_pages, one_bytes), dtype)


@dataclass
class _Text:
    """The view of a text: pages by place in its range, -1 for none; `first`: the text's page at the first place."""

    address: int
    places: Tensor  # (places, layers, tensors, K, D)
    shown: list[int] = field(default_factory=list)
    first: int = 0
    num_mapped: int = 0  # mappings, at most
    is_gathered: bool = False


class MappedPages:
    """A pool of `num_pages` pages in `memory`, whose pages have `page_tokens` places of all layers."""

    def __init__(
        self, shape: CacheShape, num_pages: int, page_tokens: int, memory: VirtualMemory, dtype: torch.dtype
    ) -> None:
        self._memory, self._dtype, self._num_pages, self._page_tokens = memory, dtype, num_pages, page_tokens
        self._place = shape.layers, shape.tensors, shape.heads, shape.size
        self._places = self._typed(memory.whole)  # (pages P, layers, tensors, K, D)
        self._by_page = self._places.view(num_pages, page_tokens, *self._place)
        self._texts: dict[int, _Text] = {}
        self._spare: list[_Text] = []  # ranges that show nothing
        self._left = memory.num_mappings
        self._has_warned = self._is_given_back = False
        self._targets = torch.empty(0, dtype=torch.int64)
        self._reads: list[tuple[Tensor, Tensor | None, slice]] = []  # places, their pages if gathered, those read

    @property
    def nbytes(self) -> int:
        return self._places.nbytes

    def prepare(self, spans: Sequence[Span]) -> None:
        if self._is_given_back:
            self._memory.take_back()
            self._is_given_back = False
        self._targets = targets_of(spans, self._page_tokens, self._places.device)
        self._reads = [self._read(span) for span in spans]

    def store(self, layer: int, *tensors: Tensor) -> None:
        for kept, new in zip(self._places[:, layer].unbind(1), tensors, strict=True):
            kept.index_copy_(0, self._targets, new)

    def view(self, layer: int, index: int) -> list[Tensor]:
        places, pages, within = self._reads[index]
        if pages is None:
            found = places[within, layer].unbind(1)
        else:
            kept = self._by_page[:, :, layer].unbind(2)
            found = tuple(each.index_select(0, pages).flatten(0, 1)[within] for each in kept)
        return [each.transpose(0, 1) for each in found]  # (K, L, D)

    def gather(self, layer: int, places: Tensor) -> list[Tensor]:
        return [kept.index_select(0, places) for kept in self._places[:, layer].unbind(1)]

    def copy(self, source: int, target: int) -> None:
        self._by_page[target] = self._by_page[source]

    def forget(self, holder: int) -> None:
        text = self._texts.pop(holder, None)
        if text is not None:
            self._clear(text)
            if text.address:
                text.is_gathered = False
                self._spare.append(text)

    def give_back(self) -> None:
        """Return the memory of all pages to the system, with the keys and values in them, until it is used again.

        Raises `ConfigError` while a text has pages.
        """
        if self._texts:
            raise ConfigError(f"{len(self._texts)} texts have pages: end or abort their requests before")
        self._memory.give_back()
        self._is_given_back = True

    def _typed(self, raw: Tensor) -> Tensor:
        return raw.view(self._dtype).view(-1, *self._place)

    def _read(self, span: Span) -> tuple[Tensor, Tensor | None, slice]:
        size = self._page_tokens
        first, end = span.begin // size, -(-span.end // size)
        text = self._texts.get(span.holder)
        if text is None:
            text = self._texts[span.holder] = self._spare.pop() if self._spare else self._reserved()
        if not text.is_gathered:
            self._show(text, span.pages, first, end)
        if text.is_gathered:
            pages = torch.tensor(span.pages[first:end], device=self._places.device)
            return self._places, pages, slice(span.begin - first * size, span.end - first * size)
        offset = text.first * size
        return text.places, None, slice(span.begin - offset, span.end - offset)

    def _reserved(self) -> _Text:
        try:
            if not self._left:
                raise OutOfMappingsError(_AS_MANY)
            address, raw = self._memory.reserve()
        except OutOfMappingsError as error:
            self._warn(error)
            return _Text(0, self._places, is_gathered=True)
        self._left -= 1
        return _Text(address, self._typed(raw))

    def _show(self, text: _Text, pages: Sequence[int], first: int, end: int) -> None:
        """Have a text see its pages `first` ... `end` - 1."""
        # Under a window a long text runs out of its range, and begins again with the pages that it still reads.
        if first < text.first or end - text.first > self._num_pages:
            self._clear(text)
            text.first = first
        base = text.first
        text.shown += [-1] * (end - base - len(text.shown))
        place = first
        while place < end:
            page, run = pages[place], 1
            if text.shown[place - base] == page:
                place += 1
                continue
            while place + run < end and pages[place + run] == page + run != text.shown[place + run - base]:
                run += 1
            try:
                self._map(text, place - base, page, run)
            except OutOfMappingsError as error:
                self._gather(text, error)
                return
            place += run

    def _map(self, text: _Text, place: int, page: int, run: int) -> None:
        # The system adds pages that follow a run to it; elsewhere a run may also leave two parts of another.
        follows = place > 0 and text.shown[place] < 0 and text.shown[place - 1] == page - 1
        cost = 0 if follows else 2
        if self._left < cost:
            raise OutOfMappingsError(_AS_MANY)
        self._memory.map(text.address, place, page, run)
        self._left -= cost
        text.num_mapped += cost
        text.shown[place : place + run] = range(page, page + run)

    def _gather(self, text: _Text, error: OutOfMappingsError) -> None:
        self._clear(text)
        text.is_gathered = True
        self._warn(error)

    def _warn(self, error: OutOfMappingsError) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"keys and values of some texts are gathered, not mapped: {error}; use larger pages, fewer texts at "
                "once, or raise vm.max_map_count",
                stacklevel=2,
            )

    def _clear(self, text: _Text) -> None:
        if text.num_mapped:
            self._memory.clear(text.address)
        self._left += text.num_mapped
        text.shown, text.num_mapped, text.first = [], 0, 0

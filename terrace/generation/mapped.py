"""Paged keys and values that virtual memory makes contiguous for every sequence.

    physical    page 0   page 1   page 2   page 3        sequence a maps  0 2      (two samples of one prompt in page 0)
                                                         sequence b maps  0 3

vTensor (Xu et al. 2407.15309) and vAttention (Prabhu et al. 2405.04437) do this on GPUs: the pages of a prompt are
mapped once per sample, and attention reads plain tensors. A page contains its positions for all layers, so a sequence
needs one mapping per run of consecutive pages:

    position p of layer l: keys at [p, l, 0], values at [p, l, 1] of a tensor (positions, layers, tensors, K, D)

Commands use mapped pages on a CPU under Linux (`platform_pages`), with a page size that is a
multiple of the system's (`mapped_tokens`). Pages that cannot be mapped are gathered instead: all of them if their size
is not such a multiple, or those of one sequence, with a warning, when the process runs out of mappings.

Shape legend: K cached heads, D head_dim, P page_tokens, L positions that a span reads.
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

# Largest page in tokens. With larger ones, samples share less of their prompt and copy more of its last page; a guess.
_LARGEST_STEP = 256
_AS_MANY = "the process has as many mappings as it may"


def mapped_pages(
    shape: CacheShape, num_pages: int, page_tokens: int, device: torch.device, dtype: torch.dtype, *, warns: bool = True
) -> PagePool:
    """Pool of mapped pages. Falls back to gathered pages, with a warning if `warns`, where mapping is impossible."""
    try:
        return _mapped(shape, num_pages, page_tokens, device, dtype)
    except ConfigError as error:
        if warns:
            warnings.warn(f"pages of keys and values are gathered, not mapped: {error}", stacklevel=2)
        return GatheredPages(shape, num_pages, page_tokens, device, dtype)


# For commands, which print `pages_words` instead of a warning.
platform_pages = functools.partial(mapped_pages, warns=False)


def mapped_tokens(shape: CacheShape, dtype: torch.dtype, least: int) -> int:
    """Smallest mappable page in tokens that is at least `least`; `least` itself where pages would become too large."""
    step = _step(shape.num_bytes(1, dtype))
    return -(-least // step) * step if step <= _LARGEST_STEP else least


def pages_words(shape: CacheShape, page_tokens: int, device: torch.device, dtype: torch.dtype) -> tuple[str, bool]:
    """Describe the pages that `platform_pages` creates, and say whether a CPU falls back to gathered ones."""
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
class _Sequence:
    address: int
    slots: Tensor  # (positions, layers, tensors, K, D)
    mapped: list[int] = field(default_factory=list)  # physical page by page index in the range, -1 if unmapped
    first: int = 0  # index, within the sequence, of the page at the start of the range
    num_mapped: int = 0  # upper bound on its mappings
    is_gathered: bool = False


class MappedPages:
    """Pool of `num_pages` pages in `memory`, each with `page_tokens` positions for all layers."""

    def __init__(
        self, shape: CacheShape, num_pages: int, page_tokens: int, memory: VirtualMemory, dtype: torch.dtype
    ) -> None:
        self._memory, self._dtype, self._num_pages, self._page_tokens = memory, dtype, num_pages, page_tokens
        self._shape = shape.layers, shape.tensors, shape.heads, shape.size
        self._slots = self._typed(memory.whole)  # (pages P, layers, tensors, K, D)
        self._by_page = self._slots.view(num_pages, page_tokens, *self._shape)
        self._sequences: dict[int, _Sequence] = {}
        self._spare: list[_Sequence] = []  # ranges without mapped pages, to be reused
        self._left = memory.num_mappings
        self._has_warned = self._is_given_back = False
        self._targets = torch.empty(0, dtype=torch.int64)
        self._reads: list[tuple[Tensor, Tensor | None, slice]] = []  # tensor, pages to gather (None: mapped), positions

    @property
    def nbytes(self) -> int:
        return self._slots.nbytes

    def prepare(self, spans: Sequence[Span]) -> None:
        if self._is_given_back:
            self._memory.take_back()
            self._is_given_back = False
        self._targets = targets_of(spans, self._page_tokens, self._slots.device)
        self._reads = [self._read(span) for span in spans]

    def store(self, layer: int, *tensors: Tensor) -> None:
        for kept, new in zip(self._slots[:, layer].unbind(1), tensors, strict=True):
            kept.index_copy_(0, self._targets, new)

    def view(self, layer: int, index: int) -> list[Tensor]:
        slots, pages, within = self._reads[index]
        if pages is None:
            found = slots[within, layer].unbind(1)
        else:
            kept = self._by_page[:, :, layer].unbind(2)
            found = tuple(each.index_select(0, pages).flatten(0, 1)[within] for each in kept)
        return [each.transpose(0, 1) for each in found]  # (K, L, D)

    def gather(self, layer: int, slots: Tensor) -> list[Tensor]:
        return [kept.index_select(0, slots) for kept in self._slots[:, layer].unbind(1)]

    def copy(self, source: int, target: int) -> None:
        self._by_page[target] = self._by_page[source]

    def forget(self, holder: int) -> None:
        sequence = self._sequences.pop(holder, None)
        if sequence is not None:
            self._clear(sequence)
            if sequence.address:
                sequence.is_gathered = False
                self._spare.append(sequence)

    def give_back(self) -> None:
        """Free the physical memory of all pages until the next `prepare`; keys and values are lost.

        Raises `ConfigError` while a sequence has pages.
        """
        if self._sequences:
            raise ConfigError(f"{len(self._sequences)} sequences have pages: end or abort their requests before")
        self._memory.give_back()
        self._is_given_back = True

    def _typed(self, raw: Tensor) -> Tensor:
        return raw.view(self._dtype).view(-1, *self._shape)

    def _read(self, span: Span) -> tuple[Tensor, Tensor | None, slice]:
        size = self._page_tokens
        first, end = span.begin // size, -(-span.end // size)
        sequence = self._sequences.get(span.holder)
        if sequence is None:
            sequence = self._sequences[span.holder] = self._spare.pop() if self._spare else self._reserved()
        if not sequence.is_gathered:
            self._map_pages(sequence, span.pages, first, end)
        if sequence.is_gathered:
            pages = torch.tensor(span.pages[first:end], device=self._slots.device)
            return self._slots, pages, slice(span.begin - first * size, span.end - first * size)
        offset = sequence.first * size
        return sequence.slots, None, slice(span.begin - offset, span.end - offset)

    def _reserved(self) -> _Sequence:
        try:
            if not self._left:
                raise OutOfMappingsError(_AS_MANY)
            address, raw = self._memory.reserve()
        except OutOfMappingsError as error:
            self._warn(error)
            return _Sequence(0, self._slots, is_gathered=True)
        self._left -= 1
        return _Sequence(address, self._typed(raw))

    def _map_pages(self, sequence: _Sequence, pages: Sequence[int], first: int, end: int) -> None:
        """Map pages `first` ... `end` - 1 of a sequence into its range."""
        # With a sliding window a long sequence reaches the end of its range; it restarts with the pages it still reads.
        if first < sequence.first or end - sequence.first > self._num_pages:
            self._clear(sequence)
            sequence.first = first
        base = sequence.first
        sequence.mapped += [-1] * (end - base - len(sequence.mapped))
        index = first
        while index < end:
            page, run = pages[index], 1
            if sequence.mapped[index - base] == page:
                index += 1
                continue
            while index + run < end and pages[index + run] == page + run != sequence.mapped[index + run - base]:
                run += 1
            try:
                self._map(sequence, index - base, page, run)
            except OutOfMappingsError as error:
                self._gather(sequence, error)
                return
            index += run

    def _map(self, sequence: _Sequence, index: int, page: int, run: int) -> None:
        # The kernel merges pages that continue a mapping; any other may also split an existing mapping in two.
        follows = index > 0 and sequence.mapped[index] < 0 <= sequence.mapped[index - 1] == page - 1
        cost = 0 if follows else 2
        if self._left < cost:
            raise OutOfMappingsError(_AS_MANY)
        self._memory.map(sequence.address, index, page, run)
        self._left -= cost
        sequence.num_mapped += cost
        sequence.mapped[index : index + run] = range(page, page + run)

    def _gather(self, sequence: _Sequence, error: OutOfMappingsError) -> None:
        self._clear(sequence)
        sequence.is_gathered = True
        self._warn(error)

    def _warn(self, error: OutOfMappingsError) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"keys and values of some texts are gathered, not mapped: {error}; use larger pages, fewer texts at "
                "once, or raise vm.max_map_count",
                stacklevel=2,
            )

    def _clear(self, sequence: _Sequence) -> None:
        if sequence.num_mapped:
            self._memory.clear(sequence.address)
        self._left += sequence.num_mapped
        sequence.mapped, sequence.num_mapped, sequence.first = [], 0, 0

"""Mapped pages: shared ones seen through several views, tails apart, memory given back, pages that cannot be mapped."""

import mmap
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from terrace.base.errors import ConfigError
from terrace.generation import texts as texts_module
from terrace.generation.cache_shape import CacheShape, cache_shape
from terrace.generation.engine import GenerationEngine
from terrace.generation.host_memory import HostMemory, OutOfMappingsError
from terrace.generation.mapped import MappedPages, mapped_pages, mapped_tokens, pages_words
from terrace.generation.pages import GatheredPages, PagePool, Span
from terrace.generation.request import Request, Sampling
from terrace.generation.texts import continue_texts
from terrace.model.blocks import block_specs
from tests.support.generation import MODELS, make

LAYERS, HEADS, DIM = 2, 2, 4
SHAPE = CacheShape(LAYERS, HEADS, DIM)
TOKENS = mmap.PAGESIZE // SHAPE.num_bytes(1, torch.float64)  # the smallest page that can be mapped
CPU = torch.device("cpu")


def mapped(num_pages: int, num_mappings: int | None = None) -> MappedPages:
    memory = HostMemory(num_pages, mmap.PAGESIZE)
    memory.num_mappings = memory.num_mappings if num_mappings is None else num_mappings
    return MappedPages(SHAPE, num_pages, TOKENS, memory, torch.float64)


def gathered(num_pages: int) -> GatheredPages:
    return GatheredPages(SHAPE, num_pages, TOKENS, CPU, torch.float64)


def write(pool: PagePool, spans: list[Span], seed: int) -> None:
    """Fill the new places of spans with numbers that follow from the seed."""
    pool.prepare(spans)
    numbers = torch.Generator().manual_seed(seed)
    num_tokens = sum(span.end - span.first for span in spans)
    for layer in range(LAYERS):
        keys, values = torch.randn(2, num_tokens, HEADS, DIM, generator=numbers, dtype=torch.float64)
        pool.store(layer, keys, values)


def read(pool: PagePool, index: int) -> Tensor:
    """All that a span reads, (layers, 2, K, L, D)."""
    return torch.stack([torch.stack(pool.view(layer, index)) for layer in range(LAYERS)])


def test_samples_of_a_prompt_share_its_page_and_have_tails_of_their_own() -> None:
    pool = mapped(4)
    write(pool, [Span(0, (2,), 0, 0, TOKENS)], seed=0)
    prompt = read(pool, 0)
    samples = [Span(0, (2, 0), 0, TOKENS, TOKENS + 3), Span(1, (2, 3), 0, TOKENS, TOKENS + 5)]
    write(pool, samples, seed=1)
    first, second = read(pool, 0), read(pool, 1)
    for own in (first, second):
        assert torch.equal(own[..., :TOKENS, :], prompt)
    assert not torch.equal(first[..., TOKENS:, :], second[..., TOKENS : TOKENS + 3, :])
    # One physical page behind both: what one address writes, the other sees.
    views = [pool.view(1, index)[0] for index in range(2)]
    assert views[0].data_ptr() != views[1].data_ptr()
    views[0][:, 0] = 7.0
    assert bool((views[1][:, 0] == 7.0).all())
    # A plain tensor: no gap between pages, no copy behind it.
    assert views[0].stride() == (DIM, LAYERS * 2 * HEADS * DIM, 1)


def test_a_token_may_leave_one_vector_in_place_of_keys_and_values() -> None:
    shape = CacheShape(LAYERS, heads=1, size=2 * HEADS * DIM, tensors=1)
    assert shape.num_bytes(TOKENS, torch.float64) == mmap.PAGESIZE
    memory = HostMemory(3, mmap.PAGESIZE)
    for pool in (
        MappedPages(shape, 3, TOKENS, memory, torch.float64),
        GatheredPages(shape, 3, TOKENS, CPU, torch.float64),
    ):
        end = TOKENS + 2
        pool.prepare([Span(0, (2, 0), 0, 0, end)])
        vectors = torch.randn(LAYERS, end, 1, shape.size, dtype=torch.float64)
        for layer in range(LAYERS):
            pool.store(layer, vectors[layer])
            (seen,) = pool.view(layer, 0)
            assert torch.equal(seen.transpose(0, 1), vectors[layer])
            (copied,) = pool.gather(layer, torch.tensor([2 * TOKENS, 1]))
            assert torch.equal(copied, vectors[layer][[0, TOKENS + 1]])


@pytest.mark.parametrize("num_mappings", [None, 5], ids=["mapped", "few mappings"])
@pytest.mark.filterwarnings("ignore:keys and values of some texts are gathered")
@pytest.mark.parametrize("window", [0, 2 * TOKENS + 3])
def test_any_pages_in_any_order_read_as_gathered_ones(window: int, num_mappings: int | None) -> None:
    # Texts grow by a few tokens, pages come in any order, are copied, and go back; two texts share a beginning.
    num_pages, drawn = 24, random.Random(0)
    pools: list[PagePool] = [mapped(num_pages, num_mappings), gathered(num_pages)]
    free = list(range(num_pages))
    texts: dict[int, tuple[list[int], int]] = {}
    for turn in range(120):
        if len(texts) < 3 or (turn % 40 == 0 and free):
            source = drawn.choice([*texts, None]) if texts else None
            pages, length = ([], 0) if source is None else (list(texts[source][0]), texts[source][1])
            if length % TOKENS and pages:  # a page that is not full is the text's own
                if not free:
                    continue
                page = free.pop(drawn.randrange(len(free)))
                for pool in pools:
                    pool.copy(pages[-1], page)
                pages[-1] = page
            texts[turn] = pages, length
        spans = []
        for holder, (pages, length) in texts.items():
            end = length + drawn.choice([1, 1, 5, TOKENS])
            needed = -(-end // TOKENS) - len(pages)
            if needed > len(free):
                continue
            pages += [free.pop(drawn.randrange(len(free))) for _ in range(needed)]
            texts[holder] = pages, end
            begin = max(0, length - window + 1) if window else 0
            spans.append(Span(holder, tuple(pages), begin, length, end))
        for pool in pools:
            write(pool, spans, turn)
        for index in range(len(spans)):
            assert torch.equal(read(pools[0], index), read(pools[1], index)), (turn, spans[index])
        if len(free) < 4 or not spans:
            holder = drawn.choice(list(texts))
            given, _ = texts.pop(holder)
            kept = {page for pages, _ in texts.values() for page in pages}
            free += [page for page in given if page not in kept and page not in free]
            for pool in pools:
                pool.forget(holder)


def test_under_a_window_a_text_outgrows_its_range() -> None:
    pools: list[PagePool] = [mapped(3), gathered(3)]
    for page in range(40):
        pages = [place % 3 for place in range(page + 1)]
        span = Span(0, tuple(pages), max(0, page - 1) * TOKENS, page * TOKENS, (page + 1) * TOKENS)
        for pool in pools:
            write(pool, [span], page)
        assert torch.equal(read(pools[0], 0), read(pools[1], 0))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE


def test_memory_comes_with_the_first_token_and_is_given_back() -> None:
    num_pages = 4096
    before = resident_bytes()
    pool = mapped(num_pages)
    assert pool.nbytes == num_pages * mmap.PAGESIZE
    assert resident_bytes() - before < pool.nbytes // 4, "pages that nobody has written take no memory"
    pages = tuple(reversed(range(num_pages // 2)))
    span = Span(0, pages, 0, 0, len(pages) * TOKENS)
    write(pool, [span], seed=0)
    written = resident_bytes()
    assert written - before >= pool.nbytes // 2
    with pytest.raises(ConfigError, match="1 sequences have pages: end or abort"):
        pool.give_back()
    pool.forget(0)
    pool.give_back()
    # What writing took beside the pool may stay with the allocator.
    assert written - resident_bytes() >= 0.9 * pool.nbytes // 2
    write(pool, [span], seed=1)
    again = gathered(num_pages)
    write(again, [span], seed=1)
    assert torch.equal(read(pool, 0), read(again, 0))


def test_a_process_out_of_mappings_gathers_and_says_so() -> None:
    pool = mapped(8, num_mappings=4)
    with pytest.warns(
        UserWarning, match="as many mappings as it may; use larger pages, fewer texts at once, or raise vm"
    ):
        write(pool, [Span(0, (4, 0, 2), 0, 0, 3 * TOKENS)], seed=0)
    # Pages in a row are one mapping, for which there is room; what a text gives up another may have.
    write(pool, [Span(1, (5, 6, 7), 0, 0, 3 * TOKENS)], seed=1)
    assert pool.view(0, 0)[0].stride() == (DIM, LAYERS * 2 * HEADS * DIM, 1)
    # The limit holds for all texts, and a third has no range of its own.
    write(pool, [Span(2, (3,), 0, 0, TOKENS)], seed=2)
    assert pool.view(0, 0)[0].stride() == (DIM, HEADS * DIM, 1)


@pytest.mark.parametrize(
    ("tokens", "device", "said"),
    [
        (3, "cpu", f"no multiple of {mmap.PAGESIZE}: use a multiple of {TOKENS} tokens"),
        (TOKENS, "meta", "CudaMemory, which has never run on hardware"),
    ],
)
def test_pages_that_cannot_be_mapped_are_gathered_aloud(tokens: int, device: str, said: str) -> None:
    with pytest.warns(UserWarning, match=said):
        pool = mapped_pages(SHAPE, 4, tokens, torch.device(device), torch.float64)
    assert isinstance(pool, GatheredPages)


def test_pages_beyond_the_address_space_are_gathered_aloud(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no room for the addresses of"):
        HostMemory(2**40, mmap.PAGESIZE)

    def full(*_: object) -> int:
        raise OutOfMappingsError("Cannot allocate memory")

    monkeypatch.setattr(HostMemory, "_mmap", full)
    with pytest.warns(UserWarning, match="no room for the addresses of"):
        pool = mapped_pages(SHAPE, 4, TOKENS, CPU, torch.float64)
    assert isinstance(pool, GatheredPages)


def test_an_engine_writes_the_same_over_mapped_pages() -> None:
    # Samples of a prompt, pages given up and taken by others, and texts that run past a window.
    for name in ("llama", "window"):
        config = MODELS[name]
        blocks, sampling = make(config), Sampling(temperature=1.0, top_k=0)
        prompt = tuple(range(21))
        requests = [Request(prompt=prompt, num_tokens=30 + row, seed=row, sampling=sampling) for row in range(6)]
        sizes: dict[str, Any] = {"context": 64, "num_pages": 7, "page_tokens": 16, "token_budget": 8}
        engine = GenerationEngine(blocks, config, build_pool=mapped_pages, **sizes)
        assert isinstance(engine.pool, MappedPages)
        for of in (requests, requests[::-1]):
            plain = GenerationEngine(blocks, config, build_pool=GatheredPages, **sizes).run(of)
            assert [made.tokens for made in engine.run(of)] == [made.tokens for made in plain]
        engine.pool.give_back()
        assert engine.run(requests[:1])[0].tokens == plain[-1].tokens


def test_the_pool_that_engines_build_is_mapped() -> None:
    assert isinstance(mapped_pages(SHAPE, 4, TOKENS, CPU, torch.float64), MappedPages)
    with pytest.raises(ConfigError, match=f"a page of 100 bytes is no multiple of the system's {mmap.PAGESIZE}"):
        HostMemory(2, 100)


def maps() -> int:
    """Mappings of this process that show keys and values."""
    return Path("/proc/self/maps").read_text().count("terrace keys and values")


def test_page_0_behind_places_without_pages_is_unmapped_with_its_sequence() -> None:
    """Places without a page are marked by -1, the number before page 0."""
    pool = mapped(3)
    before = maps()
    write(pool, [Span(0, (2, 0), TOKENS, TOKENS, TOKENS + 3)], seed=0)
    assert maps() == before + 1
    pool.forget(0)
    assert maps() == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "window"])
def test_the_commands_write_the_same_bits_over_mapped_pages(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens of `terrace generate`, whose memory goes back with the engine."""
    config = MODELS[name]
    blocks = [block.to(dtype) for block in make(config)]
    prompts = [tuple(range(3, 3 + size)) for size in (5, 21, 9)]

    def made() -> tuple[Any, ...]:
        said = list[str]()

        def say(words: str, is_fallback: bool) -> None:
            said.append(words)

        sampling = Sampling(temperature=1.0, top_k=0, seed=4)
        texts = continue_texts(
            blocks,
            config,
            prompts,
            num_tokens=40,
            context=64,
            sampling=sampling,
            say=say,
        )
        return said, texts

    before = maps()
    said, *mapped_ones = made()
    assert said[0].startswith("keys and values in mapped pages of")
    assert maps() == before
    monkeypatch.setattr(texts_module, "platform_pages", GatheredPages)
    assert made()[1:] == tuple(mapped_ones)


def test_pages_of_the_commands_fill_those_of_the_system_or_say_why_not() -> None:
    shape = cache_shape(block_specs(MODELS["llama"]))
    tokens = mapped_tokens(shape, torch.float32, 16)
    assert tokens >= 16
    assert shape.num_bytes(tokens, torch.float32) % 4096 == 0
    assert pages_words(shape, tokens, CPU, torch.float32)[1] is False
    words, is_fallback = pages_words(shape, tokens + 1, CPU, torch.float32)
    assert is_fallback
    assert f"in gathered pages of {tokens + 1} tokens: " in words
    assert pages_words(shape, tokens, torch.device("cuda"), torch.float32)[1] is False
    # 3 x 2 x 4 bytes a token: 512 tokens fill three pages of the system, which is too coarse for samples of a prompt.
    assert mapped_tokens(CacheShape(1, 1, 3), torch.float32, 16) == 16

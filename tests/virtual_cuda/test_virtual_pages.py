"""Mapped pages of keys and values on the virtual device: the tokens of a CPU, and faults of the calls are noticed."""

import gc
from collections.abc import Callable, Sequence
from contextlib import suppress

import pytest
import torch
from torch import nn

from terrace.generation.cache_shape import CacheShape
from terrace.generation.engine import GenerationEngine
from terrace.generation.mapped import MappedPages
from terrace.generation.pages import BuildPool, PagePool, Span
from terrace.generation.request import Request, Sampling
from terrace.model.init import initialise
from tests.support.generation import MODELS, make
from tests.support.nightly import nightly
from tests.virtual_cuda.faults import Damage, damaged
from tests.virtual_cuda.findings import Kind
from tests.virtual_cuda.pages import mapped_pages
from tests.virtual_cuda.rank import DEVICE
from tests.virtual_cuda.rehearsal import rehearsed

SIZES = {"context": 32, "num_pages": 5, "page_tokens": 16, "token_budget": 16}
LAYERS, HEADS, DIM, TOKENS = 2, 2, 8, 8
SHAPE = CacheShape(LAYERS, HEADS, DIM)
_MEMORY, _PAGES = "terrace.generation.cuda_memory:CudaMemory.", "terrace.generation.mapped:MappedPages."
DAMAGES = {
    "pages change while they are read": (
        f"{_MEMORY}_wait",
        "torch.accelerator.synchronize(self._device)",
        "pass",
        Kind.UNMAPPING,
    ),
    "a page is mapped over another": (f"{_MEMORY}map", "self._unmap(address, index + each)", "pass", Kind.PAGES),
    "pages are released that are mapped": (f"{_MEMORY}give_back", "self.clear(self._first)", "pass", Kind.PAGES),
    "a sequence is read beyond its pages": (
        f"{_PAGES}_read",
        "slice(span.begin - offset, span.end - offset)",
        "slice(span.begin - offset, span.end - offset + size)",
        Kind.UNMAPPED,
    ),
    "torch is shown an address without a page": (f"{_MEMORY}reserve", "self.map(address, 0, 0, 1)", "", Kind.UNMAPPED),
    "a page may not be read": (
        f"{_MEMORY}map",
        'self._call("cuMemSetAccess", at, size, ctypes.byref(self._access), ctypes.c_size_t(1))',
        "pass",
        Kind.UNMAPPED,
    ),
}


Written = list[tuple[tuple[int, ...], tuple[float, ...]]]  # tokens and log-probabilities of each request
Between = Callable[[GenerationEngine], None]


def written(engine: GenerationEngine, requests: Sequence[Request]) -> Written:
    return [(made.tokens, made.logprobs) for made in engine.run(requests)]


def handed_over(blocks: Sequence[nn.Module], name: str, device: torch.device) -> list[nn.Module]:
    """Give these blocks the weights of a later version, where they are."""
    others = make(MODELS[name])
    initialise(others, MODELS[name], seed=1, dtype=torch.float64)
    for own, other in zip(blocks, others, strict=True):
        for parameter, later in zip(own.parameters(), other.parameters(), strict=True):
            parameter.data.copy_(later.data.to(device))
    return list(blocks)


@pytest.mark.parametrize("name", ["window", *nightly("llama")])
def test_generation_and_a_hand_over_write_what_a_cpu_does(name: str) -> None:
    config, sampling = MODELS[name], Sampling(temperature=1.0, top_k=0)
    requests = [Request(prompt=tuple(range(13)), num_tokens=9 + row, seed=row, sampling=sampling) for row in range(4)]

    def on(device: torch.device, more: dict[str, BuildPool], between: Between) -> list[Written]:
        blocks = [block.to(device) for block in make(config)]
        engine = GenerationEngine(blocks, config, **SIZES, **more)  # type: ignore[arg-type]
        found = [written(engine, requests), written(engine, requests[::-1])]
        between(engine)
        handed_over(blocks, name, device)
        return [*found, written(engine, requests[:2])]

    wanted = on(torch.device("cpu"), {}, lambda engine: None)
    with rehearsed() as rehearsal:

        def between(engine: GenerationEngine) -> None:
            assert isinstance(engine.pool, MappedPages)
            assert rehearsal.machine.num_pages
            engine.pool.give_back()
            assert not rehearsal.machine.num_pages, "all memory is free while weights are updated"

        found = on(DEVICE, {"build_pool": mapped_pages}, between)
        gc.collect()
        assert not rehearsal.faults, rehearsal.findings.told()
        assert not rehearsal.machine.num_pages, "memory goes back with the engine"
        assert not rehearsal.machine.ranges
    for own, other in zip(found, wanted, strict=True):
        assert [tokens for tokens, _ in own] == [tokens for tokens, _ in other]
        for (_, ours), (_, theirs) in zip(own, other, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-12)


def use(pool: PagePool) -> None:
    """Sequences that share pages, exchange them, and end; then all memory goes, and comes again."""
    assert isinstance(pool, MappedPages)
    for _ in range(2):
        for pages in ((2, 0), (2, 1), (3, 1)):
            pool.prepare([Span(0, pages, 0, 0, TOKENS + 3), Span(1, pages[:1], 0, TOKENS - 1, TOKENS)])
            for layer in range(LAYERS):
                pool.store(layer, *torch.ones(2, TOKENS + 4, HEADS, DIM, dtype=torch.float64, device=DEVICE))
                for index in range(2):
                    assert not any(bool(each.isnan().any()) for each in pool.view(layer, index))
                pool.view(layer, 0)[0].add_(1.0)
        pool.forget(1)
        pool.forget(0)
        pool.give_back()


def test_pages_are_shared_exchanged_and_given_back_without_a_fault() -> None:
    with rehearsed() as rehearsal:
        use(mapped_pages(SHAPE, 4, TOKENS, DEVICE, torch.float64))
        assert not rehearsal.faults, rehearsal.findings.told()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # memory that goes back as wrongly
@pytest.mark.parametrize("name", DAMAGES)
def test_a_fault_of_the_calls_is_noticed(name: str) -> None:
    function, text, other, kind = DAMAGES[name]
    with rehearsed() as rehearsal, damaged(Damage(function, text, other or "pass", "", kind)):
        with suppress(RuntimeError, AssertionError):
            use(mapped_pages(SHAPE, 4, TOKENS, DEVICE, torch.float64))
        assert kind in {fault.kind for fault in rehearsal.faults}, rehearsal.findings.told()


def test_a_view_is_used_after_its_pages_were_unmapped() -> None:
    with rehearsed() as rehearsal:
        pool = mapped_pages(SHAPE, 4, TOKENS, DEVICE, torch.float64)
        pool.prepare([Span(0, (2,), 0, 0, TOKENS)])
        view = pool.view(0, 0)[0]
        view.fill_(1.0)
        pool.forget(0)
        with pytest.raises(RuntimeError, match="illegal memory access"):
            view.sum()
        assert [fault.kind for fault in rehearsal.faults] == [Kind.UNMAPPED]
        del pool, view


def test_two_streams_that_reach_a_page_by_two_addresses_race() -> None:
    with rehearsed() as rehearsal:
        pool = mapped_pages(SHAPE, 4, TOKENS, DEVICE, torch.float64)
        pool.prepare([Span(0, (2,), 0, 0, TOKENS), Span(1, (2,), 0, 0, TOKENS)])
        (one, _), (other, _) = pool.view(0, 0), pool.view(0, 1)
        assert one.data_ptr() != other.data_ptr()
        one.fill_(1.0)
        assert not rehearsal.faults
        with torch.Stream(DEVICE):
            other.sum()
        assert [fault.kind for fault in rehearsal.faults] == [Kind.RACE]
        del pool  # whose memory goes back to this device

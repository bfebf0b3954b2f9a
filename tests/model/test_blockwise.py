"""Attention over pairs of runs: exact in any split, with flash kernels and with plain products."""

import math
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bench.pair_attention import attend_pairs
from terrace.base.errors import first_line
from terrace.model import pair_kernels
from terrace.model.attention import NO_SINKS, attend
from terrace.model.blockwise import DensePair, dense_mask, merge_, pair_backward, pair_forward
from terrace.model.pair_kernels import (
    CPU_FLASH,
    CPU_FLASH_WIDE,
    CUDA_FLASH,
    CUDNN,
    CUDNN_HEAD,
    PLAIN,
    Kernel,
    PairInputs,
    describe,
    kernels_for,
)
from tests.support.pair_trial import disagreement

pytestmark = pytest.mark.timeout(120)

Found = list[Tensor]  # output, gradients of query, key and value


def normal(length: int, heads: int, dtype: torch.dtype = torch.float64, seed: int = 0, size: int = 8) -> Tensor:
    values = torch.randn(1, length, heads, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype).transpose(1, 2)


def whole(query: Tensor, key: Tensor, value: Tensor, sees: Tensor, grad: Tensor) -> Found:
    """Softmax over all keys at once, in fp64, through autograd; a query that sees nothing makes zeros."""
    leaves = [part.detach().double().requires_grad_() for part in (query, key, value)]
    groups = query.shape[1] // key.shape[1]
    keys, values = (part.repeat_interleave(groups, 1) for part in leaves[1:])
    scores = leaves[0] @ keys.transpose(2, 3) / math.sqrt(query.shape[3])
    blind = ~sees.any(-1, keepdim=True)
    weights = scores.masked_fill(~(sees | blind), -torch.inf).softmax(-1).masked_fill(blind, 0.0)
    out = weights @ values
    out.backward(grad.double())  # type: ignore[no-untyped-call]
    return [out.detach(), *(part.grad for part in leaves if part.grad is not None)]


def in_pairs(query: Tensor, key: Tensor, value: Tensor, pairs: list[DensePair], grad: Tensor) -> Found:
    query, key, value = leaves = [part.detach().requires_grad_() for part in (query, key, value)]
    out = attend_pairs(query, key, value, pairs)
    out.backward(grad)  # type: ignore[no-untyped-call]
    return [out.detach(), *(part.grad for part in leaves if part.grad is not None)]


def furthest(found: Found, wanted: Found) -> float:
    """Return the largest difference, in parts of the largest element of its tensor (at least 1)."""
    assert [part.shape for part in found] == [part.shape for part in wanted]
    return max(float((a - b).abs().max()) / max(1.0, float(b.abs().max())) for a, b in zip(found, wanted, strict=True))


@pytest.fixture(autouse=True)
def _forget_choices() -> Iterator[None]:
    """Whatever a test has put in the place of a kernel, others choose anew."""
    yield
    kernels_for.cache_clear()


@contextmanager
def only(kernel: Kernel, max_scores: int = 1 << 20) -> Iterator[None]:
    """Have pairs of all kinds computed by one kernel."""
    kernel = replace(kernel, takes=lambda pair: True)
    with ExitStack() as stack:
        stack.enter_context(patch.object(pair_kernels, "kernels_for", return_value=(kernel,)))
        stack.enter_context(patch.object(pair_kernels, "_MAX_SCORES", max_scores))
        yield


def visible(num: int, begins: list[int], window: int) -> Tensor:
    """Which of the tokens of a row each of them sees, from the definition."""
    sees = torch.zeros(num, num, dtype=torch.bool)
    for place in range(num):
        first = max(begin for begin in [0, *begins] if begin <= place)
        sees[place, max(first, place - window + 1 if window else 0) : place + 1] = True
    return sees


def cut_up(sees: Tensor, begins: list[int], window: int, cuts: tuple[list[int], list[int]]) -> list[DensePair]:
    """Return a pair for every run of queries and of keys between cuts of which some see some."""
    runs = [list(pairwise(sorted({0, *some, len(sees)}))) for some in cuts]
    pairs = []
    for queries in runs[0]:
        for keys in runs[1]:
            part = sees[slice(*queries), slice(*keys)]
            num, num_keys = part.shape
            if part.all():
                pairs.append(DensePair(queries, keys))
            elif num == num_keys and torch.equal(part, torch.ones_like(part).tril()):
                pairs.append(DensePair(queries, keys, "causal"))
            elif part.any():
                own = [begin - keys[0] for begin in begins if keys[0] < begin < queries[1]]
                mask = dense_mask(num, num_keys, queries[0] - keys[0], own, window, torch.float64)
                assert torch.equal(mask == 0, part)
                pairs.append(DensePair(queries, keys, "mask", mask))
    return pairs


CUTS = st.lists(st.integers(1, 47), max_size=3)


@settings(deadline=None, max_examples=25)
@given(
    cuts=st.one_of(CUTS.map(lambda cuts: (cuts, cuts)), st.tuples(CUTS, CUTS)),
    begins=st.lists(st.integers(1, 47), max_size=3, unique=True).map(sorted),
    window=st.sampled_from([0, 0, 1, 7, 30]),
    num_kv_heads=st.sampled_from([1, 2, 8]),
    kernel=st.sampled_from([CPU_FLASH, PLAIN]),
    order=st.randoms(use_true_random=False),
)
def test_any_split_is_attention_over_all_keys(
    cuts: tuple[list[int], list[int]], begins: list[int], window: int, num_kv_heads: int, kernel: Kernel, order: Any
) -> None:
    """Limit: 1e-12, forward and backward."""
    query, grad = normal(48, 8), normal(48, 8, seed=1)
    key, value = normal(48, num_kv_heads, seed=2), normal(48, num_kv_heads, seed=3)
    sees = visible(48, begins, window)
    pairs = cut_up(sees, begins, window, cuts)
    order.shuffle(pairs)
    with only(kernel, max_scores=3000):
        found = in_pairs(query, key, value, pairs, grad)
    assert furthest(found, whole(query, key, value, sees, grad)) < 1e-12


@pytest.mark.parametrize("kernel", [CPU_FLASH, PLAIN], ids=["flash", "plain"])
def test_what_sees_nothing_makes_nothing(kernel: Kernel) -> None:
    """Rows of no pair, rows that see no key of a pair or of any, queries before and after all keys: never a nan."""
    query, key, value, grad = normal(9, 4), normal(6, 2, seed=1), normal(6, 2, seed=2), normal(9, 4, seed=3)
    below = dense_mask(3, 4, -2, (), 0, torch.float64)  # sees nothing, nothing, the first
    assert (below == 0).sum(1).tolist() == [0, 0, 1]
    after = dense_mask(2, 2, 4, (5,), 3, torch.float64)  # its window has passed by, its document begins later
    assert torch.isinf(after).all()
    pairs = [DensePair((0, 3), (0, 4), "mask", below), DensePair((1, 3), (4, 6)), DensePair((4, 6), (1, 3), "causal")]
    pairs.append(DensePair((7, 9), (2, 4), "mask", after))
    sees = torch.zeros(9, 6, dtype=torch.bool)
    sees[0:3, 0:4], sees[4:6, 1:3] = below == 0, torch.ones(2, 2).tril() > 0
    sees[1:3, 4:6] = True
    with only(kernel):
        out, lse = pair_forward(PairInputs(query[:, :, :3], key[:, :, :4], value[:, :, :4], "mask", below))
        assert torch.isneginf(lse).any(1).tolist() == [[True, True, False]]
        assert not out[:, :, :2].any()
        for some in (pairs, pairs[-1:], []):
            seen = sees if some is pairs else torch.zeros_like(sees)
            assert furthest(in_pairs(query, key, value, some, grad), whole(query, key, value, seen, grad)) < 1e-12


def test_merging_is_safe_where_exponentials_are_not() -> None:
    lse = torch.tensor([-torch.inf, -torch.inf, 5.0, -900.0, 900.0]).view(1, 1, 5)
    new = torch.tensor([-torch.inf, 3.0, -torch.inf, 900.0, 900.0]).view(1, 1, 5)
    out = torch.tensor([0.0, 0.0, 2.0, 2.0, 2.0]).view(1, 1, 5, 1)
    merge_(out, lse, torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0]).view(1, 1, 5, 1), new)
    assert out.flatten().tolist() == [0.0, 1.0, 2.0, 1.0, 1.5]
    assert lse.flatten().tolist() == [-torch.inf, 3.0, 5.0, 900.0, pytest.approx(900.0 + math.log(2.0))]


def test_a_wrong_lse_is_caught() -> None:
    """Negative control: the lse of the pair alone, in place of that over all pairs, is off by far more than limits."""
    query, key, value, grad = normal(8, 2), normal(16, 2, seed=1), normal(16, 2, seed=2), normal(8, 2, seed=3)
    wanted = whole(query, key, value, torch.ones(8, 16, dtype=torch.bool), grad)
    runs = ((0, 8), (8, 16))
    parts = [pair_forward(PairInputs(query, key[:, :, a:b], value[:, :, a:b], "full")) for a, b in runs]
    out, lse = (part.clone() for part in parts[0])
    merge_(out, lse, *parts[1])
    for sums, is_right in ((lse, True), (parts[0][1], False)):
        first = PairInputs(query, key[:, :, :8], value[:, :, :8], "full")
        grads = pair_backward(grad, first, out, sums)
        assert (furthest([grads[1]], [wanted[2][:, :, :8]]) < 1e-12) is is_right
        assert is_right or furthest([grads[1]], [wanted[2][:, :, :8]]) > 1e-2


# Of the largest element: rounding of the output and of one gradient (2^-8), and of weights that are kept in bf16.
LIMITS = {torch.float32: 3e-6, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", list(LIMITS), ids=["fp32", "bf16"])
@pytest.mark.parametrize("num_kv_heads", [1, 4])
def test_flash_kernel_and_plain_products_agree(dtype: torch.dtype, num_kv_heads: int) -> None:
    """Lengths around the blocks of the kernel, several pairs a row, a window, in the dtypes of training."""
    num, begins, window = 300, [70, 231], 90
    query, grad = (normal(num, 4, dtype, seed=seed, size=16) for seed in (0, 1))
    key, value = (normal(num, num_kv_heads, dtype, seed=seed, size=16) for seed in (2, 3))
    sees = visible(num, begins, window)
    pairs = [
        replace(pair, mask=None if pair.mask is None else pair.mask.to(dtype))
        for pair in cut_up(sees, begins, window, ([33, 161, 230], [33, 161]))
    ]
    wanted = whole(query, key, value, sees, grad)
    for kernel in (CPU_FLASH, CPU_FLASH_WIDE, PLAIN):
        with only(kernel, max_scores=1 << 14):
            assert (
                furthest([part.double() for part in in_pairs(query, key, value, pairs, grad)], wanted) < LIMITS[dtype]
            )


def test_the_kernel_of_a_device_is_said() -> None:
    cpu = torch.device("cpu")
    for has, name in ((True, "flash kernel of torch"), (False, "flash kernel of torch in float32")):
        kernels_for.cache_clear()
        with patch.object(pair_kernels, "_has_products", return_value=has):
            assert describe(cpu, torch.bfloat16) == f"{name} (cpu, bfloat16)"
            assert describe(cpu, torch.float32) == "flash kernel of torch (cpu, float32)"
    assert describe(torch.device("meta"), torch.float32) == "plain products of torch (meta, float32)"
    for capability, found in (((8, 0), (CUDA_FLASH,)), ((9, 0), (CUDNN, CUDA_FLASH)), ((10, 0), (CUDNN, CUDA_FLASH))):
        with patch.object(torch.cuda, "get_device_capability", lambda device, capability=capability: capability):
            assert pair_kernels._candidates(torch.device("cuda"), torch.bfloat16) == found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_kernels_of_a_cpu_agree_with_plain_products(dtype: torch.dtype) -> None:
    """Private operators of torch: a version in which one computes something else fails here."""
    cpu = torch.device("cpu")
    assert disagreement(CPU_FLASH, cpu, dtype) == ""
    if dtype.itemsize == 2:
        assert disagreement(CPU_FLASH_WIDE, cpu, dtype) == ""

    def off(pair: PairInputs) -> tuple[Tensor, Tensor]:
        out, lse = CPU_FLASH.forward(pair)
        return out, lse * math.log2(math.e)

    found = disagreement(replace(CPU_FLASH, forward=off), cpu, dtype)
    assert "differs from the reference (lse of a full pair)" in found


@pytest.mark.parametrize(
    "error", [AttributeError("no attribute '_flash'"), RuntimeError("No execution plans support the graph.\nmore")]
)
def test_a_kernel_that_refuses_a_pair_leaves_it_to_the_next_loud(error: Exception) -> None:
    """Forward and backward, whether the operator is missing or has no kernel for the shape."""

    def fail(*given: Any) -> Any:
        raise error

    said = rf"goes without cuDNN attention \(cpu, torch.float64\): {re.escape(first_line(error))}$"
    refusing = replace(CPU_FLASH, name="cuDNN attention", forward=fail, backward=fail)
    pair = PairInputs(normal(6, 4), normal(6, 2, seed=1), normal(6, 2, seed=2), "causal")
    wanted = [*CPU_FLASH.forward(pair)]
    wanted += CPU_FLASH.backward(pair.query, pair, wanted[0], wanted[1])
    with patch.object(pair_kernels, "_candidates", lambda *asked: (refusing, CPU_FLASH)):
        kernels_for.cache_clear()
        with pytest.warns(UserWarning, match=said):
            out, lse = pair_forward(pair)
        with pytest.warns(UserWarning, match=said):
            grads = pair_backward(pair.query, pair, out, lse)
    assert all(map(torch.equal, (out, lse, *grads), wanted))


def test_memory_that_runs_out_is_no_refusal() -> None:
    def full(pair: PairInputs) -> Any:
        raise torch.OutOfMemoryError("full")

    pair = PairInputs(normal(6, 4), normal(6, 2), normal(6, 2), "causal")
    with (
        patch.object(pair_kernels, "kernels_for", lambda *asked: (replace(CPU_FLASH, forward=full), PLAIN)),
        pytest.raises(torch.OutOfMemoryError),
    ):
        pair_forward(pair)


def empty(length: int, heads: int, size: int = 128) -> Tensor:
    """On the device without memory, which knows shapes alone."""
    return torch.empty(2, length, heads, size, device="meta", dtype=torch.bfloat16).transpose(1, 2)


def test_operators_of_cudnn_are_called_as_torch_declares_them() -> None:
    query, key = empty(6, 4), empty(8, 2)
    pair = PairInputs(query, key, key, "full")
    out, lse = CUDNN.forward(pair)
    assert (out.shape, out.stride(), lse.shape, lse.dtype) == (query.shape, query.stride(), (2, 4, 6), torch.float32)
    assert [part.shape for part in CUDNN.backward(out, pair, out, lse)] == [query.shape, key.shape, key.shape]


def test_cudnn_gets_lengths_that_repeat_and_short_heads_alone() -> None:
    """It makes a graph for every new shape, and documents have any."""
    for (queries, keys, size), takes in (
        ((256, 384, 128), True),
        ((256, 300, 128), False),
        ((200, 256, 64), False),
        ((256, 256, 256), False),
    ):
        key = empty(keys, 2, size)
        assert CUDNN.takes(PairInputs(empty(queries, 4, size), key, key, "full")) is takes
    masked = PairInputs(empty(256, 4), empty(256, 2), empty(256, 2), "mask", torch.empty(256, 256, device="meta"))
    assert not CUDNN.takes(masked)


def test_a_plan_from_outside_attends_itself() -> None:
    query, key, value = normal(6, 4), normal(6, 2, seed=1), normal(6, 2, seed=2)

    class Outside:
        def attend(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor = NO_SINKS) -> Tensor:
            return attend_pairs(query, key, value, [DensePair((0, 6), (0, 6), "causal")])

    found = attend(query, key, value, Outside())
    torch.testing.assert_close(found, attend(query, key, value, None), atol=1e-13, rtol=0)
    assert found.stride() == query.stride()  # so that merging the heads is a view


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", [CUDA_FLASH, CUDNN], ids=["flash", "cudnn"])
def test_attention_on_cuda_agrees(kernel: Kernel, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    if kernel not in pair_kernels._candidates(device, dtype):
        pytest.skip(f"{torch.cuda.get_device_name()} is not given {kernel.name}")
    lengths, sizes = ((128, 256), (64, CUDNN_HEAD)) if kernel is CUDNN else ((5, 7), (16,))
    assert [disagreement(kernel, device, dtype, lengths, size) for size in sizes] == [""] * len(sizes)
    monkeypatch.setattr(pair_kernels, "kernels_for", lambda *asked: (replace(kernel, takes=lambda pair: True),))
    num, begins = 300, [70, 231]
    query, grad = (normal(num, 4, dtype, seed=seed, size=64).cuda() for seed in (0, 1))
    key, value = (normal(num, 2, dtype, seed=seed, size=64).cuda() for seed in (2, 3))
    sees = visible(num, begins, 0)
    pairs = [
        replace(pair, mask=None if pair.mask is None else pair.mask.to("cuda", dtype))
        for pair in cut_up(sees, begins, 0, ([70, 150, 231], [70, 150, 231]))
    ]
    assert {pair.kind for pair in pairs} == {"causal", "full"}
    found = [part.double() for part in in_pairs(query, key, value, pairs, grad)]
    assert furthest(found, whole(query, key, value, sees.cuda(), grad)) < LIMITS[torch.bfloat16]

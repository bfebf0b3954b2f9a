"""Kernels of attention for documents and windows: each against the pieces and a softmax under an explicit mask.

The varlen kernel runs on CUDA alone, so a stand-in with its documented contract takes its place here; FlexAttention
runs unfused, its refusal of backwards on a CPU put aside.
"""

import math
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import flex_attention

from terrace.base.errors import ConfigError
from terrace.model import attention_plans, fused_attention
from terrace.model.attention import MaskPieces, MaskPlan, attend, first_keys, moved_from, on_host
from terrace.model.attention_kernel import AttentionCase, AttentionChoice, AttentionKernel, candidates, expected
from terrace.model.attention_plans import AttentionPlans, Refusable, choose_kernel, describe, make_plan
from terrace.model.decoder import build_blocks
from terrace.model.fused_attention import BlockMasked, Documents
from terrace.model.layers import Attention
from terrace.runtime.batch import Batch
from terrace.runtime.replay import Replays
from tests.support.activations import MODELS
from tests.support.allocations import allocated

CPU = torch.device("cpu")


def varlen_stand_in(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.attention.varlen.varlen_attn` as it is documented, document by document."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert cu_seq_q[0] == 0
    assert enable_gqa or query.shape[1] == key.shape[1], "grouped heads must be told"
    assert cu_seq_q[-1] == len(query) == len(key) == len(value)
    out = []
    for begin, end in pairwise(cu_seq_q.tolist()):
        num = end - begin
        assert 0 < num <= min(max_q, max_k), "a longer document would be cut off"
        places = torch.arange(num)
        sees = torch.ones(num, num, dtype=torch.bool)
        if window_size[0] >= 0:
            sees &= places >= places.unsqueeze(1) - window_size[0]
        if window_size[1] >= 0:
            sees &= places <= places.unsqueeze(1) + window_size[1]
        own = [part[begin:end].transpose(0, 1) for part in (query, key, value)]
        out.append(explicit(own[0], own[1], own[2], sees).transpose(0, 1))
    return torch.cat(out)


def explicit(query: Tensor, key: Tensor, value: Tensor, sees: Tensor) -> Tensor:
    """softmax over the keys that each query `sees` (S, S); query (..., N, S, D), keys and values (..., K, S, D)."""
    groups = query.shape[-3] // key.shape[-3]
    key, value = (part.repeat_interleave(groups, -3) for part in (key, value))
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    return scores.masked_fill(~sees, -torch.inf).softmax(-1) @ value


@contextmanager
def kernels_here() -> Iterator[None]:
    """The stand-in of varlen, and FlexAttention with backwards."""
    with (
        patch.object(fused_attention, "varlen_kernel", lambda: varlen_stand_in),
        patch.object(flex_attention, "_validate_device", lambda *_: None),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        yield


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def inputs(batch: int, heads: int, kv_heads: int, sequence: int, size: int = 8) -> list[Tensor]:
    """Queries, keys and values, with the heads of a token side by side, as layers make them."""
    shapes = (heads, kv_heads, kv_heads)
    return [
        normal(batch, sequence, num, size, seed=index).transpose(1, 2).requires_grad_()
        for index, num in enumerate(shapes)
    ]


def begins_of(rows: list[list[int]], sequence: int) -> Tensor:
    """Documents of these lengths; the last one of a row goes to its end."""
    begins = torch.zeros(len(rows), sequence, dtype=torch.bool)
    for index, sizes in enumerate(rows):
        places = [0, *torch.tensor(sizes, dtype=torch.int64).cumsum(0).tolist()]
        begins[index, [place for place in places if place < sequence]] = True
    return begins


def positions_of(begins: Tensor) -> Tensor:
    places = torch.arange(begins.shape[1])
    return places - torch.where(begins, places, 0).cummax(1).values


def visible(begins: Tensor, window: int) -> Tensor:
    """Whether each token sees each other, (B, 1, S, S), from the definition."""
    document, places = begins.cumsum(1), torch.arange(begins.shape[1])
    sees = (document.unsqueeze(2) == document.unsqueeze(1)) & (places <= places.unsqueeze(1))
    if window:
        sees &= places > places.unsqueeze(1) - window
    return sees.unsqueeze(1)


def results(parts: list[Tensor], plan: MaskPlan) -> list[Tensor]:
    output = attend(parts[0], parts[1], parts[2], plan)
    return [output, *torch.autograd.grad(output, parts, normal(*output.shape, seed=9))]


ROW = st.lists(st.integers(1, 90), max_size=6)


@settings(deadline=None, max_examples=5)
@given(st.lists(ROW, min_size=1, max_size=3), st.integers(1, 300), st.sampled_from([0, 1, 2, 20, 130]), st.booleans())
@pytest.mark.parametrize("kernel", ["varlen", "flex"])
def test_output_and_gradients_are_those_of_pieces_and_of_a_softmax(
    kernel: AttentionKernel, rows: list[list[int]], sequence: int, window: int, grouped: bool
) -> None:
    begins, parts = begins_of(rows, sequence), inputs(len(rows), 4, 2 if grouped else 4, sequence)
    wanted = explicit(parts[0], parts[1], parts[2], visible(begins, window))
    gradients = torch.autograd.grad(wanted, parts, normal(*wanted.shape, seed=9))
    pieces = results(parts, make_plan("pieces", begins, window, CPU, torch.float64))
    with kernels_here():
        found = results(parts, make_plan(kernel, begins, window, CPU, torch.float64))
    for one, other, defined in zip(found, pieces, [wanted, *gradients], strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=0)
        torch.testing.assert_close(one, defined, atol=1e-10, rtol=0)


@pytest.mark.parametrize("window", [0, 30])
def test_flex_caps_scores_as_pieces_do(window: int) -> None:
    begins, parts = begins_of([[100, 1, 59], []], 260), inputs(2, 4, 2, 260)
    pieces = results(parts, make_plan("pieces", begins, window, CPU, torch.float64, 0.3))
    with kernels_here():
        found = results(parts, make_plan("flex", begins, window, CPU, torch.float64, 0.3))
    for one, other in zip(found, pieces, strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=0)


def test_flex_takes_what_a_cpu_gives_it_in_fp32() -> None:
    """Without a backward nothing of torch is put aside."""
    parts = [part.detach().float() for part in inputs(2, 4, 2, 260, 16)]
    begins = begins_of([[100, 1, 59], []], 260)
    pieces = attend(parts[0], parts[1], parts[2], make_plan("pieces", begins, 30, CPU, torch.float32))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        found = attend(parts[0], parts[1], parts[2], make_plan("flex", begins, 30, CPU, torch.float32))
    torch.testing.assert_close(found, pieces, atol=1e-5, rtol=0)


def test_the_varlen_kernel_of_torch_takes_what_it_is_given() -> None:
    """Without values, forward and backward: its arguments, grouped heads, shapes and the order of heads in memory."""
    parts = [part.detach().bfloat16().to("meta").requires_grad_() for part in inputs(2, 8, 2, 30, 64)]
    for window in (0, 7):
        plan = Documents.of(begins_of([[3], [9, 1]], 30), window, torch.device("meta"))
        assert (plan.longest, plan.window, plan.starts.shape) == (27, window, (6,))
        output = attend(parts[0], parts[1], parts[2], plan)
        gradients = torch.autograd.grad(output, parts, torch.empty_like(output))
        assert [each.shape for each in gradients] == [part.shape for part in parts]
        assert output.shape == parts[0].shape
        assert output.transpose(1, 2).is_contiguous(), "heads merge without a copy"


@settings(deadline=None, max_examples=25)
@given(st.lists(ROW, min_size=1, max_size=3), st.integers(1, 700), st.sampled_from([0, 1, 129, 300]))
def test_blocks_are_those_that_torch_finds_point_by_point(rows: list[list[int]], sequence: int, window: int) -> None:
    begins = begins_of(rows, sequence)
    sees = visible(begins, window)[:, 0]
    wanted = flex_attention.create_block_mask(
        lambda row, head, query, key: sees[row, query, key], len(rows), None, sequence, sequence, device="cpu"
    )
    found = BlockMasked.of(first_keys(begins, window)).mask
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name
    assert torch.equal(found.to_dense(), wanted.to_dense())
    for name in ("kv", "full_kv"):  # indices behind the number of blocks have no meaning
        counts = getattr(found, f"{name}_num_blocks").unsqueeze(-1)
        counted = torch.arange(counts.shape[2]) < counts
        one, other = (getattr(each, f"{name}_indices") for each in (found, wanted))
        assert torch.equal(one[counted], other[counted])


def test_no_kernel_without_masks_allocates_the_square_of_a_row() -> None:
    sequence = 8192
    begins = begins_of([[5000, 1, 2000]], sequence)
    masked, _, _ = allocated(lambda: make_plan("sdpa", begins, 1000, CPU, torch.float32))
    assert masked >= 4 * sequence**2
    lean: tuple[AttentionKernel, ...] = ("varlen", "flex")
    for kernel in lean:
        peak, _, _ = allocated(partial(make_plan, kernel, begins, 1000, CPU, torch.float32))
        assert peak < 64 * sequence


@pytest.mark.parametrize("choice", ["varlen", "flex", "pieces", "sdpa"])
@pytest.mark.parametrize("window", [0, 40])
def test_plans_of_rows_without_documents(choice: AttentionChoice, window: int) -> None:
    parts = inputs(2, 4, 2, 150)
    wanted = explicit(parts[0], parts[1], parts[2], visible(begins_of([[], []], 150), window))
    with kernels_here(), patch.object(attention_plans, "refusal", return_value=""):
        plans = AttentionPlans(window, is_grouped=True, choice=choice)
        plan = plans.plan(None, parts[0])
        assert plans.plan(None, parts[0]) is plan, "made once"
        plan = plan.plan if isinstance(plan, Refusable) else plan
        kinds = {"varlen": Documents, "flex": BlockMasked, "pieces": MaskPieces, "sdpa": Tensor}
        assert isinstance(plan, kinds[choice] if window or choice in ("varlen", "flex") else type(None))
        torch.testing.assert_close(attend(parts[0], parts[1], parts[2], plan), wanted, atol=1e-10, rtol=0)


@pytest.mark.parametrize("kernel", ["varlen", "flex", "pieces"])
def test_attention_that_is_computed_again_has_the_same_bits(kernel: AttentionKernel) -> None:
    parts = inputs(2, 4, 2, 140)
    begins = begins_of([[30, 1], [139]], 140)
    with kernels_here():
        plan = make_plan(kernel, begins, 25, CPU, torch.float64)
        kept = results(parts, plan)
        core = partial(attend, plan=plan)
        output = Replays().run(core, tuple(parts), lambda mixed: mixed * 1.0)
        again = [output, *torch.autograd.grad(output, parts, normal(*output.shape, seed=9))]
    assert all(torch.equal(one, other) for one, other in zip(kept, again, strict=True))


def case(
    backend: str = "cuda", dtype: str = "bf16", size: int = 128, is_grouped: bool = False, is_cut: bool = True
) -> AttentionCase:
    return AttentionCase(backend, dtype, size, is_grouped, is_cut)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (case(), ("varlen", "flex", "sdpa")),
        (case(dtype="fp16", size=256, is_grouped=True), ("varlen", "flex", "sdpa")),
        (case(size=264), ("flex", "sdpa")),
        (case(size=100), ("flex", "sdpa")),
        (case(size=8), ("varlen", "sdpa")),
        (case(dtype="fp32"), ("flex", "sdpa")),
        (case(dtype="fp64"), ("sdpa",)),
        (case(is_cut=False, is_grouped=True), ("sdpa",)),
        (case(dtype="fp32", is_cut=False), ("sdpa",)),
        (case(dtype="fp32", is_cut=False, is_grouped=True), ("flex", "sdpa")),
        (case("cpu"), ("pieces",)),
        (case("cpu", is_cut=False), ("sdpa",)),
    ],
)
def test_the_table_of_kernels(given: AttentionCase, wanted: tuple[AttentionKernel, ...]) -> None:
    assert candidates(given) == wanted
    assert expected(given) == wanted[0]


@pytest.mark.parametrize(
    ("choice", "device", "dtype", "size", "words"),
    [
        ("varlen", "cpu", torch.bfloat16, 64, "'varlen' cannot serve: torch has kernels for CUDA alone"),
        ("flex", "cpu", torch.float32, 64, "'flex' cannot serve: torch has no backward on a CPU"),
        ("varlen", "cuda", torch.float32, 64, "it takes bf16 and fp16, and queries are fp32"),
        ("varlen", "cuda", torch.bfloat16, 100, "multiple of 8 up to 256, and heads are of 100"),
        ("flex", "cuda", torch.float64, 64, "queries are fp64"),
        ("flex", "cuda", torch.float32, 8, "heads of at least 16, and heads are of 8"),
    ],
)
def test_a_kernel_that_cannot_serve_is_refused(
    choice: AttentionChoice, device: str, dtype: torch.dtype, size: int, words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        describe(torch.device(device), dtype, size, is_cut=True, choice=choice)
    assert "\n" not in str(caught.value)


def test_a_kernel_that_refuses_leaves_its_calls_to_the_next_loud() -> None:
    """varlen is absent, FlexAttention does not compile: a mask serves, and neither is asked again."""
    parts, begins = inputs(2, 4, 2, 40), begins_of([[3], [9, 1]], 40)
    wanted = explicit(parts[0], parts[1], parts[2], visible(begins, 20))
    ranking: tuple[AttentionKernel, ...] = ("varlen", "flex", "sdpa")
    asked = list[str]()

    def missing() -> Any:
        asked.append("varlen")
        raise ImportError("no varlen_attn\nmore")

    def uncompiled(device_type: str) -> Any:
        asked.append("flex")
        raise RuntimeError("no Triton")

    plans = AttentionPlans(20, is_grouped=True)
    with (
        patch.object(attention_plans, "candidates", lambda case: ranking),
        patch.object(fused_attention, "varlen_kernel", missing),
        patch.object(fused_attention, "_flex_kernel", uncompiled),
    ):
        with warnings.catch_warnings(record=True) as warned:
            for _ in range(2):  # of two micro-batches
                plan = plans.plan(positions_of(begins), parts[0])
                for _ in range(2):  # layers
                    found = attend(parts[0], parts[1], parts[2], plan)
                    torch.testing.assert_close(found, wanted, atol=1e-10, rtol=0)
        assert asked == ["varlen", "flex"]
        assert [str(each.message).partition("): ")[2] for each in warned] == [
            "ImportError: no varlen_attn",
            "RuntimeError: no Triton",
        ]
        plans = AttentionPlans(20, is_grouped=True, choice="varlen")
        with patch.object(attention_plans, "refusal", return_value=""):
            plan = plans.plan(positions_of(begins), parts[0])
            with pytest.raises(
                ConfigError, match=r"'varlen' cannot serve: .*no varlen_attn; leave train.attention out"
            ):
                attend(parts[0], parts[1], parts[2], plan)


def test_a_plan_holds_no_positions() -> None:
    """They are the key of the cache that holds the plan: both would live for ever."""
    query = normal(1, 4, 8, 8, seed=0)
    plans = AttentionPlans(0)
    with patch.object(attention_plans, "candidates", lambda case: ("varlen", "sdpa")):
        positions = positions_of(begins_of([[3]], 8))
        assert isinstance(plans.plan(positions, query), Refusable)
        held = weakref.ref(positions)
        del positions
        assert held() is None


def test_rows_that_turn_out_to_be_whole_take_the_causal_kernel() -> None:
    query = normal(2, 4, 16, 8, seed=0)
    with patch.object(attention_plans, "candidates", lambda case: ("varlen",) if case.is_cut else ("sdpa",)):
        whole = positions_of(begins_of([[], []], 16))
        assert AttentionPlans(0).plan(whole, query) is None
        for window, positions in ((3, whole), (0, positions_of(begins_of([[], [9]], 16)))):
            plan = AttentionPlans(window).plan(positions, query)
            assert isinstance(plan, Refusable)
            assert isinstance(plan.plan, Documents)


def test_positions_that_were_moved_are_read_on_the_host() -> None:
    positions = positions_of(begins_of([[3]], 8))
    on_meta = torch.empty_like(positions, device="meta")
    moved_from(on_meta, positions)
    assert on_host(on_meta) is positions
    assert on_host(positions) is positions
    moved = Batch(positions, positions, positions).to(torch.device("meta")).positions
    assert moved is not None
    assert on_host(moved) is positions


def test_a_choice_reaches_all_layers_and_is_named() -> None:
    blocks = build_blocks(MODELS["llama"], "cpu", torch.float32)
    choose_kernel(blocks, "sdpa")
    positions = positions_of(begins_of([[3]], 8))
    modules = [module for block in blocks for module in block.modules()]
    (only,) = {module.plans for module in modules if isinstance(module, Attention)}
    assert isinstance(only.plan(positions, normal(1, 4, 8, 8, seed=0, dtype=torch.float32)), Tensor)
    named = describe(CPU, torch.float32, 8, is_cut=True)
    assert named == "scaled_dot_product_attention of torch, piece by piece (cpu, float32)"
    assert "masks of whole rows" in describe(CPU, torch.float32, 8, is_cut=True, choice="sdpa")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kernel", ["varlen", "flex"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [64, 128])
def test_kernels_of_cuda_agree(kernel: AttentionKernel, dtype: torch.dtype, size: int) -> None:
    device = torch.device("cuda")
    parts = [part.detach().to(device, dtype).requires_grad_() for part in inputs(2, 8, 2, 600, size)]
    begins = begins_of([[1, 1, 300], [599]], 600)
    for window in (0, 1, 200):
        output = attend(parts[0], parts[1], parts[2], make_plan(kernel, begins, window, device, dtype))
        found = [output, *torch.autograd.grad(output, parts, torch.ones_like(output))]
        wide = [part.detach().double().requires_grad_() for part in parts]
        sees = visible(begins, window).to(device)
        defined = explicit(wide[0], wide[1], wide[2], sees)
        wanted = [defined, *torch.autograd.grad(defined, wide, torch.ones_like(defined))]
        for one, other in zip(found, wanted, strict=True):
            assert (one.double() - other).abs().max() <= 3e-2 * other.abs().max()

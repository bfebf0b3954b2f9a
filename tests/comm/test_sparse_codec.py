"""Sparse messages: the fast code is the definition bit for bit, and both keep the largest and lose as stated."""

import struct

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from terrace.comm import codecs
from terrace.comm.codecs import sparse, sparse_cpu
from terrace.comm.codecs.sparse import SparseParts
from terrace.plan.wire import SPARSE_BLOCK, WireFormat, parse_format
from tests.support.codec_cases import DTYPES, fed_back, mixed, new_messages, received, same

FORMATS = [parse_format(text) for text in ("topk", "topk:256", "topk:1024")]
SIZES = st.one_of(st.sampled_from((1, 31, 32, 33, 255, 256, 257, 4095, 4096, 4097, 8192, 9001)), st.integers(1, 9000))
fewer = settings(deadline=None, max_examples=25)
of_all_formats = pytest.mark.parametrize("wire", FORMATS, ids=lambda wire: wire.name)


def sent(values: Tensor, wire: WireFormat, residual: Tensor | None = None) -> Tensor:
    messages = new_messages(wire, *values.shape)
    codecs.encode(values, wire, messages, residual)
    return messages


def drawn(kind: str, rows: int, numel: int, seed: int) -> Tensor:
    """Elements of all magnitudes, few different ones, hardly any but zeros, or nothing but zeros."""
    values = mixed(rows, numel, seed)
    if kind == "ties":
        return values.clamp(-3, 3).round()
    if kind == "few":
        return values * (torch.rand(rows, numel, generator=torch.Generator().manual_seed(seed)) < 0.01)
    return torch.zeros(rows, numel) if kind == "zeros" else values


def plain(values: list[float], wire: WireFormat) -> tuple[list[int], list[float]]:
    """Places and decoded values of one row, in plain Python from the description of the format."""
    places, decoded = list[int](), list[float]()
    for start in range(0, len(values), SPARSE_BLOCK):
        block = values[start : start + SPARSE_BLOCK]
        order = sorted(range(len(block)), key=lambda place: (-abs(block[place]), place))
        kept = sorted(order[: -(-len(block) // wire.kept_of)])
        scale = round_up(max(abs(block[place]) for place in kept) / 7)
        for place in kept:
            places.append(start + place)
            decoded.append(max(-7, min(7, round(block[place] / scale))) * scale)
    return places, decoded


def round_up(value: float) -> float:
    """The smallest bf16 not below a positive number, at least 2^-126."""
    (bits,) = struct.unpack(">I", struct.pack(">f", value))
    (found,) = struct.unpack(">f", struct.pack(">I", (bits + 0xFFFF) & ~0xFFFF))
    return max(float(found), 2.0**-126)


@of_all_formats
@fewer
@given(kind=st.sampled_from(("mixed", "ties", "few", "zeros")), numel=SIZES, seed=st.integers(0, 1 << 30))
def test_fast_equals_the_definition_for_every_dtype(wire: WireFormat, kind: str, numel: int, seed: int) -> None:
    for dtype in DTYPES:
        values = drawn(kind, 2, numel, seed).to(dtype)
        expected = new_messages(wire, 2, numel)
        sparse.encode(values, wire, expected)
        assert torch.equal(sent(values, wire), expected)
        residual = drawn(kind, 2, numel, seed + 1).clamp(-1, 1)
        there = residual.clone()
        sparse.encode(values, wire, expected, there)
        assert torch.equal(sent(values, wire, residual), expected)
        assert same(residual, there)
        total = torch.ones(numel, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
        codecs.decode_add(expected, wire, total)
        first, second = received(expected, wire, numel, total.dtype)
        assert same(total, 1 + first + second)
        assert same(received(expected, wire, numel, dtype), received(expected, wire, numel).to(dtype))


def test_fast_equals_the_definition_over_several_chunks() -> None:
    wire, numel = parse_format("topk"), 2 * sparse_cpu.CHUNK + 3 * SPARSE_BLOCK + 77
    values, residual = mixed(2, numel, 5, torch.bfloat16), mixed(2, numel, 6).clamp(-1, 1)
    expected_residual, expected = residual.clone(), new_messages(wire, 2, numel)
    sparse.encode(values, wire, expected, expected_residual)
    assert torch.equal(sent(values, wire, residual), expected)
    assert same(residual, expected_residual)


@of_all_formats
@fewer
@given(
    values=st.lists(st.floats(width=32, min_value=-(2.0**99), max_value=2.0**99), min_size=1, max_size=70),
    repeats=st.sampled_from((1, 3, 100)),
)
@example(values=[1.0], repeats=70)
@example(values=[0.0, -0.0, 1e-45, 2.0**-126], repeats=9)
@example(values=[1.0, -1.0, 2.0, -2.0], repeats=1100)
def test_the_largest_are_kept_and_of_equal_ones_the_first(wire: WireFormat, values: list[float], repeats: int) -> None:
    row = values * repeats
    message = sent(torch.tensor([row], dtype=torch.float32), wire)
    indexes, found = sparse.read(message[0], wire, len(row))
    places, decoded = plain(row, wire)
    assert indexes.tolist() == places
    # The product with 1 / scale rounds, so a value half way between two points may go either way.
    scale = torch.tensor([abs(each) for each in row]).max() / 7
    assert found.numpy() == pytest.approx(decoded, rel=0, abs=1.01 * float(scale) + 2.0**-126)


def bound(x: Tensor, message: Tensor, wire: WireFormat) -> tuple[Tensor, Tensor]:
    """(Largest error of each element, largest squared error of each block) of the module's docstring, for one row."""
    numel = len(x)
    scales = message[: SparseParts.of(wire, numel).scales].clone().view(torch.bfloat16).double()
    step, magnitude = scales.repeat_interleave(wire.block)[:numel], x.double().abs()
    is_kept = torch.zeros(numel, dtype=torch.bool)
    is_kept[sparse.read(message, wire, numel)[0]] = True
    each = torch.where(is_kept, step / 2 + magnitude * 2.0**-22, magnitude)
    squares = []
    for start in range(0, numel, wire.block):
        part = slice(start, start + wire.block)
        width, kept = len(x[part]), int(is_kept[part].sum())
        coded = step[start] / 2 + magnitude[part].max() * 2.0**-22
        squares.append((1 - kept / width) * magnitude[part].square().sum() + kept * coded**2)
        assert (magnitude[part][~is_kept[part]] <= magnitude[part][is_kept[part]].min()).all()
    return each, torch.stack(squares)


@of_all_formats
@fewer
@given(kind=st.sampled_from(("mixed", "ties", "few", "zeros")), numel=SIZES, seed=st.integers(0, 1 << 30))
def test_a_message_loses_no_more_than_stated(wire: WireFormat, kind: str, numel: int, seed: int) -> None:
    x = drawn(kind, 1, numel, seed)
    messages = sent(x, wire)
    lost = (x.double() - received(messages, wire, numel).double())[0].abs()
    each, squares = bound(x[0], messages[0], wire)
    assert (lost <= each).all()
    padded = torch.nn.functional.pad(lost.square(), (0, -numel % wire.block)).view(-1, wire.block).sum(1)
    assert (padded <= squares * (1 + 1e-9)).all()


@of_all_formats
@pytest.mark.parametrize("numel", [0, 1, 7, 32, 33, 256, 257, 4096, 4097, 12345])
def test_a_message_has_its_size_and_ends_in_zeros(wire: WireFormat, numel: int) -> None:
    messages = sent(mixed(3, numel, 1), wire)
    blocks, rest = divmod(numel, 4096)
    kept = blocks * (4096 // wire.kept_of) + -(-rest // wire.kept_of)
    used = 2 * -(-numel // 4096) + -(-numel // 256) + kept + -(-kept // 2)
    assert messages.shape == (3, wire.message_bytes(numel)) == (3, -(-used // 16) * 16)
    assert not messages[:, used:].any()
    assert (received(messages, wire, numel) != 0).sum() <= 3 * kept
    zeros = sent(torch.zeros(2, numel), wire)
    assert not received(zeros, wire, numel).any()


def test_an_element_costs_less_than_half_a_bit_at_one_of_32() -> None:
    numel = 1 << 20
    assert parse_format("topk:32").message_bytes(numel) * 8 / numel == (2 + 16 + 128 + 64) * 8 / 4096 < 0.42


@of_all_formats
@settings(deadline=None, max_examples=15)
@given(
    numel=SIZES,
    where=st.floats(0, 1, exclude_max=True),
    bad=st.sampled_from((float("nan"), float("inf"), float("-inf"))),
    dtype=st.sampled_from(DTYPES),
)
def test_what_is_kept_of_a_block_with_inf_or_nan_arrives_as_nan(
    wire: WireFormat, numel: int, where: float, bad: float, dtype: torch.dtype
) -> None:
    values, place = torch.ones(1, numel, dtype=dtype), int(where * numel)
    values[0, place] = bad
    expected = new_messages(wire, 1, numel)
    sparse.encode(values, wire, expected)
    residual = torch.zeros(1, numel)
    assert torch.equal(sent(values, wire), expected)
    assert torch.equal(sent(values, wire, residual), expected)
    found = received(expected, wire, numel)[0]
    assert found[place].isnan()
    assert residual[0, place].isnan()
    block = place // wire.block
    outside = torch.arange(numel) // wire.block != block
    assert found[outside].isfinite().all()
    assert not found[~outside].nan_to_num().any()


@of_all_formats
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_feedback_delivers_what_was_asked_for(wire: WireFormat, dtype: torch.dtype) -> None:
    """After k messages, inputs - delivered = residual up to fp32 rounding, so that every element comes in the end."""
    for total, messages, residual in fed_back(wire, dtype, 4333):
        for row, own in enumerate(residual.double()):
            assert (own.abs() <= bound(total[row], messages[row], wire)[0]).all()


def test_with_feedback_every_element_is_sent_in_turn() -> None:
    """A constant gradient: 1024 elements of equal size come 32 at a time, so after 32 messages all have come once."""
    wire, residual = parse_format("topk:32"), torch.zeros(1, 1024)
    delivered = torch.zeros(1024)
    for _ in range(32):
        codecs.decode_add(sent(torch.ones(1, 1024), wire, residual), wire, delivered)
    assert (delivered > 0).all()


def test_scratch_survives_inference_mode() -> None:
    wire = parse_format("topk")
    values = mixed(1, 9000, 3, torch.bfloat16)
    with torch.inference_mode():
        first = sent(values, wire)
    assert torch.equal(first, sent(torch.nn.Parameter(values), wire))

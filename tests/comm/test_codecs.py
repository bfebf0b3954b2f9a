"""Block codecs on a CPU: the fast code is the reference bit for bit, and the stated error bounds hold."""

from fractions import Fraction

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from terrace.comm import codecs
from terrace.comm.codecs import cpu, reference
from terrace.comm.codecs.layout import GRIDS, message_parts
from terrace.plan.wire import WireFormat, parse_format
from tests.support.codec_cases import CODECS, DTYPES, fed_back, mixed, new_messages, received, same

FORMATS = [parse_format(f"{codec}:{block}") for codec in CODECS for block in (16, 128)]
WITH_SPARSE = [*FORMATS, parse_format("topk"), parse_format("topk:1024")]
SIZES = st.one_of(st.sampled_from((1, 2, 15, 16, 17, 97, 127, 128, 129, 256, 257)), st.integers(1, 1500))
fewer = settings(deadline=None, max_examples=25)


def sent(values: Tensor, wire: WireFormat) -> Tensor:
    """Return messages [rows, bytes] of values [rows, n]."""
    messages = new_messages(wire, *values.shape)
    codecs.encode(values, wire, messages)
    return messages


def bound(values: Tensor, messages: Tensor, wire: WireFormat) -> Tensor:
    """Return the error bound of the package's docstring, fp64, for fp32 values [rows, n]."""
    scales = messages[:, : message_parts(wire, values.shape[1]).codes].contiguous().view(torch.bfloat16).double()
    step = scales.repeat_interleave(wire.block, dim=1)[:, : values.shape[1]]
    x = values.double().abs()
    if wire.codec == "fp8":
        return torch.maximum(x / 16, step * 2.0**-10) + x * 2.0**-22
    capped = step == torch.tensor(GRIDS[wire.codec].max_scale_bits, dtype=torch.int32).view(torch.float32).double()
    half = torch.where(capped, step, step / 2) if wire.codec == "int8" else step / 2
    return half + x * 2.0**-22


@pytest.mark.parametrize("codec", CODECS)
def test_the_grids_are_what_they_say(codec: str) -> None:
    grid = GRIDS[codec]
    bits = torch.tensor(grid.reciprocal, dtype=torch.float32).view(torch.int32)
    above = float((bits + 1).view(torch.float32))
    assert float(bits.view(torch.float32)) == grid.reciprocal
    assert Fraction(grid.reciprocal) <= 1 / Fraction(grid.qmax) < Fraction(above)
    largest = torch.finfo(torch.bfloat16).max
    scale, more = torch.tensor([grid.max_scale_bits, grid.max_scale_bits + 0x10000], dtype=torch.int32).view(
        torch.float32
    )
    assert grid.max_scale_bits % 0x10000 == 0
    assert float(scale) * grid.qmax <= largest < float(more) * grid.qmax


@pytest.mark.parametrize("wire", FORMATS, ids=lambda wire: wire.name)
@fewer
@given(numel=SIZES, rows=st.integers(1, 4), seed=st.integers(0, 1 << 30))
def test_fast_equals_reference_for_every_dtype(wire: WireFormat, numel: int, rows: int, seed: int) -> None:
    for dtype in DTYPES:
        values = mixed(rows, numel, seed, dtype)
        messages, expected = sent(values, wire), new_messages(wire, rows, numel)
        reference.encode(values, wire, expected)
        assert torch.equal(messages, expected)
        for target in DTYPES:
            plain = torch.empty(rows, numel, dtype=target)
            reference.decode(messages, wire, plain)
            assert same(received(messages, wire, numel, target), plain)
        total = mixed(1, numel, seed + 1)[0].clamp(-1e30, 1e30).to(dtype if dtype == torch.float64 else torch.float32)
        expected_total = total.clone()
        codecs.decode_add(messages, wire, total)
        reference.decode_add(messages, wire, expected_total)
        assert same(total, expected_total)


@pytest.mark.parametrize("codec", CODECS)
def test_fast_equals_reference_over_several_chunks(codec: str) -> None:
    for rows, numel in ((1, 2 * cpu.CHUNK + 3 * 4096 + 77), (3, cpu.CHUNK // 2 + 5)):
        wire = parse_format(f"{codec}:128")
        values = mixed(rows, numel, 5, torch.bfloat16)
        residual = mixed(rows, numel, 6).clamp(-1, 1)
        expected_residual, expected = residual.clone(), new_messages(wire, rows, numel)
        messages = new_messages(wire, rows, numel)
        codecs.encode(values, wire, messages, residual)
        reference.encode(values, wire, expected, expected_residual)
        assert torch.equal(messages, expected)
        assert same(residual, expected_residual)
        assert same(received(messages, wire, numel), reference.decode_fp32(messages, wire, numel))


@pytest.mark.parametrize("wire", FORMATS, ids=lambda wire: wire.name)
@fewer
@given(
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=70),
    rows=st.integers(1, 2),
)
@example(values=[3.4028234663852886e38] * 17, rows=1)
@example(values=[1e-45, -1e-45, 0.0, -0.0, 2.0**-127], rows=1)
@example(values=[0.0], rows=1)
def test_an_element_loses_no_more_than_stated(wire: WireFormat, values: list[float], rows: int) -> None:
    x = torch.tensor([values] * rows, dtype=torch.float32)
    messages = sent(x, wire)
    decoded = received(messages, wire, x.shape[1])
    assert decoded.isfinite().all()
    assert received(messages, wire, x.shape[1], torch.bfloat16).isfinite().all()
    assert ((x.double() - decoded.double()).abs() <= bound(x, messages, wire)).all()


@pytest.mark.parametrize("wire", FORMATS, ids=lambda wire: wire.name)
@fewer
@given(numel=SIZES, seed=st.integers(0, 1 << 30))
def test_scales_follow_the_largest_of_their_block(wire: WireFormat, numel: int, seed: int) -> None:
    x = mixed(2, numel, seed).clamp(-1e37, 1e37)
    scales = sent(x, wire)[:, : message_parts(wire, numel).codes].contiguous().view(torch.bfloat16).double()
    padded = torch.nn.functional.pad(x, (0, -numel % wire.block)).double()
    ideal = padded.abs().view(2, -1, wire.block).amax(-1) / GRIDS[wire.codec].qmax
    assert (scales >= ideal * (1 - 2.0**-22)).all()
    assert (scales <= (ideal * (1 + 2.0**-7 + 2.0**-22)).clamp(min=2.0**-126)).all()


@pytest.mark.parametrize("wire", FORMATS, ids=lambda wire: wire.name)
@fewer
@given(numel=SIZES, seed=st.integers(0, 1 << 30))
def test_what_was_decoded_is_encoded_alike(wire: WireFormat, numel: int, seed: int) -> None:
    x = mixed(1, numel, seed)
    if wire.codec == "int8":  # a block keeps its scale if its largest code is 127: let the scale be a power of two
        x = (x / x.abs().amax().clamp(min=1e-30)).mul(100).round()
        x[:, :: wire.block] = 127.0
    messages = sent(x, wire)
    assert torch.equal(sent(received(messages, wire, numel), wire), messages)


@pytest.mark.parametrize("wire", FORMATS, ids=lambda wire: wire.name)
@pytest.mark.parametrize("numel", [0, 1, 7, 16, 17, 128, 129, 1009])
def test_a_message_has_its_size_and_ends_in_zeros(wire: WireFormat, numel: int) -> None:
    messages = sent(mixed(3, numel, 1), wire)
    parts = message_parts(wire, numel)
    assert messages.shape == (3, wire.message_bytes(numel)) == (3, parts.total)
    assert parts.padding == 2 * -(-numel // wire.block) + -(-numel * wire.bits // 8)
    assert not messages[:, parts.padding :].any()
    assert received(messages, wire, numel).shape == (3, numel)
    zeros = sent(torch.zeros(2, numel), wire)
    assert not received(zeros, wire, numel).any()
    total = torch.ones(numel)
    codecs.decode_add(zeros[:0], wire, total)
    assert (total == 1).all()


@pytest.mark.parametrize("wire", WITH_SPARSE, ids=lambda wire: wire.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_may_have_a_stride(wire: WireFormat, dtype: torch.dtype) -> None:
    rows, numel = 3, 300 if wire.kept_of == 0 else 5000
    wide = mixed(rows, numel + 50, 2, dtype)
    frame = torch.zeros(rows, wire.message_bytes(numel) + 32, dtype=torch.uint8)
    codecs.encode(wide[:, 7 : 7 + numel], wire, frame[:, 16:-16])
    assert torch.equal(frame[:, 16:-16], sent(wide[:, 7 : 7 + numel].contiguous(), wire))
    assert not frame[:, :16].any()
    assert not frame[:, -16:].any()
    target = torch.zeros(rows, numel + 9, dtype=dtype)
    codecs.decode(frame[:, 16:-16], wire, target[:, 5:-4])
    assert same(target[:, 5:-4], received(frame[:, 16:-16], wire, numel, dtype))
    assert not target[:, :5].any()
    assert not target[:, -4:].any()


@pytest.mark.parametrize("codec", CODECS)
@settings(deadline=None, max_examples=15)
@given(
    numel=SIZES,
    where=st.floats(0, 1, exclude_max=True),
    bad=st.sampled_from((float("nan"), float("inf"), float("-inf"))),
    dtype=st.sampled_from(DTYPES),
)
def test_a_block_with_inf_or_nan_decodes_to_nan_and_others_are_untouched(
    codec: str, numel: int, where: float, bad: float, dtype: torch.dtype
) -> None:
    wire = parse_format(codec)
    values = torch.ones(2, numel, dtype=dtype)
    values[1, int(where * numel)] = bad
    block = int(where * numel) // wire.block
    expected = torch.ones(2, numel).isnan()
    expected[1, block * wire.block : (block + 1) * wire.block] = True
    found = []
    for encode in (codecs.encode, reference.encode):
        poisoned, residual = new_messages(wire, 2, numel), torch.zeros(2, numel)
        encode(values, wire, poisoned)
        assert torch.equal(received(poisoned, wire, numel).isnan(), expected)
        encode(values, wire, poisoned, residual)
        assert torch.equal(residual.isnan(), expected)
        found.append(poisoned)
    assert torch.equal(*found)


def test_fp64_beyond_fp32_decodes_to_nan() -> None:
    wire, message = parse_format("int8"), new_messages(parse_format("int8"), 1, 1)
    codecs.encode(torch.tensor([[1e300]], dtype=torch.float64), wire, message)
    assert received(message, wire, 1).isnan().all()


@pytest.mark.parametrize("wire", FORMATS, ids=lambda wire: wire.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_feedback_delivers_what_was_asked_for(wire: WireFormat, dtype: torch.dtype) -> None:
    """After k messages, inputs - delivered = residual up to fp32 rounding, and a residual is at most a step."""
    for total, messages, residual in fed_back(wire, dtype, 333):
        assert (residual.double().abs() <= bound(total, messages, wire)).all()


def test_error_sums_measure_a_sample() -> None:
    x = mixed(1, 1000, 9)[0].clamp(-1, 1)
    for wire in WITH_SPARSE:
        error, total = codecs.error_sums(x, wire).tolist()
        lost = x.double() - received(sent(x[None], wire), wire, 1000)[0].double()
        assert error == pytest.approx(float(lost.square().sum()))
        assert total == pytest.approx(float(x.double().square().sum()))


def test_backends_say_what_they_are() -> None:
    assert "CPU" in codecs.backend(torch.device("cpu"))
    assert "triton" in codecs.backend(torch.device("cuda"))


def test_scratch_survives_inference_mode_and_parameters() -> None:
    wire = parse_format("int8")
    with torch.inference_mode():
        first = sent(torch.ones(1, 333), wire)
    second = sent(torch.nn.Parameter(torch.ones(1, 333)), wire)
    assert torch.equal(first, second)

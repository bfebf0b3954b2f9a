"""The lossless codec: every bit of every bf16 comes back, whatever its exponents are, or the message says that it does
not.
"""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from terrace.base.errors import PlanError
from terrace.comm import codecs
from terrace.comm.codecs import packed
from terrace.plan.wire import FORMATS, WireFormat, parse_format
from tests.support.codec_cases import new_messages

WIRE = FORMATS["packed"]
SIZES = st.one_of(st.sampled_from((1, 2, 63, 64, 65, 127, 128, 129, 256, 257)), st.integers(1, 1200))


def words(rows: int, numel: int, seed: int, low: int, high: int, zeros: float) -> Tensor:
    """bf16 of random signs and mantissas, exponents low .. high, and some zeros of both signs."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(low, high + 1, (rows, numel), generator=generator)
    rests = torch.randint(0, 256, (rows, numel), generator=generator)
    rests, exponents = torch.where(
        torch.rand(rows, numel, generator=generator) < zeros,
        torch.stack([rests & 0x80, torch.zeros_like(exponents)]),
        torch.stack([rests, exponents]),
    )
    found = (rests & 0x7F) | exponents << 7 | (rests & 0x80) << 8
    return torch.where(found > 0x7FFF, found - 0x10000, found).to(torch.int16).view(torch.bfloat16)


def returned(values: Tensor, wire: WireFormat = WIRE) -> tuple[Tensor | None, Tensor]:
    """Decoded values, None if they do not fit, and the messages."""
    messages = new_messages(wire, *values.shape)
    codecs.encode(values, wire, messages)
    if packed.too_wide(messages, wire, values.shape[1]):
        return None, messages
    decoded = torch.full_like(values, 7.0)
    codecs.decode(messages, wire, decoded)
    return decoded, messages


def num_listed(row: Tensor, width: int = 128) -> int:
    """Exponents outside the window of their block, and zeros beside them, by the definition."""
    exponents = ((row.view(torch.int16).to(torch.int32) >> 7) & 0xFF).tolist()
    total = 0
    for start in range(0, len(exponents), width):
        block = exponents[start : start + width]
        below = [each for each in block if each <= max(block) - 15]
        total += len(below) if any(below) else 0
    return total


@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(1, 4),
    numel=SIZES,
    seed=st.integers(0, 1 << 30),
    window=st.tuples(st.integers(0, 255), st.integers(0, 255)),
    zeros=st.sampled_from((0.0, 0.01, 0.5, 1.0)),
    block=st.sampled_from((128, 128, 64, 16)),
)
@example(rows=2, numel=129, seed=0, window=(255, 255), zeros=0.5, block=128)  # infinities and nans beside zeros
@example(rows=2, numel=300, seed=0, window=(0, 0), zeros=0.0, block=128)  # subnormals alone
@example(rows=3, numel=640, seed=1, window=(240, 255), zeros=0.0, block=32)  # one exponent of 16 at the base
def test_every_bit_comes_back_or_the_message_says_so(
    rows: int, numel: int, seed: int, window: tuple[int, int], zeros: float, block: int
) -> None:
    values = words(rows, numel, seed, min(window), max(window), zeros)
    decoded, messages = returned(values, parse_format(f"packed:{block}"))
    blocks = math.ceil(numel / block)
    room = messages.shape[1] - 2 * blocks - math.ceil(numel / 2) - numel
    assert (decoded is None) == any(num_listed(row, block) > room for row in values)
    assert room >= math.ceil(numel / 64)
    if decoded is not None:
        assert torch.equal(decoded.view(torch.int16), values.view(torch.int16))


def test_all_bf16_come_back_in_one_message() -> None:
    # Sorted by exponent, a block holds one or two of them.
    every = torch.arange(-0x8000, 0x8000).to(torch.int16)
    order = ((every.to(torch.int32) >> 7) & 0xFF).argsort(stable=True)
    values = every[order].view(torch.bfloat16)[None]
    decoded, _ = returned(values)
    assert decoded is not None
    assert torch.equal(decoded.view(torch.int16), values.view(torch.int16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wider_values_are_those_of_bf16(dtype: torch.dtype) -> None:
    values = torch.randn(3, 1000, generator=torch.Generator().manual_seed(3), dtype=dtype)
    decoded, messages = returned(values)
    assert decoded is not None
    assert torch.equal(decoded, values.bfloat16().to(dtype))
    total = torch.ones(1000, dtype=dtype)
    codecs.decode_add(messages, WIRE, total)
    rounded = values.bfloat16()
    assert torch.equal(total, torch.ones(1000, dtype=dtype) + rounded[0] + rounded[1] + rounded[2])


@pytest.mark.parametrize("rows", [1, 3])
def test_chunks_of_a_large_message_are_as_one(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(rows, 40_077, generator=torch.Generator().manual_seed(4)).bfloat16()
    values[:, ::97] = 0.0
    values[:, 5000:5005] *= 2.0**-30
    whole, messages = returned(values)
    monkeypatch.setattr(packed, "CHUNK", 1024)
    decoded, again = returned(values)
    assert whole is not None
    assert decoded is not None
    assert torch.equal(decoded.view(torch.int16), values.view(torch.int16))
    assert torch.equal(whole.view(torch.int16), values.view(torch.int16))
    assert torch.equal(messages, again)


def test_one_row_that_does_not_fit_leaves_the_others_alone() -> None:
    values = torch.randn(3, 256, generator=torch.Generator().manual_seed(5)).bfloat16()
    values[1, ::2] *= 2.0**-60
    _, messages = returned(values)
    fits = [not packed.too_wide(messages[row : row + 1], WIRE, 256) for row in range(3)]
    assert fits == [True, False, True]
    packed.mark(messages, WIRE, 256)
    assert all(packed.too_wide(messages[row : row + 1], WIRE, 256) for row in range(3))


def test_trained_values_take_no_more_than_a_normal_number_does() -> None:
    numel = 1 << 16
    values = torch.randn(1, numel, generator=torch.Generator().manual_seed(6)).bfloat16()
    assert WIRE.message_bytes(numel) / (2 * numel) == 12.25 / 16
    assert num_listed(values[0]) < numel / 64 / 8  # room for eight times as many


@pytest.mark.parametrize("text", ["packed:256", "packed:24", "packed+feedback", "packed:32+feedback"])
def test_neither_feedback_nor_blocks_of_any_size(text: str) -> None:
    with pytest.raises(PlanError, match="packed is lossless"):
        parse_format(text)


@pytest.mark.parametrize("position", range(4))
def test_a_sum_is_added_in_the_order_of_ranks(position: int) -> None:
    # Of such terms another order has another sum in fp32.
    terms = torch.randn(4, 500, generator=torch.Generator().manual_seed(7)).mul_(
        torch.tensor([[1e4], [1.0], [1e4], [1e-2]])
    )
    terms[2] = -terms[0]
    terms = terms.bfloat16()
    _, messages = returned(torch.cat([terms[:position], terms[position + 1 :]]))
    total = torch.empty(500)
    packed.decode_sum(messages, terms[position], position, WIRE, total)
    first, *others = terms.float()
    for other in others:
        first = first + other
    assert torch.equal(total, first)


@pytest.mark.parametrize("over", [0, 1])
def test_a_message_has_room_for_as_many_as_it_says(over: int) -> None:
    numel = 1024
    room = WIRE.message_bytes(numel) - 2 * numel // WIRE.block - numel // 2 - numel
    values = torch.ones(2, numel).bfloat16()
    values[1, torch.arange(room + over) * 37] = 2.0**-20
    decoded, _ = returned(values)
    assert (decoded is None) == bool(over)
    assert decoded is None or torch.equal(decoded, values)

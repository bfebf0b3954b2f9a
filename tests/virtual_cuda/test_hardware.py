"""Devices and systems that differ: what code asks of them, and what it refuses on them, on virtual devices."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import terrace.accelerator as accelerator
from terrace.base.errors import ConfigError, PlanError
from terrace.launch.device import take_device
from terrace.model.attention_plans import AttentionPlans
from terrace.model.fused_attention import BlockMasked
from terrace.plan.presets import preset
from terrace.probe.machine import torch_gpus
from terrace.probe.timing import Stopwatch
from terrace.runtime.kept.ring import make_slots
from terrace.runtime.random_state import restored
from terrace.runtime.scaling import Scaling
from terrace.train import rank as rank_of_run
from tests.support.toys import cluster_of
from tests.virtual_cuda.machine import MI250X, MI300X, Hardware
from tests.virtual_cuda.rank import DEVICE
from tests.virtual_cuda.rehearsal import rehearsed

CPU = torch.device("cpu")


def test_products_in_8_bits_have_the_formats_of_the_vendor() -> None:
    plan = replace(preset("ddp", cluster_of(2)), products="fp8", compute="bf16")
    with rehearsed():
        assert Scaling.of(plan, DEVICE) == Scaling(False, torch.float8_e4m3fn, torch.float8_e5m2)
    with rehearsed(hardware=MI300X):
        assert Scaling.of(plan, DEVICE) == Scaling(False, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
        assert accelerator.compute_capability(DEVICE) == (0, 0)
    for hardware, said in (
        (MI250X, r"virtual AMD device \(gfx90a\) has no 8-bit floats"),
        (Hardware((8, 0)), r"has compute capability 8\.0, and products of 8-bit floats need 8\.9"),
    ):
        with rehearsed(hardware=hardware), pytest.raises(PlanError, match=said):
            Scaling.of(plan, DEVICE)


def test_products_in_8_bits_that_cuda_refuses_are_refused() -> None:
    one = torch.ones((), device="cpu")
    for left, right, recipe, out in (
        (torch.float8_e5m2, torch.float8_e5m2, F.ScalingType.TensorWise, torch.bfloat16),
        (torch.float8_e4m3fn, torch.float8_e4m3fn, F.ScalingType.RowWise, torch.float32),
    ):
        with rehearsed():
            pair = [torch.ones(16, 32, device=DEVICE).to(dtype) for dtype in (left, right)]
            scales = [torch.ones(size, device=DEVICE) for size in ((16, 1), (1, 16))]
            given = scales if recipe is F.ScalingType.RowWise else [one.to(DEVICE)] * 2
            with pytest.raises(AssertionError, match=r"two matrices of e5m2|in bf16 on every device"):
                F.scaled_mm(pair[0], pair[1].t(), given[0], recipe, given[1], recipe, output_dtype=out)


def test_a_rank_takes_a_device_and_says_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    with rehearsed():
        assert take_device(3) == accelerator.current_device() == torch.device("cuda", 3)
        assert [gpu.name for gpu in torch_gpus()] == ["virtual CUDA device"] * accelerator.num_devices()
        assert accelerator.num_cores(DEVICE) == 132
        assert accelerator.first_device().type == "cuda"
    assert accelerator.first_device() == CPU


def test_a_ring_is_refused_where_the_system_locks_no_memory() -> None:
    with rehearsed(hardware=Hardware(lockable_bytes=1 << 16)):
        assert len(make_slots(2, 1 << 14, DEVICE)) == 2
        with pytest.raises(ConfigError, match="allow more with ulimit -l, or lower"):
            make_slots(2, 1 << 16, DEVICE)


def test_a_pace_is_refused_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_of_run, "pace", lambda: 1e9)
    monkeypatch.setattr(rank_of_run, "rank_device", lambda: DEVICE)
    job: Any = SimpleNamespace(run=None)
    with rehearsed(), pytest.raises(ConfigError, match="TERRACE_PACE paces messages of CPU ranks only"):
        rank_of_run._engine(job, 0, None, None)  # type: ignore[arg-type]


def test_random_numbers_of_a_device_are_drawn_again() -> None:
    with rehearsed():
        state = accelerator.random_state(DEVICE)
        first = torch.rand(4, device=DEVICE).tolist()
        between = torch.rand(4, device=DEVICE).tolist()
        with restored(state, DEVICE):
            assert torch.rand(4, device=DEVICE).tolist() == first
        assert torch.rand(4, device=DEVICE).tolist() not in (first, between)


def test_calls_are_timed_by_events_of_the_device() -> None:
    with rehearsed() as rehearsal:
        x, calls = torch.zeros(8, device=DEVICE), list[int]()

        def work() -> None:
            calls.append(1)
            x.add_(1.0)

        seconds = Stopwatch(1, DEVICE).seconds(work, 0.01)
        assert 0.0 < seconds < 0.01
        assert float(x[0]) == len(calls)
        assert not rehearsal.faults


@pytest.mark.parametrize("cap", [0.0, 2.0])
@pytest.mark.parametrize("window", [0, 5])
def test_rows_of_other_documents_and_capped_scores_have_the_numbers_of_a_cpu(cap: float, window: int) -> None:
    """FlexAttention by its definition, with the blocks, rows and caps that this project passes to it."""
    sizes = (2, 4, 140, 16), (2, 2, 140, 16), (2, 2, 140, 16)
    numbers = torch.Generator().manual_seed(0)
    parts = [torch.randn(*size, generator=numbers) for size in sizes]
    places = torch.arange(140)
    positions = torch.stack([torch.where(places < cut, places, places - cut) for cut in (3, 131)])

    def attended(device: torch.device) -> list[Tensor]:
        own = [part.clone().to(device).requires_grad_() for part in parts]
        if device == CPU:
            found = _by_definition(positions, window, cap, own)
        else:
            plans = AttentionPlans(window, is_grouped=True, cap=cap, choice="flex")
            plan: Any = plans.plan(positions.to(device), own[0])
            assert isinstance(plan.plan, BlockMasked)
            found = plan.attend(*own)
        torch.autograd.backward(found.square().sum())
        return [each.detach().cpu() for each in (found, *(part.grad for part in own if part.grad is not None))]

    wanted = attended(CPU)
    with rehearsed() as rehearsal:
        found = attended(DEVICE)
        assert not rehearsal.faults, rehearsal.findings.told()
    for own, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)


def _by_definition(positions: Tensor, window: int, cap: float, parts: list[Tensor]) -> Tensor:
    query, key, value = (parts[0], *(part.repeat_interleave(2, dim=1) for part in parts[1:]))
    scores = query @ key.transpose(-1, -2) / 4.0
    scores = cap * (scores / cap).tanh() if cap else scores
    places = torch.arange(positions.shape[1])
    begins = places - positions  # of a token's document
    behind = places.unsqueeze(1) - places
    seen = (behind >= 0) & (begins.unsqueeze(2) == begins.unsqueeze(1)) & ((behind < window) if window else True)
    return scores.masked_fill(~seen.unsqueeze(1), -torch.inf).softmax(-1) @ value

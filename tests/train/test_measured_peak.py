"""The measured peak behind MFU: bursts of other programs, a wrong first measurement, and how it is told."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from terrace.cli.step_progress import step_words
from terrace.train import calibrate, gauges
from terrace.train.metrics import StepRecord
from terrace.train.utilisation import StepFlops, Utilisation


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.mark.parametrize(("busy_s", "wanted"), [((0.0, 0.0), 1e-3), ((0.05, 0.15), 1e-3), ((0.0, 10.0), 70e-3)])
def test_a_burst_of_another_program_does_not_count(busy_s: tuple[float, float], wanted: float) -> None:
    """A call takes 1 ms, and 70 ms while the machine is busy."""
    clock = Clock()

    def work() -> None:
        clock.now += 70e-3 if busy_s[0] <= clock.now < busy_s[1] else 1e-3

    on_a_cpu: Any = SimpleNamespace(device=SimpleNamespace(type="cpu"))
    with patch.object(calibrate, "time", clock):
        assert calibrate._window_seconds(on_a_cpu, work) == pytest.approx(wanted)
    assert clock.now < calibrate._LONGEST * calibrate._BUDGET_S + 0.2


def test_a_budget_that_one_call_exceeds_ends() -> None:
    clock = Clock()

    def work() -> None:
        clock.now += 1.0

    with patch.object(calibrate, "time", clock):
        assert calibrate._window_seconds(SimpleNamespace(device=SimpleNamespace(type="cpu")), work) == 1.0  # type: ignore[arg-type]
    assert clock.now == calibrate._FEWEST


@pytest.mark.parametrize(
    ("step_s", "again", "peak"), [(1.9, 5e9, 1e9), (0.1, 5e9, 5e9), (0.1, 5e8, 1e9), (2.1, 5e9, 5e9)]
)
def test_the_peak_is_measured_again_where_the_second_step_disagrees(step_s: float, again: float, peak: float) -> None:
    told = list[str]()
    made: Any = object.__new__(gauges.Gauges)
    flops = StepFlops(products=1, attention=1, again=0, masked=0, masked_again=0)
    made._used = Utilisation(flops=flops, num_devices=1, peak_flops_per_s=1e9, origin="", is_measured_here=True)
    made._predicted_s, made._note, made._measure = 1.0, told.append, lambda: again
    made._check_peak(step_s)
    assert made._used.peak_flops_per_s == peak
    assert [f"1e+09 -> {peak:.3g} FLOP/s" in line for line in told] == [True] * (not 0.5 <= step_s <= 2)


def test_more_than_the_peak_is_told_as_wrong() -> None:
    record = StepRecord(
        time_s={},
        step=2,
        loss=1.0,
        grad_norm=1.0,
        learning_rate=1e-3,
        num_tokens=64,
        step_s=1.0,
        tokens_per_s=1.0,
        mfu=71.44,
    )
    assert "MFU 7144.0 % (the peak is wrong)" in step_words(record, 10, 1.0)
    assert "wrong" not in step_words(replace(record, mfu=0.5), 10, 1.0)

"""The mean step of a run, which is compared with the predicted one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from terrace.train.metrics import StepRecord, Summary
from tests.support.records import step_record


def record(step: int, seconds: float) -> StepRecord:
    return step_record(step, step_s=seconds, time_s={"wait outer": seconds})


@given(steps=st.integers(1, 400), every=st.integers(1, 60))
def test_times_are_of_whole_cycles(steps: int, every: int) -> None:
    """Each step takes a second more than the one before it in its cycle, so a part of a cycle has another mean."""
    summary, warm_up = Summary(steps, every), min(steps // 4, 10)
    for step in range(steps):
        summary.add(record(step + 1, float(step % every)))
    assert summary.num_warm_up >= warm_up
    if steps - warm_up >= every:
        assert summary.mean_time_s["wait outer"] == pytest.approx((every - 1) / 2)
        assert summary.num_warm_up - warm_up < every, "no cycle is lost"
    else:
        assert summary.num_warm_up == warm_up

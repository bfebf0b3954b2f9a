"""The controller that users read first: it learns, and as one process learns."""

import pytest

from examples.grpo_by_hand import controller, placed
from terrace.rl.calls.inline import InlineRuntime
from terrace.rl.calls.local import LocalRuntime

STEPS, LR = 4, 1e-3


def test_the_controller_by_hand_learns_on_two_pools_as_in_one_process() -> None:
    with LocalRuntime(timeout_s=120.0) as runtime:
        split = list(controller(placed(runtime, 2), STEPS, LR))
    with InlineRuntime() as inline:
        alone = list(controller(placed(inline, 1), STEPS, LR))
    # Exact before the first update; then weights differ by rounding, which may once in a while turn a draw.
    assert split[0] == alone[0]
    assert split == pytest.approx(alone, abs=0.02)
    assert split[-1] > 4 * split[0]

"""By day an evaluation has a few held-out prompts: drawing 512 responses took half of the time of these runs."""

import pytest

from terrace.rl.calculator_task import CalculatorPrompts
from terrace.rl.sort_task import SortPrompts


@pytest.fixture(autouse=True)
def _few_held_out(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("nightly") is None:
        for task in (SortPrompts, CalculatorPrompts):
            monkeypatch.setattr(task, "num_held_out", 16)

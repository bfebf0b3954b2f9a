"""GRPO learns the task `sort` from its supervised start; rewards dealt out anew teach nothing: minutes on a core."""

from pathlib import Path

import pytest

from bench.rl_learning import BARS, learned, verdict


@pytest.mark.nightly
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", ["grpo", "shuffled"])
def test_the_task_is_learned_by_its_rewards_alone(name: str, tmp_path: Path) -> None:
    passed, words = verdict(name, BARS[name], learned(name, BARS[name], 0, tmp_path))
    assert passed, words

"""Corners of a run: its end after a resume, checkpoints of steps without updates, settings that exclude others."""

from pathlib import Path
from typing import Any

import pytest

from terrace.base.errors import ConfigError, ModelError, TrainingError
from terrace.rl.calls.inline import InlineRuntime
from terrace.rl.commands import explain as rl_explain
from terrace.rl.commands import run as rl_run
from terrace.rl.making import started
from terrace.rl.run import STREAM
from terrace.rl.stream.saved import write_state
from tests.support.rl_runs import ALONE, FOUR, config_of, inputs_of, ran, resumed, totals_of

DEGENERATE: dict[str, Any] = {
    **ALONE,
    "run": {"start_steps": 0, "checkpoint_every": 1, "keep_checkpoints": 1, "evaluate_every": 0, "max_lag": 1},
    "algorithm": {"name": "dapo", "kl_coefficient": 0.0},
}


def test_a_run_of_one_step_without_a_hand_over_has_a_summary() -> None:
    said = rl_run._summary(totals_of([{"time/step": 1.0}]), Path("run"))
    assert "hand-over" not in said
    both = rl_run._summary(
        totals_of([{"time/step": 1.0}, {"time/step": 1.0, "reshard/bytes_planned": 8.0, "reshard/bytes_sent": 8.0}]),
        Path("run"),
    )
    assert "predicted 8 B, measured 8 B" in both


def test_a_step_without_updates_leaves_the_checkpoint_before_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All groups of DAPO are degenerate, so checkpoints are of as many updates; one is interrupted."""
    config, paths = config_of(DEGENERATE), list[Path]()

    def interrupted(path: Path, *state: Any) -> Any:
        facts = write_state(path, *state)
        paths.append(path)
        if len(paths) == 3:  # the first is of before all steps
            raise TrainingError("killed")
        return facts

    with monkeypatch.context() as patch:
        patch.setattr("terrace.rl.run.write_state", interrupted)
        with pytest.raises(TrainingError, match="killed"):
            ran(InlineRuntime(), config, tmp_path)
    with InlineRuntime() as runtime:
        run = started(inputs_of(config), runtime, tmp_path, lambda text: None)
        assert resumed(run, config, tmp_path) == 1
        assert [step for step, _ in run.steps()] == [2, 3]
    assert len(list((tmp_path / STREAM).iterdir())) == 1


def test_a_search_of_placements_takes_no_placement() -> None:
    pools = [{"ranks": 2, "roles": ["actor"]}, {"ranks": 2, "roles": ["reference"]}]
    with pytest.raises(ConfigError, match=r"leave out \[\[pool\]\] and \[plans\], or leave out --place"):
        rl_explain.placed(config_of(FOUR, {"plan": {"micro_batch": 2}, "pool": pools}))


@pytest.mark.parametrize("name", ["timeout_s", "reward_timeout_s"])
def test_a_deadline_that_no_clock_has_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"run.{name} = inf must be at most"):
        config_of(ALONE, {"run": {name: float("inf")}})


def test_a_task_with_weights_that_are_not_there_is_refused_before_it_starts(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no weights"):
        rl_run.inputs_of(config_of(ALONE, {"weights": str(tmp_path)}))


@pytest.mark.parametrize("more", [{"seed": 1 << 63}, {"responses": 1 << 20, "prompts": 1, "mini_batch": 1024}])
def test_numbers_beyond_those_of_draws_are_refused(more: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="must be below 2"):
        config_of(ALONE, {"run": more})

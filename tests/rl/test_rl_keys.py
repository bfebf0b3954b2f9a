"""`terrace keys` for runs of feedback: their sections, and the defaults of algorithms, tasks and loaded weights."""

import json

import pytest

from terrace.cli.keys import dotted, keys_of
from terrace.cli.main import main
from terrace.rl.rates import USUAL
from terrace.rl.resolve import resolve as resolve_rl
from terrace.train.rates import usual_rate


def test_defaults_of_feedback_are_those_of_its_runs() -> None:
    """Those of a task, of an algorithm's paper and of loaded weights are named beside those of the keys."""
    sort, safe = resolve_rl("sort", None, {}, {}), {"name": "safe-rlhf", "cost_threshold": 0.5}
    more = {"algorithm": safe, "cost": {"function": "terrace.rl.sort_task:length_cost"}}
    algorithm = resolve_rl("sort", None, {}, more).algorithm
    for key in keys_of("run"):
        value = json.dumps(getattr(sort.run, key.name))
        assert value == key.default or f"{value} of --task sort" in key.others or key.name == "task", key
    for key in keys_of("algorithm"):
        value = getattr(algorithm, key.name)
        shown = "none" if value is None else json.dumps(value)
        assert shown == key.default or f"{shown} for " in key.others or key.name in safe, key
    (rate,) = (key for key in keys_of("optimizer") if key.name == "lr")
    assert f"{usual_rate('adamw', USUAL['optimizer.lr']):g} in terrace rl" in rate.others
    assert f"{sort.optimizer.lr:g} of --task sort" in rate.others


@pytest.mark.parametrize(
    ("asked", "lines"),
    [
        ("lr", ["optimizer.lr = ", "plan.outer.lr = ", "run.critic_lr = ", "run.start_lr = "]),
        ("clip", ["optimizer.clip = ", "algorithm.clip_low = ", "algorithm.value_clip = "]),
        ("critics", ["run.critic_lr = "]),
        ("run", ["[run]  of terrace rl", "  responses = 8", "  steps = 40"]),
        ("reward", ["[[reward]]  of terrace rl", "  function = "]),
        ("pool", ["[[pool]]  of terrace rl", "  roles = required (list)"]),
        ("plans", ["[plans]  of terrace rl: plans.ROLE has the keys of [plan]"]),
        ("plans.critic.prefetch", ["plans.critic.prefetch = 1 (integer)"]),
        ("plans.critic", ["plans.critic.prefetch = 1 (integer)", "plans.critic.compute = "]),
    ],
)
def test_its_sections_and_keys_are_listed(
    asked: str, lines: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["keys", asked]) == 0
    found = capsys.readouterr().out.splitlines()
    for line in lines:
        assert any(each.startswith(line) for each in found), line


def test_its_command_takes_its_keys() -> None:
    assert "run.responses" in dotted("rl")
    assert "optimizer.lr" in dotted("rl")
    assert "train.steps" not in dotted("rl")

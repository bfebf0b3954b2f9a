"""Whole runs in one process: their numbers, their checkpoints, and runs that go on with the same bits."""

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from terrace.base.errors import CheckpointError, ConfigError, PlanError
from terrace.base.schema import merge
from terrace.rl.algorithms.metrics import Metrics
from terrace.rl.calls.inline import InlineRuntime
from terrace.rl.config import to_toml_table
from terrace.rl.keys import RewardKeys, RunKeys
from terrace.rl.making import started
from terrace.rl.placing import ACTOR
from terrace.rl.resolve import parse, resolve
from terrace.rl.run import RunInputs, checkpoint_of
from terrace.rl.sort_task import END, SortPrompts, SortTokenizer
from terrace.rl.workers import policy

SMALL: dict[str, Any] = {
    "cluster": {"tiers": {name: {"size": 1} for name in ("package", "node", "system")}},
    "plan": {"mapping": {"system": {"pipeline": 1}}, "micro_batch": 16},
    "model": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2},
    "run": {"rows": 1, "steps": 3, "prompts": 4, "responses": 8, "mini_batch": 16, "start_steps": 2, "start_batch": 16},
}
GRPO = {"algorithm": {"kl_coefficient": 0.1, "kl_target": 0.01, "kl_horizon": 500.0}}
SAFE = {
    "algorithm": {"name": "safe-rlhf", "cost_threshold": 0.3, "kl_coefficient": 0.01},
    "cost": {"function": "terrace.rl.sort_task:length_cost"},
}
PPO = {"algorithm": {"name": "ppo"}}
REWARD = [{"function": "terrace.rl.sort_task:reward"}]


def inputs_of(*overrides: Mapping[str, Any]) -> RunInputs:
    table = SMALL
    for each in overrides:
        table = merge(table, each)
    table["plan"]["schedule"] = None
    config = resolve("sort", None, {}, table)
    task = SortPrompts(config.run.seed)
    return RunInputs(
        config=config, prompts=task, tokenizer=SortTokenizer(), stops=frozenset({END}), examples=task.examples
    )


def ran(folder: Path, *overrides: Mapping[str, Any]) -> list[Metrics]:
    inputs = inputs_of(*overrides)
    config = inputs.config
    with InlineRuntime() as runtime:
        run = started(inputs, runtime, folder, lambda text: None)
        first = run.resume(checkpoint_of(inputs, folder)[0])
        steps = list(run.steps())
    assert [step for step, _ in steps] == list(range(first + 1, config.run.steps + 1))
    return [found for _, found in steps]


def same(found: Metrics) -> Metrics:
    """Numbers that do not depend on the time of day."""
    return {name: value for name, value in found.items() if not name.startswith(("time/", "perf/", "sync/bubble"))}


@pytest.mark.parametrize("given", [GRPO, SAFE, PPO], ids=["grpo", "safe-rlhf", "ppo"])
def test_a_run_that_goes_on_has_the_same_bits(tmp_path: Path, given: Mapping[str, Any]) -> None:
    whole = ran(tmp_path / "whole", given)
    first = ran(tmp_path / "parts", given, {"run": {"steps": 2}})
    rest = ran(tmp_path / "parts", given)
    assert [same(each) for each in (*first[:1], *rest)] == [same(whole[0]), same(whole[2])]
    names = {"reward/mean", "rollout/logprob_diff_max", "actor/pg_clipfrac", "actor/entropy", "actor/kl", "time/step"}
    names |= {"time/generate", "time/reshard", "time/ref", "time/update", "reshard/bytes_sent", "perf/tokens_per_s"}
    assert names <= whole[0].keys()
    assert whole[0]["rollout/logprob_diff_max"] < 1e-4
    assert "val/reward" in whole[2]
    if given is GRPO:
        assert whole[0]["actor/kl_coef"] == 0.1 != whole[2]["actor/kl_coef"]
    else:
        assert {"critic/vf_loss", "critic/vf_explained_var", "critic/values/mean", "time/values"} <= whole[0].keys()
    if given is SAFE:
        assert {"cost_critic/vf_loss", "safe/lambda", "safe/cost"} <= whole[0].keys()


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    ran(tmp_path, {"run": {"steps": 1, "evaluate_every": 0}})
    assert (tmp_path / ACTOR).is_dir()
    others: dict[str, dict[str, Any]] = {
        "run.seed": {"run": {"seed": 1}},
        "run.start_lr": {"run": {"start_lr": 0.5}},
        "run.warmup_steps": {"run": {"warmup_steps": 3}},
        "optimizer.lr": {"optimizer": {"lr": 0.5}},
        "algorithm.clip_low": {"algorithm": {"clip_low": 0.1}},
        r"reward\[0\].function": {"reward": [{"function": "terrace.rl.sort_task:length_cost"}]},
        r"reward\[1\].function": {"reward": [*REWARD, {"function": "terrace.rl.sort_task:length_cost"}]},
        r"reward\[0\].weight": {"reward": [{**REWARD[0], "weight": 2.0}]},
        # With the rates of the run that has none loaded.
        "weights": {
            "weights": "elsewhere",
            "optimizer": {"lr": 1e-4},
            "run": {"high_lr": True, "start_lr": 1e-3},
        },
    }
    for name, other in others.items():
        with pytest.raises(
            CheckpointError, match=f"was made with {name} = .*, so the run would not be the same: restore "
        ):
            checkpoint_of(inputs_of(other), tmp_path)
    with pytest.raises(CheckpointError, match=r"was made with run.seed = 0, now it is 1"):
        ran(tmp_path, {"run": {"seed": 1}})
    assert (
        checkpoint_of(inputs_of({"run": {"steps": 9, "evaluate_every": 1, "reward_timeout_s": 9.0}}), tmp_path)[0]
        is not None
    )
    # Without checkpoints the same folder is a new run, whose supervised start is there already.
    shutil.rmtree(tmp_path / ACTOR)
    assert len(ran(tmp_path, {"run": {"steps": 1, "evaluate_every": 0}})) == 1


def test_an_actor_that_was_not_saved_leaves_the_critics_of_its_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> str:
        raise CheckpointError("no space is left")

    given = merge(PPO, {"run": {"keep_checkpoints": 1, "evaluate_every": 0, "steps": 2}})
    ran(tmp_path, given, {"run": {"steps": 1}})
    with monkeypatch.context() as patch:
        patch.setattr(policy, "saved", full)
        with pytest.raises(CheckpointError, match="no space is left"):
            ran(tmp_path, given)
    assert len(ran(tmp_path, given)) == 1
    for name in (ACTOR, "critic"):
        assert [path.name for path in (tmp_path / name / "checkpoints").iterdir()] == ["step-00000004"]


def test_the_multiplier_begins_where_it_is_set(tmp_path: Path) -> None:
    more = {"run": {"steps": 1, "evaluate_every": 0}, "algorithm": {"multiplier": 0.2, "multiplier_largest": 0.5}}
    (found,) = ran(tmp_path, SAFE, more)
    # The first step has moved it already, by rate x multiplier x violation.
    assert found["safe/lambda"] == pytest.approx(0.2 * math.exp(0.1 * 0.2 * found["safe/violation"]), rel=1e-6)


def test_the_file_of_a_run_comes_back_as_it_was() -> None:
    config = resolve("sort", None, {}, SAFE)
    assert parse(to_toml_table(config)) == config
    assert config.cluster.world_size == 8
    assert len(RunKeys.__dataclass_fields__) + len(RewardKeys.__dataclass_fields__) < 35


@pytest.mark.parametrize(
    ("task", "overrides", "error", "message"),
    [
        ("sorted", {}, ConfigError, "task 'sorted' is not known; did you mean 'sort'"),
        (None, {}, ConfigError, r"section \[run\] is missing: give --task sort"),
        ("sort", {"run": {"response": 4}}, ConfigError, "unknown key run.response; did you mean 'run.responses'"),
        ("sort", {"algoritm": {}}, ConfigError, "unknown section 'algoritm'; did you mean 'algorithm'"),
        ("sort", {"run": {"mini_batch": 100}}, ConfigError, "run.mini_batch = 100 must divide the responses of a step"),
        ("sort", {"run": {"mini_batch": 32}}, PlanError, "batch = 32 is not a multiple of micro_batch x data ranks"),
        ("sort", {"run": {"steps": 0}}, ConfigError, "run.steps = 0 must be at least 1"),
        ("sort", {"run": {"prompts_file": "x.jsonl"}}, ConfigError, "give one of them"),
        ("sort", {"run": {"critic_lr": 0.1}}, ConfigError, "run.critic_lr = 0.1 has no effect: .* no critic"),
        (
            "sort",
            {"cost": {"function": "a:b"}},
            ConfigError,
            "safe-rlhf needs a .cost., and no other",
        ),
        ("sort", {"reward": []}, ConfigError, "reward is missing"),
        ("sort", {"reward": [{**REWARD[0], "weight": math.nan}]}, ConfigError, "weight = nan: must be a finite number"),
        ("sort", merge(SAFE, {"cost": {"weight": 2.0}}), ConfigError, "cost.weight = 2.0 has no effect"),
        ("sort", {"run": {"held_out": 3}}, ConfigError, "run.held_out = 3 has no effect under run.task = 'sort'"),
        ("sort", {"run": {"prompt_column": "text"}}, ConfigError, "run.prompt_column = 'text' has no effect"),
        ("sort", {"run": {"max_prompt": 4}}, ConfigError, "prompts of task 'sort' have up to 11 tokens; raise it"),
        ("sort", {"run": {"max_response": 4}}, ConfigError, "run.max_response = 4: the responses that a supervised"),
        (
            "sort",
            {"algorithm": {"kl_coefficient": 0.1, "kl_target": 0.1, "kl_horizon": 102.4}},
            ConfigError,
            "algorithm.kl_horizon = 102.4: a step of 512 responses .* above 102.4",
        ),
        (
            "sort",
            {"algorithm": {"entropy": 0.1}, "plan": {"mapping": {"package": {"tensor": 2}}}},
            ConfigError,
            "algorithm.entropy = 0.1 has no form where a tensor axis cuts the vocabulary",
        ),
        ("sort", {"run": 3}, ConfigError, "run must be a table, not 3"),
        ("sort", {"cluster": 3}, ConfigError, "cluster = 3 must be a table"),
        ("sort", {"weights": 3}, ConfigError, "weights = 3 must be the name of a folder"),
        (
            "sort",
            {"run": {"reference": False}, "algorithm": {"kl_coefficient": 0.1}},
            ConfigError,
            "needs the reference",
        ),
        ("sort", {"algorithm": {"name": "distill"}}, ConfigError, "run.reference = true: .* give its folder, as --run"),
        ("sort", {"run": {"reference": "nowhere"}}, ConfigError, "run.reference = .*nowhere' is neither a run folder"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    task: str | None, overrides: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        resolve(task, None, {}, overrides)

"""Runs whose roles are on several pools: the steps of one process; a rollout that draws ahead, resumed; its failure."""

import os
import shutil
import signal
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from terrace.base.errors import ConfigError, HangError, PlanError
from terrace.base.schema import merge
from terrace.rl.calls.inline import InlineRuntime
from terrace.rl.calls.local import LocalRuntime
from terrace.rl.calls.spans import Span, idle_share, seconds_by_phase
from terrace.rl.commands import explain as rl_explain
from terrace.rl.config import RlConfig, to_toml_table
from terrace.rl.hand_over.program import hand_over_programs
from terrace.rl.hand_over.transition import Apart
from terrace.rl.making import apart_of, check_roles, engine_settings, started
from terrace.rl.placing import ACTOR, PoolKeys
from terrace.rl.predicted import found_placements, placed_run, placement_of, predicted
from terrace.rl.resolve import parse
from terrace.rl.workers.handing import transition_of
from tests.support.rl_runs import ALONE, EXACT, FOUR, config_of, inputs_of, numbers, ran, resumed

SHARDED = {"preset": "zero3", **EXACT, "micro_batch": 4}
APART: dict[str, Any] = {
    **FOUR,
    "run": {"rows": 2, "steps": 2},
    "pool": [{"ranks": 2, "roles": ["actor", "critic"]}, {"ranks": 2, "roles": ["rollout", "reference"]}],
    "plans": {"actor": SHARDED, "critic": {"preset": "ddp", **EXACT, "micro_batch": 4}, "reference": SHARDED},
}
LAGGING: dict[str, Any] = {
    **FOUR,
    "run": {"rows": 2, "max_lag": 2, "steps": 4, "checkpoint_every": 2, "keep_checkpoints": 9, "evaluate_every": 3},
    "algorithm": {"name": "grpo", "kl_coefficient": 0.0},
    "reward": [{"function": "terrace.rl.sort_task:length_cost"}],  # which a policy that knows nothing differs in
    "optimizer": {"lr": 0.01},
    "pool": [{"ranks": 2, "roles": ["actor"]}, {"ranks": 2, "roles": ["rollout"]}],
    "plans": {"actor": SHARDED, "reference": SHARDED},
}


def test_roles_on_two_pools_take_the_steps_of_one_process(tmp_path: Path) -> None:
    alone = ran(InlineRuntime(), config_of(ALONE, {"run": {"steps": 2}}), tmp_path / "alone")
    apart = ran(LocalRuntime(timeout_s=120.0), config_of(APART), tmp_path / "apart")
    planned = _all_bytes(config_of(APART))
    assert len(apart) == len(alone) == 2
    assert alone[0]["critic/vf_loss"] > 0
    for mine, wanted in zip(apart, alone, strict=True):
        assert numbers(mine) == pytest.approx(numbers(wanted), rel=1e-9, abs=1e-9)
        assert mine["reshard/bytes_sent"] == mine["reshard/bytes_planned"] == planned > 0
        assert mine["sync/version_lag_max"] == 0
        assert {"sync/bubble/pool_0", "sync/bubble/pool_1"} <= mine.keys()
        assert 0 <= mine["sync/bubble"] < 1


def _all_bytes(config: RlConfig) -> int:
    """Bytes of a hand-over, over the ranks of both pools."""
    apart = apart_of(config)
    assert apart is not None
    settings = engine_settings(config, ACTOR, "", config.run.mini_batch)
    programs = hand_over_programs(apart.cluster, transition_of(settings, config.run.rows, apart))
    return sum(sum(program.sent_bytes.values()) for program in programs)


@pytest.mark.nightly
def test_eight_ranks_in_stages_take_the_steps_of_one_process(tmp_path: Path) -> None:
    """Two stages of four shards train, two replicas of four tensor ranks draw."""
    heads = {"model": {"num_attention_heads": 4, "num_key_value_heads": 4}}
    states = dict.fromkeys(("params", "grads", "optimizer"), "node")
    stages = {"mapping": {"system": {"pipeline": 2}}, "schedule": "1f1b"}
    plan = {**EXACT, **states, **stages, "micro_batch": 1}
    alone = ran(InlineRuntime(), config_of(ALONE, heads), tmp_path / "alone")
    config = config_of(heads, {"plan": plan, "run": {"rows": 4}})
    assert config.cluster.world_size == 8
    eight = ran(LocalRuntime(timeout_s=300.0), config, tmp_path / "eight")
    for mine, wanted in zip(eight, alone, strict=True):
        assert numbers(mine) == pytest.approx(numbers(wanted), rel=1e-9, abs=1e-9)


def test_a_rollout_that_draws_ahead_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    config, folder = config_of(LAGGING), tmp_path / "run"
    whole = ran(LocalRuntime(timeout_s=120.0), config, folder)
    assert [found["sync/version_lag_max"] <= 2 for found in whole] == [True] * 4
    assert whole[-1]["sync/version_lag"] >= 1
    assert all(found["reshard/bytes_sent"] == found["reshard/bytes_planned"] > 0 for found in whole)
    assert whole[-1]["rollout/logprob_diff_max"] > 1e-4, "training has other weights than those that drew"
    # As it was after two steps, of two updates each.
    for name in (ACTOR, "stream"):
        last = sorted((folder / name / "checkpoints" if name == ACTOR else folder / name).iterdir())[-1]
        assert last.name.startswith("step-00000008")
        shutil.rmtree(last) if last.is_dir() else last.unlink()
    runtime = LocalRuntime(timeout_s=120.0)
    with runtime:
        run = started(inputs_of(config), runtime, folder, lambda text: None)
        assert resumed(run, config, folder) == 2
        rest = list(islice(run.steps(), 1))
        assert numbers(rest[0][1]) == numbers(whole[2])
        # What happens to a rollout is told with its name, also while an actor waits for it.
        pids = [rank.process.pid for rank in runtime._processes[1]._pool._members if rank is not None]
        os.kill(pids[0], signal.SIGKILL)
        with pytest.raises(HangError, match=r"rank 0 was killed by SIGKILL.*the pool of rollout"):
            list(run.steps())


def test_a_placement_comes_back_from_its_file_and_is_priced() -> None:
    config = config_of(APART)
    assert parse(to_toml_table(config)) == config
    assert config.roles == {"actor": True, "rollout": False, "reference": True, "critic": True, "reward_0": False}
    assert {role: place.pool for role, place in config.places.items()} == {
        "actor": 0,
        "critic": 0,
        "reward_0": 0,
        "rollout": 1,
        "reference": 1,
    }
    apart = apart_of(config)
    assert isinstance(apart, Apart)
    assert (apart.source, apart.first, apart.target.world_size) == (0, 2, 2)
    assert apart_of(config_of(FOUR)) is None
    first, second = placement_of(config).pools
    assert [(role.name, role.rows) for role in second.roles] == [("rollout", 2), ("reference", 0)]
    assert [role.name for role in first.roles] == ["actor", "critic"]
    report = predicted(config)
    assert report.seconds == pytest.approx(sum(report.stages.values()))
    # Drawing ahead hides the shorter of drawing and learning.
    ahead = predicted(config_of(LAGGING))
    rest = ahead.stages["prepare"] + ahead.stages["train"]
    assert ahead.seconds == pytest.approx(ahead.stages["reshard"] + max(ahead.stages["generate"], rest))


def test_a_placement_that_is_found_can_run() -> None:
    """The search's placement is a run's: same pools, plans and price."""
    for more in ({}, {"run": {"max_lag": 1}}):
        config = config_of(FOUR, {"plan": {"compute": "fp32"}}, more)
        for placed in found_placements(config).best:
            run = placed_run(config, placed.placement)
            check_roles(run)
            assert parse(to_toml_table(run)) == run
            assert predicted(run).seconds == pytest.approx(placed.seconds)
            assert predicted(run).dataflow.ahead == run.is_apart
    # A slow learner beside a slow generator: ahead is found where it pays.
    names = {role.name for placed in found_placements(config).best for role in placed.report.roles}
    assert "rollout" in names


def test_a_search_does_not_drop_a_placement_of_ones_own() -> None:
    with pytest.raises(ConfigError, match=r"--place auto finds .*leave out \[\[pool\]\] and \[plans\]"):
        rl_explain.placed(config_of(APART))


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        ({"pool": [{"ranks": 4, "roles": ["actors"]}]}, ConfigError, r"pool\[0\].roles: the run has no role 'actors'"),
        ({"pool": [{"ranks": 4, "roles": ["critic"]}]}, ConfigError, "no pool has the role 'actor'"),
        ({"pool": [{"ranks": 4, "roles": []}]}, ConfigError, "a pool of 4 ranks without roles"),
        ({"pool": [{"ranks": 0, "roles": ["actor"]}]}, ConfigError, "pool.ranks = 0 must be at least 1"),
        ({"pool": [{"ranks": 2, "roles": ["actor"]}]}, ConfigError, "pools of 2 ranks on a cluster of 4"),
        ({"pool": [{"ranks": 4, "roles": ["actor", "rollout"]}]}, ConfigError, "leave out the rollout, or give it"),
        (
            {"pool": [{"ranks": 2, "roles": ["actor"]}, {"ranks": 2, "roles": ["actor"]}]},
            ConfigError,
            r"pool\[1\].roles: 'actor' is named twice",
        ),
        (
            {"pool": [{"ranks": 3, "roles": ["actor"]}, {"ranks": 1, "roles": ["rollout"]}]},
            PlanError,
            "pools of 3, 1 devices do not lie|a pool of 3 devices is no even part",
        ),
        ({"pool": {"ranks": 2}}, ConfigError, r"pool must be a list of tables: write \[\[pool\]\]"),
        ({"pool": [{"rank": 2, "roles": ["actor"]}]}, ConfigError, r"unknown key pool\[0\].rank; did you mean"),
        ({"plans": {"crit": "ddp"}}, ConfigError, "plans.crit: the run has no role 'crit'; did you mean 'critic'"),
        ({"plans": {"reward_0": "ddp"}}, ConfigError, "plans.reward_0 has no effect: 'reward_0' is a function"),
        ({"plans": {"critic": "zero33"}}, PlanError, "no plan preset or file 'zero33'"),
        (
            merge(APART, {"run": {"max_lag": 1}}),
            ConfigError,
            "the other roles of its pool would wait for it: give it a pool of its own",
        ),
        ({"run": {"max_lag": -1}}, ConfigError, "run.max_lag = -1 must be at least 0"),
    ],
)
def test_wrong_placements_are_one_line(overrides: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        config_of(FOUR, overrides)


def test_pools_are_as_many_as_there_are_roles_for() -> None:
    with pytest.raises(ConfigError, match="without roles"):
        PoolKeys(ranks=1, roles=())


def test_time_goes_to_phases_and_idle_ranks() -> None:
    spans = [
        Span(0, "actor", "update", 10.0, 13.0),
        Span(0, "actor", "logprobs", 13.0, 14.0),
        Span(1, "rollout", "generate", 8.0, 12.0),
        Span(1, "rollout", "take", 12.0, 12.5),
    ]
    assert seconds_by_phase(spans) == {"time/update": 3.0, "time/old_log_prob": 1.0, "time/generate": 4.0}
    found = idle_share(spans, [3, 1], 10.0, 15.0)
    assert found["sync/bubble/pool_0"] == pytest.approx(0.2)
    assert found["sync/bubble/pool_1"] == pytest.approx(0.5)
    assert found["sync/bubble"] == pytest.approx((3 * 0.2 + 0.5) / 4)
    assert list(idle_share(spans[:2], [3], 10.0, 15.0)) == ["sync/bubble"]

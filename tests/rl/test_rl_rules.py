"""Rules across a run of feedback: plans of every role, groups that compare, rates of loaded weights, keys' effects."""

import re
from pathlib import Path
from typing import Any

import pytest

from terrace.base.errors import ConfigError, PlanError, TerraceError
from terrace.base.schema import merge
from terrace.generation.cache_shape import cache_shape
from terrace.model.blocks import block_specs
from terrace.model.config import parse_model
from terrace.rl import making
from terrace.rl.algorithms.algorithm import TRAITS, algorithm_of
from terrace.rl.calls.ray_address import check_address
from terrace.rl.commands import run as rl_run
from terrace.rl.config import RlConfig
from terrace.rl.effects import RULES
from terrace.rl.keys import RunKeys
from terrace.rl.making import check_roles, engine_settings
from terrace.rl.placing import ACTOR, REFERENCE
from terrace.rl.rates import rate_lines
from terrace.rl.resolve import resolve
from terrace.runtime.model_state import check_settings
from tests.support.rl_runs import ALONE, write_own

POOLS = [{"ranks": 4, "roles": ["actor", "critic"]}, {"ranks": 4, "roles": ["rollout", "reference"]}]
FLAT: dict[str, Any] = {"preset": "zero1", "micro_batch": 8}
PLANS = {"actor": FLAT, "critic": FLAT, "reference": FLAT}


def config_of(table: dict[str, Any], **more: Any) -> RlConfig:
    return resolve("sort", None, {}, merge({"run": {"steps": 10, "rows": 1}}, table), **more)


@pytest.mark.parametrize("role", ["actor", "critic", "reference"])
@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"params": "node"}, "lies outside grads = 'device'"),
        ({"params_backward": "device"}, "keeps a whole copy of the parameters"),
        ({"mapping": {"package": {"tensor": 3}}}, "the degrees of mapping.package multiply to 3"),
        ({"wire": {"gather": {"package": "int8"}}}, "wire.gather.package has no effect"),
        ({"recompute": ["nothing"]}, "nothing"),
        ({"schedule": "1f1b"}, "has no effect without a pipeline axis"),
        ({"mapping": {"package": {"context": 2}}}, "leave out the context axis"),
        ({"micro_batch": 0}, "a rank works on at least 1 sequence"),
        ({"unit": 9}, "has no effect: a rank has"),
        ({"prefetch": 3}, "has no effect: under params"),
    ],
)
def test_every_plan_of_every_role_is_checked_before_a_process(role: str, plan: dict[str, Any], said: str) -> None:
    table = {"algorithm": {"name": "ppo"}, "pool": POOLS, "plans": {**PLANS, role: {**FLAT, **plan}}}
    with pytest.raises(TerraceError, match=said) as refused:
        check_roles(config_of(table))
    assert f"role {role}: " in str(refused.value) or f"plans.{role}." in str(refused.value)


def test_updates_in_the_backward_need_the_settings_of_the_roles_that_learn() -> None:
    """Those of a role that only scores are not refused for a norm that nobody clips."""
    keep = {"optimizer": "disk", "update": "host", "order": "backward"}
    table = {"algorithm": {"name": "ppo"}, "pool": POOLS, "plans": {key: {**FLAT, "keep": keep} for key in PLANS}}
    with pytest.raises(PlanError, match=r"role actor: keep\.order = 'backward' with optimizer\.clip = 1: a clipped"):
        check_roles(config_of(table))
    config = config_of({**table, "optimizer": {"clip": 0.0}})
    check_roles(config)
    reference = engine_settings(config, REFERENCE, "", 8)
    check_settings(reference.plan, reference.optimizer)


def test_a_start_refuses_a_role_before_it_makes_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def came(*_: object) -> None:
        raise AssertionError("a process would start")

    monkeypatch.setattr(rl_run, "started", came)
    monkeypatch.setattr(rl_run, "_runtime", came)
    plans = {**PLANS, "critic": {**FLAT, "params": "node"}}
    config = config_of({"algorithm": {"name": "ppo"}, "pool": POOLS, "plans": plans})
    with pytest.raises(PlanError, match=r"^role critic: params = 'node' lies outside"):
        rl_run.run(config, tmp_path / "made", None)
    assert not (tmp_path / "made").exists()


def test_a_supervised_start_is_checked_as_the_roles_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(config: RlConfig) -> Any:
        raise PlanError("no start")

    monkeypatch.setattr(making, "student_settings", refused)
    with pytest.raises(PlanError, match="no start"):
        check_roles(config_of({"run": {"start_steps": 1}}))


def test_what_only_scores_needs_nothing_of_an_optimizer() -> None:
    config = config_of({"optimizer": {"name": "muon"}, "plan": {"preset": "zero1", "micro_batch": 8, "schedule": None}})
    check_roles(config)
    of_actor, of_reference = (engine_settings(config, role, "", 256) for role in (ACTOR, REFERENCE))
    assert (of_actor.plan.update, of_actor.optimizer.name) == ("muon", "muon")
    assert (of_reference.plan.update, of_reference.optimizer.name) == ("adamw", "adamw")


def test_a_step_of_one_response_has_nothing_to_compare_it_with() -> None:
    run = {"responses": 1, "prompts": 1, "mini_batch": 1}
    with pytest.raises(ConfigError, match="compares a response with the others of its step, and there is none"):
        config_of({"algorithm": {"name": "reinforce++"}, "run": run})


def test_the_papers_numbers_are_no_keys_without_effect() -> None:
    for name, traits in TRAITS.items():
        safe = {"cost_threshold": 0.5} if traits.has_cost else {}
        assert algorithm_of({"name": name, **safe}).name == name


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"run": {"critic_lr": 1e-3}}, "run.critic_lr = 0.001 has no effect: .* has no critic"),
        ({"run": {"start_steps": 0, "start_lr": 1e-3}}, "run.start_lr = 0.001 has no effect"),
        ({"run": {"warmup_steps": 11}}, "run.warmup_steps = 11 has no effect: the run ends after 10 steps"),
        ({"run": {"held_out": 0}}, "run.held_out = 0 has no effect"),
        ({"run": {"high_lr": True}}, "run.high_lr = true has no effect: no weights are loaded"),
        (
            {"run": {"mini_batch": 512}, "algorithm": {"clip_low": 0.2}},
            "algorithm.clip_low = 0.2 has no effect: a step",
        ),
        ({"algorithm": {"kl_estimator": "k3"}}, "algorithm.kl_estimator = 'k3' has no effect: .*kl_coefficient = 0"),
        ({"algorithm": {"lam": 0.95}}, "algorithm.lam = 0.95 has no effect: algorithm.name = 'grpo', which has no"),
        ({"algorithm": {"name": "dapo", "overlong_window": 12}}, "is longer than run.max_response = 11"),
        ({"algorithm": {"entropy": 1e21}}, "algorithm.entropy = 1e\\+21 must be at most"),
        ({"run": {"prompts": 10**21}}, "run.prompts = 10{21} must be below"),
        ({"reward": [{"function": "a:b", "weight": 0.0}]}, "every .* has weight = 0"),
        ({"plan": {"unit": 2}}, "plan.unit = 2 has no effect"),
        ({"plans": {"actor": FLAT, "reference": FLAT}, "plan": {"micro_batch": 2}}, "every role has a plan of its own"),
        (
            {"plans": {"reference": {**FLAT, "optimizer_states": "int8"}}},
            "plans.reference.optimizer_states = 'int8' has no effect: a role that only scores",
        ),
        ({"plans": {"reference": {**FLAT, "recompute": ["layers.*"]}}}, "plans.reference.recompute = .* has no effect"),
        (
            {"plans": {"reference": {**FLAT, "wire": {"reduce": {"package": "int8"}}}}},
            "plans.reference.wire.reduce = .* has no effect",
        ),
        ({"plans": {"reference": {"preset": "nothing"}}}, "plans.reference: no plan preset 'nothing'"),
        ({"plans": {"reference": {**FLAT, "stages": 9}}}, "plans.reference: plan.stages = 9 must be a list"),
    ],
)
def test_keys_without_effect_are_refused(overrides: dict[str, Any], said: str) -> None:
    with pytest.raises(TerraceError, match=said):
        config_of(overrides)


def test_a_file_may_have_defaults_and_a_task_its_own_numbers() -> None:
    """As the config.toml of a run has, and a task's table without its start; a command line may not."""
    config_of({"run": {"start_steps": 0}})
    one = {**ALONE, "plan": {"mapping": {"system": {"pipeline": 1}}, "schedule": None}}
    config_of(one)
    with pytest.raises(ConfigError, match=r"run.timeout_s = 600.0 has no effect: a run on one rank"):
        config_of({**one, "run": {"timeout_s": 600.0}})
    assert {name.partition(".")[0] for name in RULES} == {"run", "cost", "algorithm", "environment"}


def loaded(folder: Path, overrides: dict[str, Any] | None = None, **more: Any) -> RlConfig:
    return resolve(None, str(write_own(folder, **more)), {}, merge(ALONE, overrides or {}))


def test_loaded_weights_have_rates_of_their_own_which_are_said(tmp_path: Path) -> None:
    own = {"algorithm": {"name": "ppo"}}
    config = loaded(tmp_path, **own)
    assert (config.optimizer.lr, config.run.critic_lr) == (1e-6, 1e-5)
    assert rate_lines(config) == [
        "peak learning rate 1e-06, usual for loaded weights under adamw (--optimizer.lr)",
        "peak learning rate of critics 1e-05, usual for loaded weights under adamw (--run.critic_lr)",
    ]
    lion = loaded(tmp_path, {"optimizer": {"name": "lion"}}, **own)
    assert lion.optimizer.lr == pytest.approx(2e-7)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"optimizer": {"lr": 3e-3}}, r"optimizer.lr = 0.003 would destroy the loaded weights, .* about 1e-06 under"),
        ({"run": {"critic_lr": 1e-3}}, r"run.critic_lr = 0.001 would destroy .* about 1e-05 .* --run.high_lr true"),
        ({"run": {"high_lr": True}}, "run.high_lr = true has no effect: optimizer.lr = 1e-06 is not high"),
    ],
)
def test_rates_that_destroy_loaded_weights_are_refused(tmp_path: Path, overrides: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        loaded(tmp_path, overrides, algorithm={"name": "ppo"})


def test_a_resumed_run_keeps_its_rates_unless_it_is_given_others(tmp_path: Path) -> None:
    path = str(write_own(tmp_path, optimizer={"lr": 3e-3}))
    assert resolve(None, path, {}, ALONE, is_resumed=True).optimizer.lr == 3e-3
    with pytest.raises(ConfigError, match=r"optimizer.lr = 0.004 would destroy the loaded weights"):
        resolve(None, path, {}, merge(ALONE, {"optimizer": {"lr": 4e-3}}), is_resumed=True)


def test_a_high_rate_can_be_asked_for_and_a_given_one_stays(tmp_path: Path) -> None:
    asked = loaded(tmp_path, {"optimizer": {"lr": 3e-3}, "run": {"high_lr": True}})
    assert asked.optimizer.lr == 3e-3
    assert "3e+03 times the usual 1e-06" in rate_lines(asked)[0]
    assert loaded(tmp_path, {"optimizer": {"lr": 2e-6}}).optimizer.lr == 2e-6
    assert config_of({}).optimizer.lr == 1e-4, "a task without weights has its own"
    assert rate_lines(config_of({})) == [
        "peak learning rate 0.0001 (--optimizer.lr)",
        "peak learning rate of the supervised start 0.001 (--run.start_lr)",
    ]
    assert RunKeys.critic_lr == 1e-3


def test_a_replica_of_any_number_of_rows_is_refused_at_once() -> None:
    sizes = {"vocab_size": 12, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = parse_model({"model_type": "llama", "intermediate_size": 8, "hidden_act": "silu", **sizes})
    with pytest.raises(PlanError, match="cannot share the model's 4 heads and 4 key-value heads: use 4"):
        cache_shape(block_specs(model), 10**21)
    assert cache_shape(block_specs(model), 4).heads == 1


@pytest.mark.parametrize(
    "address", ["ray://", "ray://10.0.0.1:10001", "head", ":6379", "head:0", "head:99999", "a/b:1"]
)
def test_an_address_at_which_no_cluster_can_be_joined_is_refused(address: str) -> None:
    """Ray waits for minutes at some of them, and says nothing."""
    with pytest.raises(ConfigError, match=re.escape(f"--ray {address!r}") + ".*: give HOST:PORT of its head"):
        check_address(address)
    for each in ("auto", "10.0.0.1:6379", "head.cluster:6379", "[::1]:6379"):
        check_address(each)

"""A run of `terrace rl` as a dataflow of roles, its price, and the output of `--explain`."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from terrace.base.errors import PlanError, TerraceError
from terrace.base.words import quantity
from terrace.rl.commands.explain import explain
from terrace.rl.config import RlConfig
from terrace.rl.keys import RewardKeys
from terrace.rl.placement.placement import price
from terrace.rl.predicted import dataflow_of, found_placements, placement_of, predicted, stages_of
from terrace.rl.resolve import resolve
from tests.support.command_line import CommandLine
from tests.support.hf_folder import TABLE, write_model
from tests.support.rl_runs import totals_of

QUICK = ["--run.steps", 1, "--run.start_steps", 0, "--run.evaluate_every", 0, "--run.prompts", 16]
QUICK += ["--run.mini_batch", 128]
QUICK += ["--cluster.tiers.system.size", 1, "--cluster.tiers.node.size", 1]


def sort(**overrides: Any) -> RlConfig:
    return resolve("sort", None, {}, overrides)


@pytest.mark.parametrize(
    ("overrides", "roles"),
    [
        ({}, ["actor", "reference"]),
        ({"run": {"reference": False}}, ["actor"]),
        ({"algorithm": {"name": "ppo"}}, ["actor", "reference", "critic"]),
    ],
)
def test_the_roles_are_the_models_of_the_algorithm(overrides: dict[str, Any], roles: list[str]) -> None:
    flow = dataflow_of(sort(**overrides))
    assert [role.name for role in flow.roles] == roles
    assert all(role.model.scalar_head == (role.name == "critic") for role in flow.roles)
    assert [role.name for role in flow.roles if role.trains] == [name for name in roles if name != "reference"]


def test_a_reward_model_scores_and_a_function_is_no_role(tmp_path: Path) -> None:
    write_model(tmp_path, {**TABLE, "architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1})
    config = sort()
    flow = dataflow_of(replace(config, reward=(*config.reward, RewardKeys(model=str(tmp_path)))))
    assert [(role.name, role.does, role.model.scalar_head) for role in flow.roles[2:]] == [("reward_1", "scores", True)]


def test_the_sizes_are_those_of_a_step() -> None:
    flow = dataflow_of(sort(run={"epochs": 2}))
    assert (flow.sequences, flow.sequence, flow.update_batch) == (64 * 8, 22, 256)
    assert (flow.updates, flow.epochs, flow.compute) == (2, 2, "fp32")


def test_a_run_has_all_its_roles_on_all_ranks_under_its_plan() -> None:
    config = sort()
    (pool,) = placement_of(config).pools
    assert pool.devices == 8
    assert [(role.plan, role.rows) for role in pool.roles] == [(config.plan, config.run.rows), (config.plan, 0)]
    report = predicted(config)
    assert report == price(dataflow_of(config), placement_of(config), config.cluster)
    assert report.fits
    assert set(report.roles[0].seconds) == {"generate", "train"}
    rounded = predicted(sort(plan={"compute": "bf16"}))
    assert set(rounded.roles[0].seconds) == {"generate", "prepare", "train"}
    assert report.stages["reshard"] > 0  # from two stages of four shards to four slices


def test_measured_seconds_go_to_stages() -> None:
    usual = {"time/generate": 1.0, "time/ref": 2.0, "time/step": 8.0}
    steps = [{"time/generate": 9.0}, *({**usual, "time/values": each} for each in (3, 5))]
    assert stages_of(totals_of(steps)) == {"reshard": 0.0, "generate": 1.0, "prepare": 6.0, "train": 0.0, "step": 8.0}
    assert stages_of(totals_of(steps[:1]))["generate"] == 9.0


def test_a_batch_that_the_plan_cannot_take_is_one_line() -> None:
    with pytest.raises(PlanError, match="batch"):
        predicted(sort(run={"mini_batch": 32}, plan={"micro_batch": 64}))


def test_explain_shows_the_placement_and_the_best_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    explain(sort(), search=False)
    given = capsys.readouterr().out
    assert "actor generates, trains; reference scores" in given
    assert "as the run places its roles" in given
    sent = predicted(sort()).sent_bytes
    assert "the hand-over takes" in given
    assert all(f"{quantity(size, 'B')} over {tier}" in given for tier, size in sent.items() if size)
    assert "the fastest placement" not in given
    explain(sort(), search=True)
    both = capsys.readouterr().out
    assert both.startswith(given)
    assert "the fastest placement: 8: actor, reference" in both
    assert "4: actor | 4: reference: " in both


def test_the_command_explains_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    here = CommandLine(tmp_path, capsys)
    words = ("rl", "--task", "sort", "--algorithm.name", "ppo")
    said = here.call(*words, "--explain", "--place", "auto")
    assert (said.code, said.error) == (0, "")
    assert "critic scores, trains" in said.out
    assert "the fastest placement" in said.out
    assert not list(tmp_path.iterdir())
    ran = here.call(*words, "--place", "auto", *QUICK, "--folder", "placed")
    assert (ran.code, ran.error) == (0, "")
    assert "the fastest placement" in ran.out
    assert "step    1   reward" in ran.out
    written = resolve(None, str(tmp_path / "placed" / "config.toml"), {}, {})
    assert predicted(written).seconds == pytest.approx(found_placements(written).best[0].seconds), "the one that ran"
    again = here.call("rl", "--resume", "placed", "--place", "auto")
    assert "a resumed run keeps the placement of its config.toml" in again.error
    assert "leave out --folder" in here.call(*words, "--explain", "--folder", "made").error


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"plan": {"mapping": {"node": {"context": 2}}}}, "leave out the context axis"),
        ({"plan": {"outer": {"tier": "system", "every": 2}}}, "leave out plan.outer"),
        ({"reward": [{"model": "causal"}]}, "is no reward model"),
    ],
)
def test_explain_refuses_what_a_run_refuses(
    overrides: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "causal").mkdir()
    write_model(tmp_path / "causal")
    with pytest.raises(TerraceError, match=words):
        explain(sort(**overrides), search=False)


def test_a_found_placement_keeps_the_dtypes_of_the_run() -> None:
    flow = dataflow_of(sort(plan={"messages": "bf16", "master": "fp64"}))
    assert (flow.masters, flow.messages) == ("fp64", "bf16")
    ranks = {"tiers": {"system": {"size": 1}, "node": {"size": 1}}}
    dtypes = {"compute": "fp32", "messages": "bf16", "master": "fp64"}
    small = resolve("sort", None, {"plan": "ddp"}, {"plan": dtypes, "cluster": ranks})
    (pool,) = found_placements(small).best[0].placement.pools
    plans = [role.plan for role in pool.roles if role.plan is not None]
    assert [(plan.compute, plan.messages, plan.master) for plan in plans] == [("fp32", "bf16", "fp64")] * 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--run.rows", "2"], "run.rows = 2 has no effect with --place auto"),
        (["--plan", "zero++"], "--plan zero++ has no effect with --place auto, which finds plans"),
        (["--plan.micro_batch", "4"], "plan.micro_batch has no effect with --place auto, which finds plans and keeps"),
        (["--plan.wire.sync.system", "bf16"], "and the run has wire sync.system = 'bf16': leave out plan.wire"),
        (["--plan.optimizer_states", "int8"], "and the run has plan.optimizer_states = 'int8'"),
        (["--plan.products", "fp8"], "and the run has plan.products = 'fp8': leave it out"),
        (["--plan.compute", "fp16"], "plan.compute = 'fp16': losses of token numbers are not scaled"),
    ],
)
def test_what_a_found_placement_cannot_keep_is_refused(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    here = CommandLine(tmp_path, capsys)
    refused = here.refusal("rl", "--task", "sort", "--place", "auto", *words)
    assert said in refused


def test_a_plan_beside_that_of_the_actor_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    here = CommandLine(tmp_path, capsys)
    (tmp_path / "run.toml").write_text('[run]\ntask = "sort"\n[plans]\nactor = "zero3"\n')
    refused = here.refusal("rl", "--config", "run.toml", "--explain", "--plan", "zero1")
    assert "--plan zero1 has no effect on the actor" in refused
    assert "--plans.actor" in refused
    assert here.call("rl", "--config", "run.toml", "--explain", "--plans.actor", "zero1").code == 0

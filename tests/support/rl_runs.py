"""Small runs of `terrace rl` in fp64, on any runtime."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tomli_w

from terrace.base.schema import merge
from terrace.rl.algorithms.metrics import Metrics
from terrace.rl.calls.runtime import Runtime
from terrace.rl.config import RlConfig
from terrace.rl.making import check_roles, started
from terrace.rl.resolve import resolve
from terrace.rl.run import Run, RunInputs, checkpoint_of
from terrace.rl.tasks import TASKS
from terrace.rl.totals import Totals
from tests.support.hf_folder import write_model
from tests.support.stub_server import Stub

ONE_STAGE = {"schedule": None, "mapping": {"system": {"pipeline": 1}}}
EXACT = {"compute": "fp64", "master": "fp64", "micro_batch": 2, **ONE_STAGE}
OF_TIME = (
    *("time", "step_s", "tokens_per_s", "mfu", "hfu", "slow", "peak_memory", "perf/", "sync/bubble", "reshard"),
    "environment/s",  # in environments, and waiting for them
)
SMALL: dict[str, Any] = {
    "plan": EXACT,
    "model": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2},
    "run": {"rows": 1, "prompts": 4, "responses": 4, "mini_batch": 8, "start_steps": 1, "start_batch": 8, "steps": 3},
    "algorithm": {"name": "ppo", "kl_coefficient": 0.05},
}
ALONE = {"cluster": {"tiers": {name: {"size": 1} for name in ("package", "node", "system")}}}
GRPO: dict[str, Any] = {
    "algorithm": {"name": "grpo", "kl_coefficient": 0.0},
    "run": {"start_steps": 0, "evaluate_every": 0, "steps": 2, "prompts": 2, "reference": False},
}
FOUR = {"cluster": {"tiers": {"system": {"size": 1}}}}


def config_of(*overrides: Mapping[str, Any], task: str = "sort") -> RlConfig:
    table = SMALL
    for each in overrides:
        table = merge(table, each)
    # Without what would be the plan of no role, and the batch of no start.
    table = {
        name: section for name, section in table.items() if name != "plan" or "actor" not in table.get("plans", {})
    }
    if not table["run"]["start_steps"]:
        table["run"] = {name: value for name, value in table["run"].items() if name != "start_batch"}
    return resolve(task, None, {}, table)


def write_own(folder: Path, **more: Any) -> Path:
    """A run on a Hugging Face folder, with prompts and a reward of its own; `more` replaces sections of its file."""
    if not (folder / "model").is_dir():
        (folder / "model").mkdir()
        write_model(folder / "model")
        (folder / "good.jsonl").write_text('{"prompt": "The fox", "wanted": 1}\n' * 3)
        (folder / "good_rewards.py").write_text("def f(samples):\n    return [0.0 for _ in samples]\n")
    run = {"prompts_file": "good.jsonl", "max_prompt": 12, "max_response": 6, "prompts": 2, "mini_batch": 16}
    table = {
        "model": "model",
        "cluster": "local",
        "plan": "ddp",
        "run": run,
        "reward": [{"function": "good_rewards:f"}],
    }
    (folder / "run.toml").write_text(tomli_w.dumps(merge(table, more)))
    return folder / "run.toml"


def served_by(servers: list[Stub], **more: Any) -> dict[str, Any]:
    return {"rollout": {"engine": "http", "urls": [each.url for each in servers], **more}}


def inputs_of(config: RlConfig) -> RunInputs:
    task = TASKS[config.run.task]
    prompts, stops = task.prompts(config.run.seed), frozenset({task.tokenizer.end})
    return RunInputs(config=config, prompts=prompts, tokenizer=task.tokenizer, stops=stops, examples=prompts.examples)


def ran(runtime: Runtime, config: RlConfig, folder: Path) -> list[Metrics]:
    check_roles(config)
    with runtime:
        run = started(inputs_of(config), runtime, folder, lambda text: None)
        resumed(run, config, folder)
        return [found for _, found in run.steps()]


def resumed(run: Run, config: RlConfig, folder: Path) -> int:
    """The step from which a run goes on."""
    return run.resume(checkpoint_of(inputs_of(config), folder)[0])


def totals_of(steps: Iterable[Metrics]) -> Totals:
    found = Totals()
    for each in steps:
        found.add(each)
    return found


def numbers(found: Metrics) -> Metrics:
    return {name: value for name, value in found.items() if not name.startswith(OF_TIME)}

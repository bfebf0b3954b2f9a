"""The file of a run of `terrace rl`, checked whole before anything starts.

    layers, each over the one before: the defaults, those of `--task`, the file of --config, --model, --cluster and
    --plan, then `--section.key value`

Model, cluster and plan are what they are for `terrace train`: a name or a file. All sizes are global.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

from terrace.base.errors import ConfigError, did_you_mean
from terrace.base.schema import dump, load, merge, read_table
from terrace.cluster.cluster import Cluster
from terrace.cluster.presets import parse_cluster
from terrace.model.config import ModelConfig, parse_model, to_table
from terrace.plan.layout import Layout
from terrace.plan.mesh import TENSOR, Mesh
from terrace.plan.plan import Plan
from terrace.plan.presets import command_plan
from terrace.plan.validate import num_micro_batches
from terrace.rl.algorithm import NEEDS_CRITIC, Algorithm, algorithm_of
from terrace.rl.sort_task import LONGEST_PROMPT, LONGEST_RESPONSE
from terrace.runtime.settings import OptimizerConfig
from terrace.train.config import section
from terrace.train.trackers import check_names

TASKS = ("sort",)  # a TOML file each, beside this one


@dataclass(frozen=True, kw_only=True)
class RunKeys:
    """Length and sizes of a run: a step draws `responses` to each of `prompts`, and learns `mini_batch` at a time."""

    max_prompt: int  # tokens; a longer prompt is refused
    max_response: int
    task: str = ""  # one that ships with Terrace; empty: the prompts of a file
    prompts_file: str = ""  # JSONL or Parquet
    prompt_column: str = "prompt"  # its other columns go to rewards
    held_out: int = 0  # first prompts of the file, which are never trained on and evaluated instead
    steps: int = 40
    prompts: int = 64
    responses: int = 8
    mini_batch: int = 256  # responses an update
    epochs: int = 1  # times that a response is learned from
    rows: int = 1  # tensor ranks of a replica that generates
    reference: bool = True  # measure the distance from the start, at the cost of a forward pass
    seed: int = 0
    warmup_steps: int = 10  # in which the learning rate rises
    critic_lr: float = 1e-3
    start_steps: int = 0  # supervised steps of a task before
    start_batch: int = 128
    start_lr: float = 1e-3
    evaluate_every: int = 10  # 0: never
    checkpoint_every: int = 0  # 0: only at the end
    keep_checkpoints: int = 2
    metrics: tuple[str, ...] = ()  # where else they go: terrace.train.trackers
    timeout_s: float = 600.0  # of a call of a role
    reward_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        least = dict.fromkeys(
            ("max_prompt", "max_response", "steps", "prompts", "responses", "mini_batch", "epochs", "rows"), 1
        )
        least |= dict.fromkeys(("seed", "held_out", "warmup_steps", "start_steps", "evaluate_every"), 0)
        least |= {"start_batch": 1, "checkpoint_every": 0, "keep_checkpoints": 1}
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                raise ConfigError(f"run.{name} = {getattr(self, name)} must be at least {smallest}")
        for name in ("critic_lr", "start_lr", "timeout_s", "reward_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"run.{name} = {getattr(self, name)} must be above 0")
        if self.task and self.task not in TASKS:
            raise ConfigError(f"run.task = {self.task!r} is not known{did_you_mean(self.task, TASKS)}")
        if bool(self.task) == bool(self.prompts_file):
            raise ConfigError(
                f"run.task = {self.task!r} and run.prompts_file = {self.prompts_file!r}: give one of them, the prompts "
                "of a task or those of a file"
            )
        for name in ("held_out", "prompt_column"):
            if self.task and getattr(self, name) != getattr(RunKeys, name):
                raise ConfigError(
                    f"run.{name} = {getattr(self, name)!r} has no effect under run.task = {self.task!r}, which has no "
                    "file of prompts: leave it out"
                )
        if self.prompts * self.responses % self.mini_batch:
            raise ConfigError(
                f"run.mini_batch = {self.mini_batch} must divide the responses of a step, {self.prompts} x "
                f"{self.responses} = {self.prompts * self.responses}"
            )
        check_names(self.metrics)


@dataclass(frozen=True, kw_only=True)
class RewardKeys:
    """A reward, or a cost: numbers that a Python function `module:function`, or a model, gives to responses."""

    function: str = ""
    model: str = ""  # Hugging Face folder of a model with one output
    weight: float = 1.0

    def __post_init__(self) -> None:
        if bool(self.function) == bool(self.model):
            raise ConfigError(
                f"a reward with function = {self.function!r} and model = {self.model!r}: give one of them, and "
                "[[reward]] again for another"
            )
        if not math.isfinite(self.weight):
            raise ConfigError(f"a reward with weight = {self.weight}: must be a finite number")


@dataclass(frozen=True, kw_only=True)
class RlConfig:
    """A run, resolved."""

    model: ModelConfig
    cluster: Cluster
    plan: Plan
    run: RunKeys
    reward: tuple[RewardKeys, ...]
    cost: RewardKeys | None = None
    algorithm: Algorithm = field(default_factory=Algorithm)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    weights: str = ""  # Hugging Face folder; empty: from the seed

    @property
    def rewards(self) -> tuple[RewardKeys, ...]:
        """Rewards and the cost."""
        return (*self.reward, *(() if self.cost is None else (self.cost,)))

    @property
    def sequence(self) -> int:
        """Labels of a row: all tokens of the longest prompt and response but the first."""
        return self.run.max_prompt + self.run.max_response - 1

    @property
    def rollout_is_exact(self) -> bool:
        """Whether generation finds the log-probabilities of training but for rounding in fp32: nothing is coded on its
        way, and no weights of rollout against training are asked for.
        """
        formats = {self.plan.compute, self.plan.messages or "fp32"}
        return formats == {"fp32"} and not self.plan.wire and self.algorithm.importance_bound is None

    def num_micros(self, batch: int) -> int:
        """Micro-batches of a data rank for a step of `batch` rows; raises `PlanError` where they do not fit."""
        return num_micro_batches(self.plan, Layout.of(self.cluster, self.plan), batch)


def resolve(
    task: str | None, path: str | None, flags: Mapping[str, str | None], overrides: Mapping[str, Any]
) -> RlConfig:
    """The checked configuration; raises the `TerraceError` of the first mistake."""
    return parse(resolve_table(task, path, flags, overrides))


def resolve_table(
    task: str | None, path: str | None, flags: Mapping[str, str | None], overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """Table of a run, not checked yet."""
    own: dict[str, Any] = {} if path is None else _with_paths(dict(read_table(Path(path))), Path(path).parent)
    of_run = own.get("run")
    name = task or (of_run.get("task", "") if isinstance(of_run, Mapping) else "")
    if name and name not in TASKS:
        raise ConfigError(f"task {name!r} is not known{did_you_mean(str(name), TASKS)}")
    table: dict[str, Any] = {}
    if name:
        table = merge(read_table(Path(str(resources.files(__package__) / f"{name}.toml"))), {"run": {"task": name}})
    for key, value in own.items():
        # A name or a file takes the place of a task's table.
        table = table | {key: value} if key in ("cluster", "plan", "model") else merge(table, {key: value})
    table |= {key: value for key, value in flags.items() if value is not None}
    if isinstance(table.get("model"), str) and Path(table["model"]).is_dir():
        table.setdefault("weights", str(Path(table["model"]).resolve()))
    for key in ("model", "cluster", "plan"):
        if key in table:
            table[key] = section(key, table[key])
    # A command line names files as its shell does.
    return merge(table, _with_paths(overrides, Path()))


def _with_paths(table: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """`table` with absolute names of files, which are relative to `folder`: that of the file that has them."""
    found = dict(table)
    for key in ("model", "cluster", "plan"):
        if isinstance(found.get(key), str) and (folder / found[key]).exists():
            found[key] = str((folder / found[key]).absolute())
    found |= _absolute(found, "weights", folder)
    # What is no table is refused by whoever reads the sections.
    for section_name, key in (("run", "prompts_file"), ("cost", "model")):
        if section_name in found:
            found[section_name] = _absolute(found[section_name], key, folder)
    if isinstance(found.get("reward"), list):
        found["reward"] = [_absolute(each, "model", folder) for each in found["reward"]]
    return found


def _absolute(table: Any, key: str, folder: Path) -> Any:
    if not isinstance(table, Mapping) or not isinstance(table.get(key), str) or not table[key]:
        return table
    return {**table, key: str((folder / table[key]).absolute())}


def parse(table: Mapping[str, Any]) -> RlConfig:
    """Builds and checks a run from its whole table."""
    known = [item.name for item in fields(RlConfig)]
    for name in table:
        if name not in known:
            raise ConfigError(f"unknown section {name!r}{did_you_mean(name, known)}")
    if "run" not in table:
        raise ConfigError("section [run] is missing: give --task sort, or --config FILE with one")
    run = load(RunKeys, table["run"], "run")
    for name in ("cluster", "plan", "model"):
        if name not in table:
            raise ConfigError(f"section [{name}] is missing: give --{name}")
        if not isinstance(table[name], Mapping):
            raise ConfigError(f"{name} = {table[name]!r} must be a table, or the name of one or of its file")
    if not isinstance(table.get("weights", ""), str):
        raise ConfigError(f"weights = {table['weights']!r} must be the name of a folder")
    cluster = parse_cluster(dict(table["cluster"]))
    optimizer = load(OptimizerConfig, table.get("optimizer", {}), "optimizer")
    plan = replace(command_plan(table["plan"], cluster), update=optimizer.update)
    rewards = table.get("reward", [])
    if not isinstance(rewards, list) or not rewards:
        raise ConfigError('reward is missing: write [[reward]] for each, with function = "module:function"')
    config = RlConfig(
        model=parse_model(table["model"]),
        cluster=cluster,
        plan=plan,
        run=run,
        reward=tuple(load(RewardKeys, each, f"reward[{index}]") for index, each in enumerate(rewards)),
        cost=load(RewardKeys, table["cost"], "cost") if "cost" in table else None,
        algorithm=algorithm_of(table.get("algorithm", {})),
        optimizer=optimizer,
        weights=table.get("weights", ""),
    )
    _check(config)
    return config


def to_toml_table(config: RlConfig) -> dict[str, Any]:
    """The resolved configuration; `parse` reads it back to an equal value."""
    table = {item.name: dump(getattr(config, item.name)) for item in fields(config)}
    table["model"] = dump(to_table(config.model))
    return {name: value for name, value in table.items() if value is not None and value != ""}


def _check(config: RlConfig) -> None:
    algorithm, run = config.algorithm, config.run
    if algorithm.kl_coefficient and not run.reference:
        raise ConfigError(
            f"algorithm.kl_coefficient = {algorithm.kl_coefficient} needs the reference: leave out run.reference"
        )
    if (config.cost is not None) != (algorithm.name == "safe-rlhf"):
        raise ConfigError(
            f"[cost] and algorithm.name = {algorithm.name!r}: exactly safe-rlhf has a cost, by a function"
        )
    if config.cost is not None and config.cost.weight != 1:
        raise ConfigError(
            f"cost.weight = {config.cost.weight} has no effect: the multiplier weighs the cost; leave it out, or set "
            "algorithm.multiplier"
        )
    drawn = run.prompts * run.responses
    if algorithm.kl_target is not None and drawn >= 5 * algorithm.kl_horizon:
        raise ConfigError(
            f"algorithm.kl_horizon = {algorithm.kl_horizon:g}: a step of {drawn} responses could turn the sign of the "
            f"coefficient; it must be above {drawn / 5:g}"
        )
    if algorithm.entropy and any(Mesh.of(config.cluster, config.plan).total(axis) > 1 for axis in TENSOR):
        raise ConfigError(
            f"algorithm.entropy = {algorithm.entropy} has no form where a tensor axis cuts the vocabulary: leave it "
            "out, or give the ranks of that axis to another"
        )
    _check_task(run)
    if run.start_steps and not run.task:
        raise ConfigError(f"run.start_steps = {run.start_steps}: only a task has right responses; leave it out")
    if algorithm.name not in NEEDS_CRITIC and run.critic_lr != RunKeys.critic_lr:
        raise ConfigError(
            f"run.critic_lr = {run.critic_lr} has no effect: algorithm.name = {algorithm.name!r} has no critic"
        )
    config.num_micros(run.mini_batch)
    if run.start_steps:
        config.num_micros(run.start_batch)


def _check_task(run: RunKeys) -> None:
    if run.task and run.max_prompt < LONGEST_PROMPT:
        raise ConfigError(
            f"run.max_prompt = {run.max_prompt}: prompts of task {run.task!r} have up to {LONGEST_PROMPT} tokens; "
            "raise it"
        )
    if run.task and run.start_steps and run.max_response < LONGEST_RESPONSE:
        raise ConfigError(
            f"run.max_response = {run.max_response}: the responses that a supervised start learns have up to "
            f"{LONGEST_RESPONSE} tokens; raise it, or set run.start_steps = 0"
        )

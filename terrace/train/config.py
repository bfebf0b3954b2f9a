"""The configuration of a run: one file plus dotted overrides, resolved and checked before anything starts.

Layers, each overriding the one before: the embedded default, the `[task]` of the plan's file (terrace.train.planned),
the file of `--config`, the flags `--model`, `--cluster`, `--plan` (a name or a file replaces the whole section),
`--data`, then `--section.key value`. Relative paths in a file are relative to that file; in a flag, to the working
directory.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

import tomli_w

from terrace.base.errors import ConfigError, ModelError, PlanError, did_you_mean
from terrace.base.schema import dump, load, merge, read_table
from terrace.base.words import counted
from terrace.cluster.cluster import Cluster
from terrace.cluster.presets import UNNAMED, cluster_table, lay_over, parse_cluster, preset_names
from terrace.data.config import PATHS, DataConfig
from terrace.data.sources import beside, eval_beside
from terrace.model.block_operations import layer_operations
from terrace.model.blocks import block_specs
from terrace.model.config import ModelConfig, parse_model, to_table
from terrace.model.experts.balance import BalanceConfig
from terrace.model.facts import longest_row, with_scalar_head
from terrace.model.lora.config import LoraConfig, with_adapters
from terrace.model.spec import BlockSpec, freeze
from terrace.plan.balance_rules import check_balance, telling_choices
from terrace.plan.layout import Layout
from terrace.plan.mesh import Mesh
from terrace.plan.plan import Plan
from terrace.plan.presets import PRESETS, command_plan
from terrace.plan.routes import lossy_messages
from terrace.plan.validate import num_micro_batches, validate
from terrace.runtime.settings import OptimizerConfig
from terrace.train.eval_rules import check_evaluation
from terrace.train.folder import with_folder
from terrace.train.keys import TrainConfig
from terrace.train.pair_rules import check_objective, with_whole_pairs
from terrace.train.planned import TASK, read_planned
from terrace.train.rates import with_rate
from terrace.train.rules import check_attention, check_kernels, check_moved, check_positions, parts_of

if TYPE_CHECKING:
    from terrace.simulate.step import Step

Here = Callable[[Any], Any]  # of the value of section cluster, UNNAMED where none is
_WHOLE = ("model", "cluster", "plan")  # sections that a name or a file replaces as a whole
OF_FEEDBACK = ("run", "algorithm", "reward", "cost", "pool", "plans", "weights")  # sections of terrace rl alone
_KEYED = ("train", "optimizer", "data", "plan")  # sections whose keys are those of one dataclass


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    model: ModelConfig
    cluster: Cluster
    plan: Plan
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lora: LoraConfig | None = None  # only adapters train
    balance: BalanceConfig | None = None  # losses of the routers of mixtures

    def blocks(self) -> tuple[BlockSpec, ...]:
        """Block specs with frozen parameters marked."""
        specs = telling_choices(self.balance, block_specs(self.model))
        return freeze(specs if self.lora is None else with_adapters(specs, self.lora), self.train.freeze)

    @property
    def has_documents(self) -> bool:
        """Whether a sequence may hold several documents, which attend only to themselves."""
        return any(source.documents != "join" for source in self.data.sources())

    @property
    def on_pairs(self) -> bool:
        """Whether it trains on pairs of responses."""
        return self.train.objective != "next-token"

    @property
    def rows(self) -> int:
        """Sequences of a step; a pair has two."""
        return self.train.batch * (2 if self.on_pairs else 1)

    @property
    def batch_words(self) -> str:
        """The batch of a step in words."""
        return counted(self.train.batch, "pair" if self.on_pairs else "sequence")

    def num_micros(self) -> int:
        return num_micro_batches(self.plan, Layout.of(self.cluster, self.plan), self.rows)

    def step(self) -> "Step":
        """A step of the run, to be predicted on the figures of the cluster's file."""
        # Imported here: many commands read a run and predict nothing.
        from terrace.simulate.footprint import work_of
        from terrace.simulate.step import Step

        return Step(
            cluster=self.cluster,
            plan=self.plan,
            blocks=self.blocks(),
            num_micros=self.num_micros(),
            sequence=self.train.sequence,
            work=work_of(
                self.cluster,
                self.plan,
                layer_operations(self.model),
                self.train.sequence,
                documents=self.has_documents,
                attention=self.train.attention,
                served=parts_of(self),
            ),
        )


def resolve(config_path: str | None, flags: Mapping[str, str | None], overrides: Mapping[str, Any]) -> RunConfig:
    """The checked configuration.

    `flags` may hold model, cluster, plan and data; `overrides` is the nested table of dotted overrides. Raises the
    `TerraceError` of the first mistake.
    """
    return parse_run(resolve_table(config_path, flags, overrides))


def resolve_table(
    path: str | None, flags: Mapping[str, str | None], overrides: Mapping[str, Any], here: Here | None = None
) -> dict[str, Any]:
    """Table of a run, not checked yet; arguments and errors as for `resolve`. `here` replaces the cluster's name."""
    table = read_table(Path(str(resources.files(__package__) / "default.toml")))
    table |= {} if here is None else {"cluster": UNNAMED}
    folder = Path() if path is None else Path(path).parent
    own = {} if path is None else read_table(Path(path))
    if path is not None and not own:
        raise ConfigError(
            f"{path} has no key, so it changes nothing: give it a section, such as [train], or leave it out"
        )
    # A plan's file may carry the task that it was made for, with its model and cluster.
    planned = read_planned(flags["plan"] if flags.get("plan") is not None else _beside(folder, "plan", own.get("plan")))
    if planned is not None:
        table = merge(table, {"train": planned.train}) | {"model": planned.model, "cluster": planned.cluster}
    # Order of the layers: defaults, the plan's task, the file, the flags, the dotted overrides.
    table = _lay_over(table, own, folder)
    for name in _WHOLE:
        if flags.get(name) is not None:
            table[name] = flags[name]
    if flags.get("data") is not None:
        table = merge(table, {"data": {"path": flags["data"]}})
    table |= {} if here is None else {"cluster": here(table["cluster"])}
    # The model's path is needed below, after `section` has replaced it by its table.
    model = table.get("model")
    table = lay_over({name: section(name, value) for name, value in table.items()}, overrides)
    data = [given.get("data") for given in (own, overrides)]
    names_tokenizer = any(isinstance(given, Mapping) and "tokenizer" in given for given in data)
    return with_rate(with_folder(_with_formats(table), model, names_tokenizer), (own, overrides))


def _with_formats(table: dict[str, Any]) -> dict[str, Any]:
    data, train = table.get("data"), table.get("train")
    if not isinstance(data, Mapping) or not {"path", "mixture", "eval"} & data.keys():
        return table
    # Imported here: without data of their own, most commands read none.
    from terrace.data.found_format import with_formats

    on_pairs = isinstance(train, Mapping) and train.get("objective", "next-token") != "next-token"
    return table | {"data": with_formats(data, on_pairs=on_pairs)}


def parse_run(table: Mapping[str, Any]) -> RunConfig:
    """Builds and checks a run from its whole table; numbers that its plan leaves out are chosen
    (`terrace.planner.micro_and_unit`).
    """
    run = parse_sections(table)
    _check(run)
    free = [name for name in ("micro_batch", "unit") if name not in table["plan"]]
    # Where no choice fits, a micro-batch of a pair stays.
    run = with_whole_pairs(run, free)
    return _with_best_numbers(run, free) if free else run


def parse_sections(table: Mapping[str, Any]) -> RunConfig:
    """Builds a run from its whole table, each section by itself: whether the sections fit together is not checked."""
    # Unknown sections first: a misspelt one would otherwise show as missing.
    known = [item.name for item in fields(RunConfig)]
    for name, value in table.items():
        if name not in known:
            of_rl = "; that is a section of terrace rl" if name in OF_FEEDBACK else ""
            raise ConfigError(f"unknown section {name!r}{of_rl or did_you_mean(name, known)}")
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name} = {value!r} must be a table of keys")
    for name in ("model", "cluster", "plan", "train"):
        if name not in table:
            raise ConfigError(f"section [{name}] is missing")
    for name, value in table.items():
        _check_places(name, value)
    cluster = parse_cluster(dict(table["cluster"]))
    optimizer = load(OptimizerConfig, table.get("optimizer", {}), "optimizer")
    train = load(TrainConfig, table["train"], "train")
    model = parse_model(table["model"])
    return RunConfig(
        # A reward model begins from any model; its score may be new.
        model=with_scalar_head(model) if train.objective == "reward" else model,
        cluster=cluster,
        plan=_plan(table["plan"], cluster, optimizer),
        data=load(DataConfig, table.get("data", {}), "data"),
        train=train,
        optimizer=optimizer,
        lora=load(LoraConfig, table["lora"], "lora") if "lora" in table else None,
        balance=load(BalanceConfig, table["balance"], "balance") if "balance" in table else None,
    )


def _with_best_numbers(run: RunConfig, free: Sequence[str]) -> RunConfig:
    # Imported here: a finished run names its numbers, and who reads it needs no planner.
    from terrace.planner.micro_and_unit import with_best_numbers

    return replace(run, plan=with_best_numbers(run.step(), free, multiple_of=2 if run.on_pairs else 1).plan)


def sections_with(key: str) -> list[str]:
    """Sections of a run that have a key of this name."""
    hints = {name: hint for name, hint in get_type_hints(RunConfig).items() if name in _KEYED} | {"lora": LoraConfig}
    return [name for name, hint in hints.items() if any(item.name == key for item in fields(hint))]


def _check_places(name: str, table: Mapping[str, Any]) -> None:
    # A learning rate is easily put into [train].
    for key in table if name in _KEYED else ():
        found = sections_with(str(key))
        if found and name not in found:
            raise ConfigError(f"unknown key {name}.{key}; did you mean '{found[0]}.{key}'?")


def _plan(table: Mapping[str, Any], cluster: Cluster, optimizer: OptimizerConfig) -> Plan:
    # A plan's memory and FLOPs depend on the optimizer, so one made for another must not be used silently.
    update = table.get("update", optimizer.update)
    if update != optimizer.update:
        raise ConfigError(
            f"the plan was made for plan.update = {update!r}, and the optimizer is {optimizer.update!r}: leave "
            "plan.update out, or name the same optimizer"
        )
    return replace(command_plan(table, cluster), update=optimizer.update)


def run_toml(run: RunConfig) -> str:
    """The resolved configuration as TOML; `parse_run` reads it back to an equal value."""
    table = {item.name: dump(getattr(run, item.name)) for item in fields(run) if getattr(run, item.name) is not None}
    table["model"] = dump(to_table(run.model))
    return tomli_w.dumps(table)


def section(name: str, value: Any) -> Any:
    """Table of a section that may be given by name or path; the `[task]` of a plan's file is left out."""
    if not isinstance(value, str) or name not in _WHOLE:
        return value
    if not value:
        raise ConfigError(f"{name} is empty: name a file, or leave it out")
    if name == "cluster":
        return cluster_table(value)
    if name == "model":
        if not os.path.exists(value):
            raise ConfigError(
                f"cannot read {value}: No such file or directory; --model takes a folder or a config.json, so download "
                "a model of the Hub first (hf download NAME --local-dir FOLDER)"
            )
        if Path(value).suffix in (".safetensors", ".bin", ".pt", ".gguf"):
            raise ConfigError(f"{value} is a file of weights: give its folder, which also has the config.json")
        from terrace.model.hf.folder import read_model_table  # here, since few runs name a file

        return read_model_table(value)
    if value in PRESETS:
        return {"preset": value}
    if Path(value).suffix not in (".toml", ".json") and not os.path.exists(value):
        raise PlanError(f"no plan preset or file {value!r}{did_you_mean(value, PRESETS)}")
    if os.path.isdir(value):
        raise PlanError(
            f"{value} is a folder, not a plan: name a preset or a file; a run's own plan is in its config.toml"
        )
    table = read_table(Path(value))
    if name == "plan" and isinstance(table.get("plan"), (str, dict)):
        raise PlanError(f"{value} is the file of a run, not of a plan alone: give it as --config {value}")
    return {key: given for key, given in table.items() if key != TASK}


def _check(run: RunConfig) -> None:
    # Each section was checked by itself; here are the rules across sections.
    blocks = run.blocks()
    validate(run.cluster, run.plan, blocks)
    check_objective(run)
    check_evaluation(run)
    check_attention(run)
    check_kernels(run)
    check_positions(run)
    run.num_micros()
    if 0 < (most := longest_row(run.model)) < run.train.sequence:
        raise ModelError(
            f"train.sequence = {run.train.sequence} is longer than the {most} positions the "
            f"model has: use at most {most}"
        )
    check_balance(run.balance or BalanceConfig(), Mesh.of(run.cluster, run.plan), run.plan, blocks)
    if run.balance is not None and run.balance.bias:
        check_moved(run, blocks)
    lossy = [message.value for message in lossy_messages(Layout.of(run.cluster, run.plan), run.plan)]
    for name in run.train.error_budget:
        if name not in lossy:
            raise ConfigError(
                f"train.error_budget.{name} has no effect: the messages that round in a block format are "
                f"{', '.join(lossy) or 'none'}{did_you_mean(name, lossy)}"
            )
    if run.train.peer_copies and run.plan.outer is not None:
        # Every step must end on all ranks before a copy of the next begins, and islands wait for none of their steps.
        raise ConfigError(
            "train.peer_copies = 1 copies a state that all ranks have at once, and islands (plan.outer) go on apart: "
            "leave one of them out; checkpoints on disk hold islands"
        )
    if not any(block.num_trainable for block in blocks):
        raise ModelError(f"train.freeze = {list(run.train.freeze)} freezes every parameter: leave something to train")


def _lay_over(table: Mapping[str, Any], own: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    result = merge(table, {name: value for name, value in own.items() if name not in _WHOLE})
    # These sections replace the layer below as a whole; the others merge key by key.
    result |= {name: _beside(folder, name, own[name]) for name in _WHOLE if name in own}
    data = own.get("data")
    if isinstance(data, Mapping):
        paths = {key: at for key, at in data.items() if key in PATHS and isinstance(at, str)}
        named: dict[str, Any] = {key: str(folder / at) for key, at in paths.items() if at not in ("", PATHS[key])}
        named |= {"mixture": beside(folder, data["mixture"])} if "mixture" in data else {}
        named |= {"eval": eval_beside(folder, data["eval"])} if "eval" in data else {}
        result["data"] = merge(result["data"], named)
    train = own.get("train")
    if isinstance(train, Mapping) and isinstance(train.get("weights"), str) and train["weights"]:
        result["train"] = merge(result["train"], {"weights": str(folder / train["weights"])})
    return result


def _beside(folder: Path, name: str, value: Any) -> Any:
    presets = {"cluster": preset_names(), "plan": list(PRESETS), "model": []}[name]
    if not isinstance(value, str) or not value or value in presets:
        return value
    path = folder / value
    # A bare word that is no file is more likely a misspelt preset, whose error then shows it as written.
    return str(path) if name == "model" or path.suffix or os.path.exists(path) else value

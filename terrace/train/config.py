"""The configuration of a run: its sections, read from tables and written as TOML.

`terrace.train.layers` makes the tables, `terrace.train.rules` checks rules across sections, and `terrace.train.resolve`
chooses the numbers that a plan leaves out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, get_type_hints

import tomli_w

from terrace.base.errors import ConfigError, did_you_mean
from terrace.base.products import run_kinds
from terrace.base.schema import dump, load
from terrace.base.words import counted
from terrace.cluster.cluster import Cluster
from terrace.cluster.presets import parse_cluster
from terrace.data.config import DataConfig
from terrace.model.balance import BalanceConfig
from terrace.model.blocks import block_specs, with_loss_beside
from terrace.model.config import ModelConfig, parse_model, to_table
from terrace.model.facts import with_scalar_head
from terrace.model.lora.config import LoraConfig, with_adapters
from terrace.model.spec import BlockSpec, freeze
from terrace.plan.balance_rules import with_exchanged_choices
from terrace.plan.layout import Layout
from terrace.plan.mesh import Mesh
from terrace.plan.plan import Plan
from terrace.plan.presets import command_plan
from terrace.plan.pruning import NO_PRUNING, BlockPruning
from terrace.plan.update import QK_CLIP
from terrace.plan.validate import num_micro_batches
from terrace.runtime.settings import OptimizerConfig
from terrace.train.elastic_keys import NO_ROSTER, ElasticConfig
from terrace.train.keys import ON_PAIRS, TrainConfig
from terrace.train.teacher_keys import NO_TEACHER, TeacherConfig, teacher_model

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
    teacher: TeacherConfig = NO_TEACHER  # whose distributions the model learns
    prune: BlockPruning = NO_PRUNING  # blocks of matrices that are set to zero
    elastic: ElasticConfig = NO_ROSTER  # the roster that the run is an island of

    def blocks(self) -> tuple[BlockSpec, ...]:
        """Block specs with frozen parameters marked, and adapters if the run has any."""
        specs = with_exchanged_choices(self.balance, block_specs(self.model))
        if self.teacher.is_online:
            specs = with_loss_beside(specs, teacher_model(self.teacher.model), self.teacher.num_labels)
        return freeze(specs if self.lora is None else with_adapters(specs, self.lora), self.train.freeze)

    @property
    def has_documents(self) -> bool:
        """Whether a sequence may hold several documents with attention kept within each."""
        return any(source.documents != "join" for source in self.data.sources())

    @property
    def on_pairs(self) -> bool:
        return self.train.objective in ON_PAIRS

    @property
    def rows(self) -> int:
        """Sequences per step; a pair counts as two."""
        return self.train.batch * (2 if self.on_pairs else 1)

    @property
    def batch_words(self) -> str:
        return counted(self.train.batch, "pair" if self.on_pairs else "sequence")

    @property
    def mesh(self) -> Mesh:
        return Mesh.of(self.cluster, self.plan)

    @property
    def layout(self) -> Layout:
        return Layout.of(self.cluster, self.plan)

    def num_micros(self) -> int:
        return num_micro_batches(self.plan, self.layout, self.rows)


def parse_sections(table: Mapping[str, Any]) -> RunConfig:
    """Builds a run from its whole table. Each section is checked by itself; whether they fit together is not."""
    # Unknown sections first: a misspelt one would otherwise show as missing.
    known = [item.name for item in fields(RunConfig)]
    for name, value in table.items():
        if name not in known:
            others = [kind.command for kind in run_kinds() if name in kind.sections]
            hint = f"; that is a section of terrace {others[0]}" if others else did_you_mean(name, known)
            raise ConfigError(f"unknown section {name!r}{hint}")
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
    prune = load(BlockPruning, table.get("prune", {}), "prune")
    return RunConfig(
        # A reward model begins from any model; its score may be new.
        model=with_scalar_head(model) if train.objective == "reward" else model,
        cluster=cluster,
        plan=_plan(table["plan"], cluster, optimizer, prune),
        data=load(DataConfig, table.get("data", {}), "data"),
        train=train,
        optimizer=optimizer,
        lora=load(LoraConfig, table["lora"], "lora") if "lora" in table else None,
        balance=load(BalanceConfig, table["balance"], "balance") if "balance" in table else None,
        teacher=load(TeacherConfig, table.get("teacher", {}), "teacher"),
        prune=prune,
        elastic=load(ElasticConfig, table.get("elastic", {}), "elastic"),
    )


def _plan(table: Mapping[str, Any], cluster: Cluster, optimizer: OptimizerConfig, prune: BlockPruning) -> Plan:
    # A plan's memory and FLOPs depend on the optimizer, so one made for another must not be used silently. QK-clip has
    # no state: a found plan, or a resumed run, may begin or end it.
    update = table.get("update", optimizer.group)
    if not isinstance(update, str) or update.removesuffix(QK_CLIP) != optimizer.group:
        raise ConfigError(
            f"the plan was made for plan.update = {update!r}, and the optimizer is {optimizer.update!r}: leave "
            "plan.update out, or name the same optimizer"
        )
    plan = replace(command_plan(table, cluster), update=optimizer.update)
    # Blocks are zero in the working copy alone.
    if prune.is_on and table.get("master_apart") is False:
        raise ConfigError(
            "plan.master_apart = false leaves [prune] no working copy in which blocks are zero: leave it out"
        )
    return replace(plan, master_apart=True) if prune.is_on else plan


def _check_places(name: str, table: Mapping[str, Any]) -> None:
    # A learning rate is easily put into [train].
    for key in table if name in _KEYED else ():
        found = sections_with(str(key))
        if found and name not in found:
            raise ConfigError(f"unknown key {name}.{key}; did you mean '{found[0]}.{key}'?")


def sections_with(key: str) -> list[str]:
    hints = {name: hint for name, hint in get_type_hints(RunConfig).items() if name in _KEYED} | {"lora": LoraConfig}
    hints |= {"teacher": TeacherConfig, "prune": BlockPruning}
    hints |= {"teacher": TeacherConfig, "elastic": ElasticConfig}
    return [name for name, hint in hints.items() if any(item.name == key for item in fields(hint))]


def run_toml(run: RunConfig) -> str:
    """The resolved configuration as TOML. `parse_run` restores an equal value."""
    values = {item.name: getattr(run, item.name) for item in fields(run)}
    absent = (None, NO_TEACHER, NO_PRUNING, NO_ROSTER)
    table = {name: dump(value) for name, value in values.items() if value not in absent}
    table["model"] = dump(to_table(run.model))
    return tomli_w.dumps(table)

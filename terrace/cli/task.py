"""Options of `terrace plan` that describe the task: model, cluster, batch, sequence."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from terrace.base.errors import ClusterError, ConfigError, PlanError
from terrace.base.schema import load
from terrace.base.words import counted, quantity
from terrace.cli.files import check_not_read, check_writable
from terrace.cli.here import named_table
from terrace.cli.overrides import parse_overrides
from terrace.cluster.cluster import Cluster
from terrace.cluster.named_software import run_by, software_named
from terrace.cluster.presets import lay_over, parse_cluster
from terrace.cluster.software import OWN
from terrace.model.blocks import num_active_params
from terrace.model.config import ModelConfig, load_model, parse_model
from terrace.model.facts import family_of, is_dense
from terrace.model.lora.config import LoraConfig, is_adapter, with_adapters
from terrace.model.spec import BlockSpec
from terrace.plan.as_software import axes_of, reductions
from terrace.plan.plan import AXES, FUSED, precision_of
from terrace.planner.pins import parse_axes
from terrace.planner.task import Task
from terrace.report.members import devices_words
from terrace.sequence.lengths import read_lengths
from terrace.train.planned import Planned, num_machines


def read_task(
    options: argparse.Namespace, rest: Sequence[str], planned: Planned | None = None, also: Sequence[str] = ()
) -> Task:
    """Task from the options; a plan's own task fills in missing ones. `also` names sections that the caller parses.

    Raises a `TerraceError` for an impossible task.
    """
    if planned is None:
        absent = [f"--{name}" for name in ("model", "cluster", "batch", "sequence") if getattr(options, name) is None]
        if absent:
            raise ConfigError(
                f"{', '.join(absent)} must be given, or --plan FILE with the [task] table of terrace plan"
            )
        # All of it is replaced by options.
        planned = Planned(model={}, cluster={}, train={"batch": 1, "sequence": 1})
    overrides = parse_overrides(rest, of_run=False)
    for section in overrides:
        if section not in ("cluster", "lora", *also):
            more = " and keys of a plan" if "plan" in also else ""
            raise ConfigError(
                f"--{section}: only figures of the cluster{more} can be set, as --cluster.key VALUE, and adapters, as "
                "--lora.rank 16; see --help"
            )
    table = dict(planned.cluster) if options.cluster is None else named_table(options.cluster)
    own = overrides.get("cluster", {})
    if not isinstance(own, Mapping):
        raise ConfigError(f"--cluster {own!r} must be a preset or a file")
    cluster = _resized(parse_cluster(lay_over({"cluster": table}, {"cluster": own})["cluster"]), options.nodes)
    cluster = run_by(cluster, software_named(options.software))
    if wrong := cluster.failures.restarts_prevail(cluster.world_size, num_machines(cluster)):
        raise ClusterError(wrong)
    task = task_on(
        cluster,
        model=parse_model(planned.model) if options.model is None else load_model(options.model),
        batch=planned.train["batch"] if options.batch is None else options.batch,
        sequence=planned.train["sequence"] if options.sequence is None else options.sequence,
        compute=options.compute,
    )
    if given := getattr(options, "lengths", None):
        task = replace(task, lengths=read_lengths(given, task.sequence))
    if "lora" not in overrides:
        return task
    return replace(task, declared=with_adapters(task.blocks, load(LoraConfig, overrides["lora"], "lora")))


def task_on(cluster: Cluster, *, model: ModelConfig, batch: int, sequence: int, compute: Any = None) -> Task:
    """A task in the dtype `compute`, by default the faster one of the device."""
    # As a run that names no dtype: terrace.plan.presets.command_plan.
    narrow = compute is None and cluster.device.bf16_slowdown > 1
    compute = compute or faster_dtype(cluster)
    return Task(
        model=model,
        cluster=cluster,
        batch=batch,
        sequence=sequence,
        compute=compute,
        messages="bf16" if narrow else None,
        master="fp64" if compute == "fp64" else "fp32",
        wire=reductions(cluster, {}),
        tensor_chunks=FUSED if cluster.device.software.messages.fuses else 1,
    )


def faster_dtype(cluster: Cluster) -> str:
    peaks = cluster.device.peak_flops_per_s
    return max(("bf16", "fp32"), key=lambda dtype: peaks.get(dtype, 0.0))


def _resized(cluster: Cluster, nodes: int | None) -> Cluster:
    if nodes is None:
        return cluster
    if nodes < 1:
        raise PlanError(f"--nodes {nodes}: the outermost tier {cluster.tiers[-1].name!r} has at least 1 member")
    return cluster.resized(nodes)


def task_words(task: Task) -> str:
    tiers = " x ".join(f"{tier.size} {tier.name}" for tier in reversed(task.cluster.tiers))
    narrow = "" if task.messages is None else f", parameters and gradients sent in {task.messages}"
    if any(is_adapter(param.name) for block in task.declared for param in block.params):
        narrow += "; adapters train: give train and simulate the same --lora keys"
    documents = f" of documents of {task.lengths.name}" if task.lengths else ""
    return (
        f"{decoder_words(task.model, task.blocks)}, {counted(task.batch, 'sequence')} x "
        f"{counted(task.sequence, 'token')}{documents} a step, in {task.compute}{narrow}\n"
        f"cluster {task.cluster.name}: {tiers} = {devices_words(task.cluster)}{software_words(task.cluster)}"
    )


def software_words(cluster: Cluster) -> str:
    """Which software runs the cluster, as the end of a sentence; "" for this runtime."""
    software = cluster.device.software
    return "" if software == OWN else f", run by {software.name}"


def as_option(cluster: Cluster) -> str:
    """The option that names the cluster's software, after a space; "" for this runtime."""
    software = cluster.device.software
    return "" if software == OWN else f" --as {software.name}"


def with_axes(cluster: Cluster, text: str) -> tuple[str, ...]:
    """The axes of `--axes` that the cluster's software is described for. Raises `ConfigError` for a named one that is
    not.
    """
    axes, software = parse_axes(text), cluster.device.software
    known = axes_of(software, axes)
    if text != "all" and (unknown := [axis for axis in axes if axis not in known]):
        raise ConfigError(
            f"--axes {text!r}: software {software.name!r} is not described with ranks on the {unknown[0]} axis; leave "
            f"it out ({', '.join(axes_of(software, AXES))} are), or leave --as out"
        )
    return known


def decoder_words(model: ModelConfig, blocks: Sequence[BlockSpec]) -> str:
    """Family and size of a model of these blocks."""
    size = quantity(sum(block.num_trainable for block in blocks), "").strip()
    active = "" if is_dense(model) else f" ({quantity(num_active_params(model), '').strip()} active)"
    return f"{family_of(model)} decoder of {size} parameters{active}"


def check_price(price: float | None) -> None:
    """Raises `ConfigError` for an invalid `--price`."""
    if price is not None and not 0 < price < 1e9:
        raise ConfigError(f"--price {price} must be a positive number")


def check_output(option: str, path: Path, options: argparse.Namespace) -> None:
    """Raises `ConfigError` if `option`'s file cannot be written. Called before any work, so that no result is lost."""
    check_writable(option, path)
    # With --force an output could otherwise overwrite the command's own input.
    inputs = ("plan", "model", "cluster", "lengths")
    check_not_read(option, path, {name: getattr(options, name, None) for name in inputs})
    if path.exists() and not options.force:
        raise ConfigError(f"{path} is there already: write --force to replace it, or give another {option}")


def with_formats(task: Task, plan: Any) -> Task:
    return replace(task, **precision_of(plan), wire=plan.wire)

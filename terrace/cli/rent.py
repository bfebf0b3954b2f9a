"""`terrace rent`: what it costs to train a model on machines that can be rented, by offer and size."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from terrace.base.errors import ClusterError, ConfigError, TerraceError
from terrace.base.schema import load, read_table
from terrace.base.words import counted, filled
from terrace.cli.files import check_count, check_not_read, check_page, check_writable, write_file
from terrace.cli.here import named_table
from terrace.cli.task import decoder_words, faster_dtype, task_on
from terrace.cli.terminal import Terminal
from terrace.cluster.cluster import Cluster
from terrace.cluster.presets import lay_over, parse_cluster
from terrace.model.blocks import block_specs
from terrace.model.config import ModelConfig, load_model
from terrace.planner.evaluate import step_of
from terrace.planner.headroom import settled
from terrace.planner.members import slowest
from terrace.planner.outlook import outlook
from terrace.planner.pins import Pins, parse_axes
from terrace.planner.rent import Market, Offer, Offers, Rented, priced
from terrace.planner.search import find
from terrace.planner.space import Space
from terrace.planner.task import Task, plan_of
from terrace.planner.verdicts import lack
from terrace.report.page import page_html
from terrace.report.plans import plan_words
from terrace.report.rent import answer_words, market_page, market_table, reasons_words
from terrace.report.training_cost import parse_tokens, tokens_words
from terrace.simulate.bands import band_of
from terrace.simulate.step import predict_step
from terrace.train.planned import num_machines

_NEEDED = ("offers", "model", "tokens", "batch", "sequence")


@dataclass(frozen=True, kw_only=True)
class _Training:
    model: ModelConfig
    batch: int
    sequence: int
    tokens: int
    axes: tuple[str, ...]
    limit: int

    def task(self, cluster: Cluster) -> Task:
        """The task on `cluster`. Under equal shares its slowest member decides, as in a search of plans."""
        alike = slowest(cluster, faster_dtype(cluster))
        return task_on(alike, model=self.model, batch=self.batch, sequence=self.sequence)

    def on(self, offer: Offer, cluster: Cluster, task: Task) -> Rented:
        """The row of an offer at one size: of its best plan, or with the reason why there is none."""
        size, devices = cluster.tiers[-1].size, cluster.world_size
        row = Rented(offer=offer, name=offer.name or cluster.name, num_nodes=size, num_devices=devices)
        space = Space(task=task, axes=self.axes, pins=Pins())
        found, evaluator = find(space, limit=self.limit)
        if not found.best:
            indivisible = f"a batch of {self.batch} does not divide over its {counted(devices, 'device')}"
            return replace(row, reason=lack(task, found.nearest) if found.nearest else indivisible)
        best = settled(space, evaluator, found.best, self.limit).best[0]
        plan, failures, goodput = plan_of(task, best.candidate), cluster.failures, 1.0
        machines, spares = num_machines(cluster), 0
        if failures.are_known:
            goodput = outlook(cluster, predict_step(step_of(task, plan)), machines).ways[0].goodput
            spares = (failures.spares or 0) * devices // machines
        row = replace(
            row,
            plan=plan_words(task, best.candidate),
            step_s=best.step_s,
            memory_bytes=best.needed_bytes,
            share=band_of(cluster, plan).share,
            goodput=goodput,
        )
        steps = -(-self.tokens // (self.batch * self.sequence))
        return priced(row, num_steps=steps, num_spares=spares, power_watts=cluster.device.power_watts)


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Prints the table and the answer, and writes the page; returns 0."""
    if absent := [f"--{name}" for name in _NEEDED if getattr(options, name) is None]:
        raise ConfigError(f"{', '.join(absent)} must be given")
    for name in ("batch", "sequence", "limit"):
        check_count(f"--{name}", getattr(options, name))
    page = None if options.page is None else Path(options.page)
    if page is not None:
        _check_page(page, options)
    elif options.force:
        raise ConfigError("--force has no effect without --page FILE: leave it out")
    training = _Training(
        model=load_model(options.model),
        batch=options.batch,
        sequence=options.sequence,
        tokens=parse_tokens(options.tokens),
        axes=parse_axes(options.axes),
        limit=options.limit,
    )
    offers = load(Offers, read_table(options.offers), "offers file")
    machines = list(_machines(offers, training))  # all are checked before the first search
    rows = [training.on(offer, cluster, task) for offer, cluster, task in machines]
    market = Market(rows=tuple(rows), days=offers.days, money=offers.money, currency=offers.currency)
    about = (
        f"{decoder_words(training.model, block_specs(training.model))}, {tokens_words(training.tokens)} in steps of "
        f"{counted(training.batch, 'sequence')} x {counted(training.sequence, 'token')}"
    )
    if page is not None:  # before anything is printed
        write_file("--page", page, page_html(market_page(market, about)))
    print(f"{filled(about)}\n")
    Terminal().print(market_table(market))
    print(filled("\n".join(filter(None, (reasons_words(market), answer_words(market))))))
    if page is not None:
        print(f"\nwrote {page}")
    return 0


def _machines(offers: Offers, training: _Training) -> Iterator[tuple[Offer, Cluster, Task]]:
    """Each offer with its cluster and the task at each size.

    Raises `ConfigError` for an offer whose cluster is invalid, or on which no plan can train the model.
    """
    for number, offer in enumerate(offers.offers, start=1):
        try:
            table: Mapping[str, Any] = {"cluster": named_table(offer.cluster)}
            whole = parse_cluster(lay_over(table, {"cluster": offer.keys})["cluster"])
            for size in offer.nodes or (whole.tiers[-1].size,):
                cluster = whole.resized(size)
                if wrong := cluster.failures.restarts_prevail(cluster.world_size, num_machines(cluster)):
                    raise ClusterError(wrong)
                yield offer, cluster, training.task(cluster)
        except TerraceError as error:
            raise ConfigError(f"offers file, offer {number}, cluster {offer.cluster}: {error}") from error


def _check_page(page: Path, options: argparse.Namespace) -> None:
    check_page("--page", page)
    check_writable("--page", page)
    check_not_read("--page", page, {"offers": options.offers, "model": options.model})
    if page.exists() and not options.force:
        raise ConfigError(f"--page {page} is there already: name a new file, or add --force to replace it")

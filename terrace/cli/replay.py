"""`terrace replay RUN --step N`: repeats a step of a run and inspects every block's results. RUN is only read.

`terrace replay RUN` repeats a whole run in one process from its log (terrace.cli.replay_logs).
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from terrace.base.errors import ConfigError
from terrace.cli.output import sigterm_raises
from terrace.cli.terminal import Terminal
from terrace.train.runs import read_trained


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Prints the table of a step; returns 0. Without a step: as `replay_log`."""
    if options.step is None:
        from terrace.cli.replay_logs import replay_log

        return replay_log(options.folder, options.log)
    if options.log is not None:
        raise ConfigError("--log is of a roster, all of whose exchanges are repeated: leave --step out")
    config = read_trained(options.folder, "which draws anew: replay takes a run of terrace train", teaches=True)
    if config.elastic.meet:
        raise ConfigError(
            f"{options.folder} is an island of a roster, whose steps depend on the others: leave --step out, and all "
            "exchanges are repeated from the log of terrace meet"
        )
    if not 1 <= options.step <= config.train.steps:
        raise ConfigError(f"--step {options.step}: the run has steps 1 to {config.train.steps}")
    from terrace.checkpoint.layout import complete, step_of
    from terrace.checkpoint.reading import newest_whole
    from terrace.cli.checks import check_memory_here
    from terrace.cli.here import check_alone
    from terrace.data.prepared import prepare_sources
    from terrace.data.tokenizer import load_tokenizer
    from terrace.launch.start import launch_local, local_devices
    from terrace.probe.machine import memory_bytes
    from terrace.report.table import Table
    from terrace.train.deals import Deals, read_deals
    from terrace.train.job import RunJob
    from terrace.train.joined import check_local
    from terrace.train.prediction import checked_programs, forget_programs, resolved_run
    from terrace.train.prepare import check_same_run
    from terrace.train.replay import replay_rank

    check_alone("replay")
    check_local(config.cluster)
    check_memory_here(config, local_devices(), memory_bytes())
    # A step from before every checkpoint that is left is reached from the initial values: the run's file says them.
    there = any(step_of(path) < options.step for path in complete(options.folder / "checkpoints"))
    checkpoint = newest_whole(options.folder, before=options.step)[0] if there else None
    tokenizer = load_tokenizer(config.data.tokenizer, config.data.bos, config.data.eos)
    sources = prepare_sources(config.data, tokenizer, config.train.sequence, lambda text: print(text, flush=True))
    if checkpoint is not None:
        check_same_run(checkpoint, config, sources, tokenizer)
    # Compiled blocks would hide what is looked at.
    config = replace(config, train=replace(config.train, compile=False))
    checked_programs(config)
    forget_programs()
    resolved, deals = resolved_run(config), read_deals(options.folder)
    first_shares = Deals(resolved.plan.shares, deals).at(0 if checkpoint is None else checkpoint.step)
    job = RunJob(
        run=replace(resolved, plan=replace(resolved.plan, shares=first_shares)),
        folder=options.folder,
        sources=sources,
        tokenizer_fingerprint=tokenizer.fingerprint,
        resume=None if checkpoint is None else checkpoint.folder,
        deals=deals,
    )
    begin = "its initial values" if job.resume is None else job.resume.name
    print(f"step {options.step} of {options.folder}, from {begin}", flush=True)
    with sigterm_raises():
        found = launch_local(config.cluster.world_size, replay_rank, (job, options.step))
    names = [spec.name for spec in config.blocks()]
    table = Table(
        title=f"Step {options.step}, block by block",
        headings=("rank", "micro-batch", "block", "loss per label", "gradient norm", "not finite"),
        left=("block", "not finite"),
        rows=(
            (str(rank), str(micro), names[block], _figure(loss), _figure(norm), bad)
            for rank, micro, block, loss, norm, bad in found.rows
        ),
    )
    Terminal().print(table)
    print("Gradient norms are of a block's parameters, from one micro-batch alone, before the division by labels.")
    print(f"step {options.step}: {_figures(found.loss, found.grad_norm)}{_recorded(options.folder, options.step)}")
    print(f"first: {found.first}" if found.first else "All results are finite.")
    return 0


def _figures(loss: float, norm: float) -> str:
    return f"loss {_figure(loss)}, gradient norm {_figure(norm)}"


def _recorded(folder: Path, step: int) -> str:
    from terrace.train.metrics import read_metrics

    path = folder / "metrics.jsonl"
    found = [each for each in read_metrics(path) if each.step == step] if path.is_file() else []
    return f"; in the run {_figures(found[-1].loss, found[-1].grad_norm)}" if found else ""


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}" if math.isfinite(value) else str(value)

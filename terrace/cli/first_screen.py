"""The terminal output before a run's processes start.

One line per fact: model, data, batch, plan, memory and messages, dtype. With the lines that the ranks print before the
first loss there are ten. Warnings follow. `verbose` adds tables of plan, memory and messages.
"""

import sys
from collections.abc import Sequence
from textwrap import fill

from terrace.base.words import counted, quantity
from terrace.cli.sections import print_sections
from terrace.data.batches import Batches, Source, SourceUse
from terrace.launch.start import pace
from terrace.model.facts import family_of
from terrace.plan.few_exchanges import few_exchanges
from terrace.plan.pruning import pruned_words
from terrace.probe.products import bf16_slowdown
from terrace.program.program import Program
from terrace.report.step_sections import blocks_section, bytes_section, memory_section, plan_section
from terrace.report.step_view import StepView, step_words
from terrace.report.tables import plan_summary
from terrace.runtime.compiled import compiles_words
from terrace.simulate.fullest import worst_words
from terrace.train.config import RunConfig
from terrace.train.folder import start_words
from terrace.train.job import RunJob
from terrace.train.prediction import checked_programs, forget_programs, job_of
from terrace.train.rates import rate_words
from terrace.train.rules import parts_words

_WIDTH = 80  # of a terminal


def show_plan(job: RunJob, verbose: bool = False) -> None:
    """Prints the model, the data, the plan and its predicted cost."""
    run, blocks = job.run, job.run.blocks()
    count = sum(block.num_trainable + block.num_frozen for block in blocks)
    lines = [
        f"{family_of(run.model)} decoder, {count / 1e6:.2f} M parameters in {counted(len(blocks), 'block')}; "
        f"{data_words(job, verbose)}",
        f"{counted(run.train.steps, 'step')} of {step_words(run)}",
    ]
    if job.resume is None and start_words(run):
        lines += filter(None, (start_words(run), rate_words(run)))
    print("\n".join(lines if verbose else (_folded(line) for each in lines for line in each.splitlines())))
    view = StepView(run, checked_programs(run))
    forget_programs()
    if verbose:
        print()
        for part in (plan_section, blocks_section, memory_section, bytes_section):
            print_sections(part(view))
        if run.train.compile:
            print(compiles_words(view.programs, run.train.kernels != "torch"))
    else:
        print("\n".join(map(_folded, (plan_summary(run.cluster, run.plan), _cost_words(view), *_warnings(run)))))
    for line in filter(
        None, (parts_words(run), pruned_words(run.prune, run.blocks()), *dtype_words(run, verbose), *_pace_words())
    ):
        print(line if verbose else _folded(line))
    if verbose:
        print()
    sys.stdout.flush()


def _cost_words(view: StepView) -> str:
    """Bytes of model state and of a step's messages, each on the rank with the most."""
    device, layout = view.run.cluster.device, view.programs[0].layout
    held = max(sum(report.memory_bytes.values()) for report in view.predicted.reports)
    sent = max(view.predicted.expected_bytes, key=lambda each: sum(each.values()))
    by_tier = {tier: sum(size for (_, where), size in sent.items() if where == tier) for tier in layout.tiers}
    words = f"state {quantity(held, 'B')} of {quantity(device.usable_bytes, 'B')} a rank"
    words += below_words(view.programs)
    words += f"; sends {quantity(sum(by_tier.values()), 'B')}"
    crossed = [tier for tier, size in by_tier.items() if size]
    # The outermost tier that messages cross is the slowest.
    if len(crossed) == 1:
        words += f" on {crossed[0]}"
    elif crossed:
        words += f" ({quantity(by_tier[crossed[-1]], 'B')} on {crossed[-1]})"
    return f"{words}; see --verbose"


def below_words(programs: Sequence[Program]) -> str:
    """What is kept below the device, on the rank with the most; "" for nothing."""
    each = [program.resting_bytes for program in programs]
    most = {medium: max(resting[medium] for resting in each) for medium in programs[0].plan.keep.media}
    return "".join(f", {quantity(size, 'B')} more on the {medium}" for medium, size in most.items() if size)


def _folded(words: str) -> str:
    return fill(words, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _warnings(run: RunConfig) -> list[str]:
    # With `verbose`, each is printed below the table that it is about.
    job = job_of(run)
    found = (worst_words(job, run.blocks(), run.train.sequence), few_exchanges(run.cluster, run.plan, run.train.steps))
    return [words for words in found if words]


def _pace_words() -> list[str]:
    # A paced run is slower on purpose: the screen must say so.
    rate = pace()
    return (
        [] if rate is None else [f"paced: every link at {rate:g} times the rate of the cluster's file (TERRACE_PACE)"]
    )


def dtype_words(run: RunConfig, verbose: bool = False) -> list[str]:
    """Why a run computes in its dtype, and what the other dtype would cost; empty if only one is possible."""
    plan, device = run.plan, run.cluster.device
    if plan.products is not None and device.type == "cpu":
        return [
            f"warning: plan.products = {plan.products!r} is emulated on a CPU: operands are rounded to 8 bits and "
            "multiplied in fp32, so a step learns as on a GPU and takes longer than without"
        ]
    if plan.compute == "bf16" and device.type == "cpu":
        slowdown = bf16_slowdown()
        if slowdown > 1:
            return [
                f'warning: plan.compute = "bf16": products take {slowdown:.1f} times as long as in fp32 on this CPU '
                '(measured); plan.compute = "fp32" with plan.messages = "bf16" sends as few bytes'
            ]
    if device.type == "cuda":
        return _peak_words(run, verbose)
    sends = run.cluster.world_size > 1
    if sends and plan.compute == "fp32" and plan.messages == "bf16" and device.bf16_slowdown > 1:
        times = f"{device.bf16_slowdown:.1f} times as long"
        if not verbose:
            return [f"computes in fp32, sends bf16: by the cluster's file bf16 takes {times}"]
        return [
            "computes in fp32, sends parameters and gradients in bf16:",
            f"  by the cluster's file the CPU takes {times} for products in bf16",
        ]
    return []


def _peak_words(run: RunConfig, verbose: bool) -> list[str]:
    plan, peaks = run.plan, run.cluster.device.peak_flops_per_s
    other = {"bf16": "fp32", "fp32": "bf16"}.get(plan.compute)
    if other is None or not {plan.compute, other} <= peaks.keys():
        return []
    own, times = quantity(peaks[plan.compute], "FLOP/s"), peaks[plan.compute] / peaks[other]
    gain = f"{times:.1f} times as long" if times >= 1 else f"{1 / times:.1f} times as fast"
    if not verbose:
        size = "twice the bytes" if other == "fp32" else "half the bytes"
        return [f"computes in {plan.compute} ({own}); --plan.compute {other}: {gain}, {size}"]
    rounds = "rounds less, in twice the bytes of parameters and activations" if other == "fp32" else "halves the bytes"
    return [
        f"computes in {plan.compute}, at up to {own} by the cluster's file, with {plan.master} masters",
        f"  --plan.compute {other} {rounds}: products at {quantity(peaks[other], 'FLOP/s')}, {gain}",
    ]


def data_words(job: RunJob, verbose: bool = True) -> str:
    """One line on the data, plus one per source of a mixture and one per packed source.

    Without `verbose`, a packed source has its own line only if it loses documents.
    """
    run, train = job.run, job.run.train
    uses = Batches(job.sources, train.sequence, run.rows, train.seed, run.data.holdout).uses(train.steps)
    count = _tokens(sum(source.tokens.num_tokens for source in job.sources))
    whole = [words for use in uses if verbose or _fates(use) for words in _packed_words(use, train.sequence)]
    # A single source needs no shares and epochs.
    if len(uses) == 1:
        held = f"; {counted(uses[0].num_holdout_samples, 'sequence')} held out" if uses[0].num_holdout_samples else ""
        return "\n".join([f"{count} of {job.sources[0].name}{held}", *whole])
    total = sum(source.weight for source in job.sources)
    each_of = zip(job.sources, uses, strict=True)
    lines = [_source_words(source, use, total) for source, use in each_of] if verbose else []
    return "\n".join([f"{count} of {len(uses)} sources", *lines, *whole])


def _source_words(source: Source, use: SourceUse, total: float) -> str:
    held = f", {use.num_holdout_samples} held out" if use.num_holdout_samples else ""
    return (
        f"  {use.name}: {source.weight / total:.1%} of the sequences, {_tokens(source.tokens.num_tokens)} in "
        f"{counted(use.num_samples, 'sequence')}, {use.epochs:.2f} epochs{held}"
    )


def _packed_words(use: SourceUse, sequence: int) -> list[str]:
    tally = use.tally
    # Only packed sources have a tally.
    if tally is None:
        return []
    return [
        f"  {use.name}: {counted(tally.num_documents, 'document')} packed whole into "
        f"{counted(tally.num_sequences, 'sequence')}, {tally.waste(sequence):.1%} of them padding"
        + "".join(f"; {fate}" for fate in _fates(use))
    ]


def _fates(use: SourceUse) -> list[str]:
    """How many of a packed source's documents are too long or left out, in words."""
    tally, fates = use.tally, list[str]()
    if tally is not None and tally.num_too_long:
        fates.append(f"{tally.num_too_long} longer than a sequence")
    if tally is not None and tally.num_untrained:
        fates.append(f"{tally.num_untrained} left out without a token to train on")
    return fates


def _tokens(count: int) -> str:
    return f"{count / 1e6:.1f} M tokens" if count >= 1e6 else f"{count / 1e3:.1f} k tokens"

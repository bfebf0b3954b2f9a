"""From a results file to docs/benchmarks/lab.md and lab.svg.

    python -m bench.lab.report runs/lab.jsonl [--folder docs/benchmarks]

With --check it exits 1 when a target that could be measured is missed.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.lab.job import ADAMW, CONTESTANTS, Entry, Job, contestant, floor
from bench.lab.picture import lab_svg
from bench.lab.results import LOSS_TOLERANCE, LOSSY, Case, Verdict, loss_spread, read, summarise, verdicts
from terrace.base.files import write_atomic

_MARKS = {True: "met", False: "**MISSED**", None: "not measured"}
Cases = Mapping[tuple[str, int], Case]


def page(records: Sequence[Mapping[str, Any]], job: Job) -> str:
    """The page in Markdown."""
    cases = summarise(records)
    accums = sorted({accum for _, accum in cases})
    parts = [
        "# The lab: one model on slow links, under Terrace and others",
        f"{_setting(records, cases, job)}",
        "![bars of step time and of bytes between nodes](lab.svg)",
        "## Targets",
        table(["target", "found", ""], [[v.target, v.found, _MARKS[v.met]] for v in verdicts(cases, job)]),
    ]
    for accum in accums:
        plural = "es" if accum > 1 else ""
        parts += [f"## {accum} micro-batch{plural} a step", _cases(cases, accum, job), _losses(cases, accum)]
    parts += ["Columns:", *_legend(), "## Where Terrace's time goes", _breakdown(cases, accums)]
    parts += ["## Settings", _settings(), "## What was not possible", _failures(cases), _RERUN]
    return "\n\n".join(parts) + "\n"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows))


def _setting(records: Sequence[Mapping[str, Any]], cases: Cases, job: Job) -> str:
    last = records[-1]
    shape = " x ".join(str(size) for size in reversed(list(job.tiers.values())))
    speed = "" if last["links"] in ("1", "none") else f", all {last['links']} times as fast"
    links = (
        "All ranks share the loopback: nothing is slow and no bytes are counted, so this is a trial, not the lab."
        if last["links"] == "none"
        else f"A package's link carries 800 Mbit/s, a node's 100 Mbit/s{speed}; inside a package nothing is limited."
    )
    loads = [record["load"] for record in records if "load" in record]
    size = max((case.num_params for case in cases.values()), default=0)
    return (
        f"{job.world_size} gloo ranks, {shape} (nodes, packages, ranks). {links}\n\n"
        f"Llama-style decoder, {size:,} parameters: {job.layers} layers, hidden {job.hidden}, vocabulary {job.vocab}, "
        f"untied; {job.micro_batch} x {job.sequence} byte tokens of the standard library's source a rank and "
        f"micro-batch. bf16 compute and wire, fp32 master, fused AdamW (lr {ADAMW.lr:g}, betas {ADAMW.beta1:g} and "
        f"{ADAMW.beta2:g}, decay {ADAMW.weight_decay:g} on matrices), gradients clipped at norm {ADAMW.clip:g}. "
        f"Same seed, same batches, same order for all.\n\n"
        f"{last['processor']}, {last['cores']} cores for all ranks (load average before a contestant "
        f"{min(loads, default=0):.1f} to {max(loads, default=0):.1f}), Linux {last['kernel']}, "
        f"Python {last['python']}, torch {last['torch']}, DeepSpeed {last['deepspeed']}. "
        "A rank is one process with one thread; times include waiting for a core."
    )


def _cases(cases: Cases, accum: int, job: Job) -> str:
    tiers = list(job.tiers)
    header = ["contestant", "step s", "best", "quartiles", "between nodes / S", "floor", *(f"{t} MB" for t in tiers)]
    header += ["CPU s", "optimizer MB", "peak RSS MB", "loss, first and last"]
    rows = []
    for entry in CONTESTANTS:
        case = cases.get((entry.name, accum))
        if case is not None:
            rows.append([_name(entry), *_cells(case, entry, job)])
    return table(header, rows)


def _cells(case: Case, entry: Entry, job: Job) -> list[str]:
    least = f"{floor(entry.inter_node, case.accum, job):.2f}"
    if case.error:
        return ["did not run", "", "", "", least, *("" for _ in job.tiers), "", "", "", ""]
    low, high = case.quartiles_s
    outer = case.in_s(list(job.tiers)[-1])
    sent = [f"{case.sent_bytes[tier] / 1e6:.1f}" if case.sent_bytes else "-" for tier in job.tiers]
    return [
        f"{case.median_s:.2f}",
        f"{min(case.steps_s):.2f}",
        f"{low:.2f} - {high:.2f} ({len(case.steps_s)})",
        "-" if outer is None else f"{outer:.2f}",
        least,
        *sent,
        "-" if case.cpu_s is None else f"{case.cpu_s:.1f}",
        f"{case.optimizer_bytes / 1e6:.1f}",
        f"{case.peak_growth_bytes / 1e6:.0f}",
        f"{case.losses[0]:.4f}, {case.losses[-1]:.4f}",
    ]


def _name(entry: Entry) -> str:
    return f"**{entry.label}**" if entry.is_ours else entry.label


def _losses(cases: Cases, accum: int) -> str:
    spread = loss_spread(cases, accum)
    words = "within" if spread <= LOSS_TOLERANCE else "**outside**"
    return (
        f"Losses of the same step differ by {spread:.1e} at most, {words} {LOSS_TOLERANCE:g} "
        f"({', '.join(LOSSY)} not counted: they round)."
    )


def _legend() -> list[str]:
    return [
        "- step: seconds from barrier to barrier, of the slowest rank; quartiles with the number of timed steps. Work "
        "that runs on after a step is waited for inside the last one.\n"
        "- MB and S: what the kernel's counters of the links say a step sends, summed over ranks, headers included; "
        "S is the bf16 bytes of all parameters. Floor: what the scheme needs on paper, without headers and scales.\n"
        "- CPU s: processor seconds of a step, all ranks together; divided by the cores, no step can be shorter.\n"
        "- optimizer: fp32 master and moments that a rank keeps, counted tensor by tensor.\n"
        "- peak RSS: growth of resident memory over the state before the model, largest rank, set-up left out.",
    ]


def _breakdown(cases: Cases, accums: Sequence[int]) -> str:
    ours = [case for case in cases.values() if case.time_s and not case.error]
    names = sorted({name for case in ours for name in case.time_s or {}})
    rows = [
        [contestant(case.name).label, str(case.accum), *(f"{(case.time_s or {}).get(name, 0.0):.2f}" for name in names)]
        for accum in accums
        for case in ours
        if case.accum == accum
    ]
    return "Seconds of a step, mean over ranks and timed steps.\n\n" + table(["plan", "accum", *names], rows)


def _settings() -> str:
    return table(["contestant", "settings"], [[_name(entry), entry.settings] for entry in CONTESTANTS]) + _NOTES


def _failures(cases: Cases) -> str:
    lines = [
        f"- {contestant(case.name).label}, accum {case.accum}: {case.error}" for case in cases.values() if case.error
    ]
    absent = [entry.label for entry in CONTESTANTS if not any(name == entry.name for name, _ in cases)]
    lines += [f"- not tried: {', '.join(absent)}"] if absent else []
    return "\n".join(lines) or "Everything ran."


_NOTES = """

FSDP2 here sums instead of averaging (gloo), gathers asynchronously with the next block prefetched in forward and
backward. For FSDP2 and DeepSpeed alike, gloo's reduce-scatter is replaced by a ring of sends and receives in
bf16 (`bench/lab/ring.py`): gloo's own sends as much as its all-reduce, twice the bytes, and an all-to-all crosses
from node to node four times the buffer where the ring crosses 1.75 times; either would flatter Terrace.
DeepSpeed uses torch's fused AdamW in place of its own, which needs a C++ build."""

_RERUN = """## Rerun it

```console
$ make bench-lab
```

It needs root, for network namespaces; see `bench/README.md`."""


def lines(found: Sequence[Verdict]) -> str:
    """The verdicts for a terminal."""
    return "\n".join(f"{_MARKS[v.met].strip('*'):12}  {v.target}: {v.found}" for v in found)


def main() -> int:
    """Write the page and the picture, print the verdicts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--folder", type=Path, default=Path("docs/benchmarks"))
    parser.add_argument("--check", action="store_true", help="exit 1 when a measured target is missed")
    options = parser.parse_args()
    records, job = read(options.results), Job()
    cases = summarise(records)
    found = verdicts(cases, job)
    write_atomic(options.folder / "lab.md", page(records, job))
    write_atomic(options.folder / "lab.svg", lab_svg(cases, job))
    print(lines(found))
    return 1 if options.check and any(verdict.met is False for verdict in found) else 0


if __name__ == "__main__":
    sys.exit(main())

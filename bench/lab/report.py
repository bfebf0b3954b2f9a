"""From a results file to docs/benchmarks/lab.md and its pictures.

    python -m bench.lab.report runs/lab.jsonl [--folder docs/benchmarks]

With --check it exits 1 when a target that could be measured is missed.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.claims import Claim
from bench.lab.entries import CONTESTANTS, TRIED_ACCUM, Entry, contestant
from bench.lab.job import ADAMW, MEMORY_LIMIT_BYTES, Job, floor
from bench.lab.links import FRONTIER, LAB, LOOPBACK, NODES, SEQUENCE, on_frontier, rate_words
from bench.lab.picture import lab_svg
from bench.lab.results import LOSS_TOLERANCE, LOSSY, Case, Cases, goals, loss_spread, read, summarise
from bench.lab.schedule import micro_batch_s, taken
from bench.summary import table
from terrace.base.files import write_atomic

Records = Sequence[Mapping[str, Any]]
Goals = Mapping[str, Claim | None]


def page(records: Records, job: Job) -> str:
    """The page in Markdown."""
    parts = ["# The lab: one model on slow links, under Terrace and others", _setting(records, job)]
    for links, cases in summarise(records).items():
        parts += _on_links(records, links, cases, job)
    parts += ["## Columns", *_legend(), "## Settings", _settings(), _NOTES, _RERUN]
    return "\n\n".join(parts) + "\n"


def _on_links(records: Records, links: str, cases: Cases, job: Job) -> list[str]:
    found = goals(cases, job, links, int(records[-1]["cores"]))
    parts = [
        f"## {_TITLES[links]}",
        _links_words(records, links, job),
        f"![bars of step time and of bytes between nodes]({picture_name(links)})",
        "### Targets",
        table(["target", "found", "goal", ""], [_verdict(name, claim) for name, claim in found.items()]),
        *_bounds(found),
    ]
    for accum in sorted({accum for _, accum in cases}):
        plural = "s" if accum > 1 else ""
        parts += [f"### {accum} sequence{plural} a rank and step", _cases(cases, accum, job), _losses(cases, accum)]
    parts += ["### Where Terrace's time goes", _breakdown(cases)]
    parts += ["### Settings tried", _TRIED, _trials(records, links)]
    return [*parts, "### What was not possible", _failures(cases)]


def _verdict(name: str, claim: Claim | None) -> list[str]:
    if claim is None:
        return [name, "-", "", "not measured"]
    return [name, claim.found_words, claim.goal_words, "met" if claim.is_met else "**MISSED**"]


def _bounds(found: Goals) -> list[str]:
    missed = [claim for claim in found.values() if claim and not claim.is_met and claim.bound]
    return ["\n".join(f"- {claim.name}: {claim.bound}" for claim in missed)] if missed else []


def picture_name(links: str) -> str:
    """File name of the picture of one kind of links."""
    return "lab-frontier.svg" if links == FRONTIER else "lab.svg"


def _setting(records: Records, job: Job) -> str:
    last = records[-1]
    shape = " x ".join(str(size) for size in reversed(list(job.tiers.values())))
    loads = [record["load"] for record in records if "load" in record]
    size = max((record.get("num_params", 0) for record in records), default=0)
    return (
        f"{job.world_size} gloo ranks, {shape} (nodes, packages, ranks), on two kinds of links.\n\n"
        f"Llama-style decoder, {size:,} parameters: {job.layers} layers, hidden {job.hidden}, vocabulary {job.vocab}, "
        f"untied; sequences of {job.sequence} byte tokens of the standard library's source. bf16 compute and wire, "
        f"fp32 master, fused AdamW (lr {ADAMW.lr:g}, betas {ADAMW.beta1:g} and "
        f"{ADAMW.beta2:g}, decay {ADAMW.weight_decay:g} on matrices), gradients clipped at norm {ADAMW.clip:g}. "
        f"Same seed, same sequences in each step for all.\n\n"
        f"{last['processor']}, {last['cores']} cores for all ranks (load average before a contestant "
        f"{min(loads, default=0):.1f} to {max(loads, default=0):.1f}), Linux {last['kernel']}, "
        f"Python {last['python']}, torch {last['torch']}, DeepSpeed {last['deepspeed']}. "
        "A rank is one process with one thread; times include waiting for a core. Each contestant has processes of "
        "its own."
    )


def _links_words(records: Records, links: str, job: Job) -> str:
    if links == LOOPBACK:
        return "All ranks share the loopback: nothing is slow and no bytes are counted: a trial, not the lab."
    here = next(record for record in records if record["links"] == links)
    words = f"{rate_words(here['rates'], here['scale'])}."
    if here["scale"] != 1:
        words += f" All are {here['scale']:g} times as fast as the setting asks for: a trial, not the lab."
    if links != FRONTIER:
        return words
    return f"{derivation()}\n\n{_derived(micro_batch_s(records), here['rates'], job)}\n\n{words}"


def derivation() -> str:
    """The proportion of compute and messages on Frontier, in words and numbers."""
    wanted = on_frontier()
    shares = wanted.shares()
    rows = [
        ["compute", "", f"{wanted.compute_s:.3f}", "1"],
        *(
            [tier, f"{wanted.gather_bytes[tier] / 1e9:.2f}", f"{wanted.gather_s[tier]:.3f}", f"{shares[tier]:.3f}"]
            for tier in wanted.gather_s
        ),
    ]
    proportion = " : ".join(["1", *(f"{share:.3f}" for share in shares.values())])
    return (
        f"The links stand to compute as on Frontier, for a GPT of {wanted.num_params / 1e9:.1f} B parameters (32 "
        f"layers of 7168, 56 heads) on {NODES} nodes = {8 * NODES} GCDs, one sequence of {SEQUENCE} tokens a "
        "micro-batch, nothing recomputed. Predicted by Terrace's own cost functions from the preset `frontier` "
        "(`bench/lab/links.py`): the seconds of a micro-batch's forward and backward kernel by kernel "
        "(`terrace.simulate.cost.step_costs`), and those of one gather of all parameters in bf16 over each tier "
        "(`terrace.simulate.links.hop_s` of each hop of ZeRO-3's gathers).\n\n"
        + table(["", "GB a rank sends", "seconds", "proportion"], rows)
        + f"\n\nCompute : package : node : system is **{proportion}**. ZeRO-3 gathers twice and reduces once: if none "
        f"of its messages were hidden, a micro-batch would take {1 + 3 * sum(shares.values()):.2f} times its compute. "
        "A flat ring sends more between nodes than messages by tier: 1.02 times on 48 nodes, 1.75 times on the 2 nodes "
        "here, which is in Terrace's favour."
    )


def _derived(compute_s: float | None, rates: Mapping[str, float], job: Job) -> str:
    if compute_s is None:
        return ""
    found = ", ".join(f"{tier} {rates[tier] / 1e6:.1f} MB/s" for tier in job.tiers)
    return (
        f"Here a micro-batch of one sequence takes {compute_s:.3f} s when all ranks compute at once on their shared "
        f"cores (the contestant `compute`), so that a rank's rates must be: {found}."
    )


def _cases(cases: Cases, accum: int, job: Job) -> str:
    tiers = list(job.tiers)
    header = ["contestant", "setting taken", "step s", "best", "quartiles", "between nodes / S", "floor"]
    header += [*(f"{tier} MB" for tier in tiers), "CPU s", "optimizer MB", "peak RSS MB", "loss, first and last"]
    rows = []
    for entry in CONTESTANTS:
        case = cases.get((entry.name, accum))
        if case is not None:
            rows.append([_name(entry), *_cells(case, entry, job)])
    return table(header, rows)


def _cells(case: Case, entry: Entry, job: Job) -> list[str]:
    if case.error:
        return ["did not run", *("" for _ in range(5 + len(job.tiers) + 4))]
    trial = entry.trial(case.trial)
    least = floor(trial.inter_node or entry.inter_node, case.accum // trial.cut(case.accum), job)
    low, high = case.quartiles_s
    outer = case.in_s(list(job.tiers)[-1])
    sent = [f"{case.sent_bytes[tier] / 1e6:.1f}" if case.sent_bytes else "-" for tier in job.tiers]
    over = " (over)" if case.peak_growth_bytes > MEMORY_LIMIT_BYTES else ""
    return [
        case.trial,
        f"{case.median_s:.2f}",
        f"{min(case.steps_s):.2f}",
        f"{low:.2f} - {high:.2f} ({len(case.steps_s)})",
        "-" if outer is None else f"{outer:.2f}",
        f"{least:.2f}",
        *sent,
        f"{case.cpu_s:.1f}",
        f"{case.optimizer_bytes / 1e6:.1f}",
        f"{case.peak_growth_bytes / 1e6:.0f}{over}",
        f"{case.losses[0]:.4f}, {case.losses[-1]:.4f}",
    ]


def _name(entry: Entry) -> str:
    return f"**{entry.label}**" if entry.is_ours else entry.label


def _losses(cases: Cases, accum: int) -> str:
    spread = loss_spread(cases, accum)
    words = "within" if spread <= LOSS_TOLERANCE else "**outside**"
    return (
        f"Losses of the same step differ by {spread:.1e} at most, {words} {LOSS_TOLERANCE:g} ({', '.join(LOSSY)} not "
        "counted: the plans round, and compute alone does not train)."
    )


def _trials(records: Records, links: str) -> str:
    rows = []
    for entry in CONTESTANTS:
        own = [r for r in records if (r["kind"], r["links"], r["contestant"]) == ("trials", links, entry.name)]
        best = taken(records, links, entry)
        for trial in entry.trials:
            found = next((record for record in own if record["trial"] == trial.name), None)
            if found is not None:
                mark = "taken" if best is not None and best.name == trial.name else ""
                rows.append([_name(entry), trial.name, *_tried(found), mark])
    return table(["contestant", f"micro-batches of {TRIED_ACCUM} sequences", "step s", "peak RSS MB", ""], rows)


def _tried(record: Mapping[str, Any]) -> list[str]:
    if "error" in record:
        return ["failed", ""]
    step = f"{min(record['steps_s']):.2f}"
    if record["dropped"]:
        return [f"{step}, dropped", ""]
    over = " (over)" if record["peak_growth_bytes"] > MEMORY_LIMIT_BYTES else ""
    return [step, f"{record['peak_growth_bytes'] / 1e6:.0f}{over}"]


def _legend() -> list[str]:
    return [
        "- step: seconds from barrier to barrier, of the slowest rank; quartiles with the number of timed steps. Work "
        "that runs on after a step is waited for inside the last one.\n"
        "- MB and S: bytes of a step by the kernel's counters of the links, summed over ranks, headers included; "
        "S is the bf16 bytes of all parameters. Floor: bytes of the scheme on paper, without headers and scales.\n"
        "- CPU s: processor seconds of a step, all ranks together; divided by the cores, no step can be shorter.\n"
        "- optimizer: fp32 master and moments that a rank keeps, counted tensor by tensor.\n"
        "- peak RSS: growth of resident memory over the state before the model, largest rank, set-up left out.\n"
        "- times as fast: median over rounds of the rival's median step over ours, with quartiles.",
    ]


def _breakdown(cases: Cases) -> str:
    ours = [case for case in cases.values() if case.time_s and not case.error]
    names = sorted({name for case in ours for name in case.time_s or {}})
    rows = [
        [contestant(case.name).label, str(case.accum), *(f"{(case.time_s or {}).get(name, 0.0):.2f}" for name in names)]
        for case in sorted(ours, key=lambda case: case.accum)
    ]
    return "Seconds of a step, mean over ranks and timed steps.\n\n" + table(["plan", "accum", *names], rows)


def _settings() -> str:
    return table(["contestant", "what its settings share"], [[_name(entry), entry.settings] for entry in CONTESTANTS])


def _failures(cases: Cases) -> str:
    lines = [
        f"- {contestant(case.name).label}, accum {case.accum}: {case.error}" for case in cases.values() if case.error
    ]
    absent = [entry.label for entry in CONTESTANTS if not any(name == entry.name for name, _ in cases)]
    lines += [f"- not measured on these links: {', '.join(absent)}"] if absent else []
    return "\n".join(lines) or "Everything ran."


_TITLES = {
    LAB: "Links of the preset `lab`",
    FRONTIER: "Links in the proportion of Frontier",
    LOOPBACK: "The loopback",
}
_TRIED = (
    f"Each setting ran one step to warm up and one timed step of {TRIED_ACCUM} sequences; a setting whose first "
    "step took twice the fastest setting's step was dropped. The fastest within the memory limit, "
    f"{MEMORY_LIMIT_BYTES >> 20} MiB of growth a rank for all, was taken for {TRIED_ACCUM} sequences and for one; "
    'where none fits, the one that needs least. "4 x 1" are four micro-batches of one sequence. Contestants with one '
    "setting are left out."
)
_NOTES = """FSDP2 here sums instead of averaging (gloo), gathers asynchronously, and prefetches in forward and
backward. For FSDP2 and DeepSpeed alike, gloo's reduce-scatter is replaced by a ring of sends and receives in
bf16 (`bench/lab/ring.py`): gloo's own sends as much as its all-reduce, twice the bytes, and an all-to-all crosses
from node to node four times the buffer where the ring crosses 1.75 times; either would flatter Terrace.
DeepSpeed uses torch's fused AdamW in place of its own, which needs a C++ build."""

_RERUN = """## Rerun it

```console
$ make bench-lab
```

It needs root, for network namespaces; see `bench/README.md`."""


def main() -> int:
    """Write the page and the pictures, print the verdicts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--folder", type=Path, default=Path("docs/benchmarks"))
    parser.add_argument("--check", action="store_true", help="exit 1 when a measured target is missed")
    options = parser.parse_args()
    found = read(options.results)
    if not found:
        sys.exit(f"{options.results} holds no result of the lab: run python -m bench.lab first")
    records, job = [record for record in found if record["scale"] == found[-1]["scale"]], Job()
    missed = False
    write_atomic(options.folder / "lab.md", page(records, job))
    for links, cases in summarise(records).items():
        here = next(record for record in records if record["links"] == links)
        words = "the loopback" if links == LOOPBACK else rate_words(here["rates"], here["scale"])
        write_atomic(options.folder / picture_name(links), lab_svg(cases, job, words))
        for name, claim in goals(cases, job, links, int(records[-1]["cores"])).items():
            missed = missed or (claim is not None and not claim.is_met)
            print(" | ".join(_verdict(name, claim)))
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())

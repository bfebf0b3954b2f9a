"""From lines of JSON to one summary per case, and from summaries to claims."""

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.claims import Claim, compared, measured, versioned
from bench.lab.entries import CONTESTANTS
from bench.lab.job import BF16_BYTES, Job
from bench.lab.links import FRONTIER

COMPUTE, UNCOMPRESSED, COMPRESSED = "compute", "terrace three-level", "terrace three-level-compressed"
LOSSY = (COMPRESSED, "terrace zero++", COMPUTE)  # the first two round, the last trains a share of its parameters
LOSS_TOLERANCE = 2e-3  # relative to the first contestant, after a few steps in bf16
_FP32_STATES_BYTES = 12  # master, two moments

# (accumulation, rival, goal on the preset's links, goal on links in the proportion of Frontier)
_SPEEDS = ((4, "hsdp", 1.6, 2.0), (4, "hsdp x4", 2.5, 3.0), (4, "zero3 x4", 8.0, 11.0), (1, "hsdp", 2.0, 2.0))
_CROSSINGS = ((UNCOMPRESSED, 2.02), (COMPRESSED, 0.80))  # S between nodes, at most
_CPU_GOAL = 1.3  # processor seconds over those of compute alone
_LEDGER_GOAL = 3.0  # per cent: headers and acknowledgements, which the ledger does not count
_OPTIMIZER_GOAL = 1.0  # per cent: padding of flat buffers

Cases = Mapping[tuple[str, int], "Case"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One contestant at one accumulation, over all rounds. Bytes are summed over ranks, per step."""

    name: str
    accum: int
    error: str = ""
    trial: str = ""  # the setting that was measured
    num_params: int = 0
    rounds: Mapping[int, Sequence[float]] = field(default_factory=dict)  # seconds of the timed steps, by round
    cpu_rounds: Mapping[int, float] = field(default_factory=dict)  # processor seconds of a step, all ranks together
    losses: Sequence[float] = ()
    grad_norms: Sequence[float] = ()
    sent_bytes: Mapping[str, float] | None = None
    expected_bytes: Mapping[str, int] | None = None
    peak_growth_bytes: int = 0
    optimizer_bytes: int = 0
    time_s: Mapping[str, float] | None = None

    @property
    def steps_s(self) -> list[float]:
        return [seconds for steps in self.rounds.values() for seconds in steps]

    @property
    def cpu_s(self) -> float:
        return statistics.median(self.cpu_rounds.values())

    @property
    def median_s(self) -> float:
        return statistics.median(self.steps_s)

    @property
    def quartiles_s(self) -> tuple[float, float]:
        """First and third quartile of the steps."""
        if len(self.steps_s) < 2:
            return self.steps_s[0], self.steps_s[0]
        low, _, high = statistics.quantiles(self.steps_s, n=4, method="inclusive")
        return low, high

    def in_s(self, tier: str) -> float | None:
        """Bytes over a tier in S, the bf16 bytes of all parameters; None when nothing counted."""
        return self.sent_bytes[tier] / (BF16_BYTES * self.num_params) if self.sent_bytes else None


def read(path: Path) -> list[dict[str, Any]]:
    """The records in the file. A last line cut off by a crash does not count, nor do lines of an older lab."""
    if not path.exists():
        return []
    found, left_out = [], 0
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            left_out += 1
            continue
        if record.get("kind") in ("trials", "cases"):
            found.append(record)
        else:
            left_out += 1
    if left_out:
        print(f"{path}: {left_out} lines are not whole or of an older lab, and are left out", file=sys.stderr)
    return found


def summarise(records: Sequence[Mapping[str, Any]]) -> dict[str, dict[tuple[str, int], Case]]:
    """For each kind of links, a case per (contestant, accumulation), in the order of the list of contestants."""
    found: dict[str, dict[tuple[str, int], Case]] = {}
    for links in dict.fromkeys(record["links"] for record in records):
        here = [record for record in records if record["links"] == links and record["kind"] == "cases"]
        found[links] = {}
        for entry in CONTESTANTS:
            for accum in entry.accums:
                own = [r for r in here if r["contestant"] == entry.name and r["accum"] == accum]
                good = [record for record in own if "error" not in record]
                if good:
                    found[links][entry.name, accum] = _case(entry.name, accum, good)
                elif own:
                    found[links][entry.name, accum] = Case(name=entry.name, accum=accum, error=own[-1]["error"])
    return found


def _case(name: str, accum: int, records: Sequence[Mapping[str, Any]]) -> Case:
    last = records[-1]
    counted = [record["sent_bytes"] for record in records if record["sent_bytes"]]
    sent = {tier: statistics.mean(one[tier] for one in counted) for tier in counted[0]} if counted else None
    return Case(
        name=name,
        accum=accum,
        trial=last["trial"],
        num_params=last["num_params"],
        rounds={record["round"]: record["steps_s"] for record in records},
        cpu_rounds={record["round"]: record["cpu_s"] for record in records},
        losses=last["losses"],
        grad_norms=last["grad_norms"],
        sent_bytes=sent,
        expected_bytes=last["expected_bytes"],
        peak_growth_bytes=max(record["peak_growth_bytes"] for record in records),
        optimizer_bytes=last["optimizer_bytes"],
        time_s=last["time_s"] or None,
    )


def goals(cases: Cases, job: Job, links: str, cores: int) -> dict[str, Claim | None]:
    """Every target with the claim that was measured, or None."""
    found = {**_crossings(cases, job), **_speeds(cases, links, cores), **_processor(cases)}
    found |= {**_optimizer(cases, job), **_ledgers(cases)}
    named = {f"lab, {links} links, {name}": claim for name, claim in found.items()}
    return {name: claim and replace(claim, name=name) for name, claim in named.items()}


def _crossings(cases: Cases, job: Job) -> dict[str, Claim | None]:
    outer = list(job.tiers)[-1]
    found: dict[str, Claim | None] = {}
    for ours, goal in _CROSSINGS:
        for accum in _accums(cases):
            case = _good(cases, ours, accum)
            sent = case.in_s(outer) if case else None
            name = f"{ours}, accum {accum}: bytes between nodes"
            found[name] = None if sent is None else measured(name, [sent], goal, unit="S")
    return found


def _speeds(cases: Cases, links: str, cores: int) -> dict[str, Claim | None]:
    found: dict[str, Claim | None] = {}
    for accum, rival, goal, on_frontier in _SPEEDS:
        name = f"{COMPRESSED}, accum {accum}: times as fast as {rival}"
        ours, theirs = _good(cases, COMPRESSED, accum), _good(cases, rival, accum)
        if ours is None or theirs is None:
            found[name] = None
            continue
        both = [number for number in ours.rounds if number in theirs.rounds]
        theirs_s, ours_s = ([statistics.median(case.rounds[number]) for number in both] for case in (theirs, ours))
        bound = (
            f"steps of {theirs.median_s:.2f} and {ours.median_s:.2f} s; {ours.cpu_s:.1f} processor seconds on {cores} "
            f"cores are {ours.cpu_s / cores:.2f} s of ours, {theirs.cpu_s / cores:.2f} s of theirs"
        )
        goal = on_frontier if links == FRONTIER else goal
        rival = versioned("torch", f"FSDP2, {theirs.trial}")
        found[name] = compared(name, theirs_s, ours_s, goal, at_least=True, rival=rival, bound=bound) if both else None
    return found


def _processor(cases: Cases) -> dict[str, Claim | None]:
    found: dict[str, Claim | None] = {}
    for accum in _accums(cases):
        name = f"{COMPRESSED}, accum {accum}: processor seconds over those of compute alone"
        ours, alone = _good(cases, COMPRESSED, accum), _good(cases, COMPUTE, accum)
        both = [number for number in ours.cpu_rounds if number in alone.cpu_rounds] if ours and alone else []
        if ours and alone and both:
            ours_s, alone_s = ([case.cpu_rounds[number] for number in both] for case in (ours, alone))
            bound = f"{ours.cpu_s:.2f} and {alone.cpu_s:.2f} processor seconds a step"
            found[name] = compared(name, ours_s, alone_s, _CPU_GOAL, bound=bound)
        else:
            found[name] = None
    return found


def _optimizer(cases: Cases, job: Job) -> dict[str, Claim | None]:
    found: dict[str, Claim | None] = {}
    wanted = _FP32_STATES_BYTES / job.world_size
    for ours in (UNCOMPRESSED, COMPRESSED):
        name = f"{ours}: optimizer state of a rank off 12/{job.world_size} = {wanted:g} bytes a parameter"
        case = next((c for (n, _), c in cases.items() if n == ours and not c.error), None)
        off = None if case is None else abs(case.optimizer_bytes / case.num_params / wanted - 1)
        found[name] = None if off is None else measured(name, [100 * off], _OPTIMIZER_GOAL, unit="%")
    return found


def _ledgers(cases: Cases) -> dict[str, Claim | None]:
    found: dict[str, Claim | None] = {}
    for accum in _accums(cases):
        name = f"accum {accum}: Terrace's ledger off the kernel's counters, worst plan and tier"
        gaps = {
            f"{case.name}, {tier}": abs(sent / case.expected_bytes[tier] - 1)
            for (_, at), case in cases.items()
            if at == accum and case.expected_bytes and case.sent_bytes
            for tier, sent in case.sent_bytes.items()
            if case.expected_bytes[tier]
        }
        worst = max(gaps, key=lambda each: gaps[each], default="")
        found[name] = measured(name, [100 * gaps[worst]], _LEDGER_GOAL, unit="%", bound=worst) if worst else None
    return found


def loss_spread(cases: Cases, accum: int) -> float:
    """Largest difference of two contestants' losses at the same step; lossy contestants are left out."""
    curves = [case.losses for (name, at), case in cases.items() if at == accum and not case.error and name not in LOSSY]
    return max((max(column) - min(column) for column in zip(*curves, strict=False)), default=0.0)


def _accums(cases: Cases) -> list[int]:
    return sorted({accum for _, accum in cases})


def _good(cases: Cases, name: str, accum: int) -> Case | None:
    case = cases.get((name, accum))
    return None if case is None or case.error else case

"""From lines of JSON to one summary per case, and from summaries to verdicts."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.lab.job import BF16_BYTES, CONTESTANTS, Job

UNCOMPRESSED, COMPRESSED = "terrace three-level", "terrace three-level-compressed"
LOSSY = (COMPRESSED, f"{COMPRESSED} unit 1", "terrace zero++")
LOSS_TOLERANCE = 2e-3  # relative to the first contestant, after a few steps in bf16
LEDGER_TOLERANCE = 0.03  # headers and acknowledgements, which the ledger does not count
OPTIMIZER_TOLERANCE = 0.01  # padding of flat buffers
_FP32_STATES_BYTES = 12  # master, two moments


@dataclass(frozen=True, kw_only=True)
class Case:
    """One contestant at one accumulation, over all rounds. Bytes are summed over ranks, per step."""

    name: str
    accum: int
    error: str = ""
    num_params: int = 0
    steps_s: Sequence[float] = ()
    cpu_s: float | None = None  # processor seconds of a step, all ranks together
    losses: Sequence[float] = ()
    grad_norms: Sequence[float] = ()
    sent_bytes: Mapping[str, float] | None = None
    expected_bytes: Mapping[str, int] | None = None
    peak_growth_bytes: int = 0
    optimizer_bytes: int = 0
    time_s: Mapping[str, float] | None = None

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


@dataclass(frozen=True)
class Verdict:
    """A target, the measured result, and whether it is met; None when it could not be measured."""

    target: str
    found: str
    met: bool | None


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a results file that were measured on the links of its last one."""
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [record for record in found if record["links"] == found[-1]["links"]]


def summarise(records: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int], Case]:
    """A case per (contestant, accumulation), in the order of the list of contestants."""
    found = {}
    for entry in CONTESTANTS:
        for accum in sorted({record["accum"] for record in records}):
            own = [r for r in records if r["contestant"] == entry.name and r["accum"] == accum]
            good = [record for record in own if "error" not in record]
            if good:
                found[entry.name, accum] = _case(entry.name, accum, good)
            elif own:
                found[entry.name, accum] = Case(name=entry.name, accum=accum, error=own[-1]["error"])
    return found


def _case(name: str, accum: int, records: Sequence[Mapping[str, Any]]) -> Case:
    last = records[-1]
    counted = [record["sent_bytes"] for record in records if record["sent_bytes"]]
    sent = {tier: statistics.mean(one[tier] for one in counted) for tier in counted[0]} if counted else None
    return Case(
        name=name,
        accum=accum,
        num_params=last["num_params"],
        steps_s=[seconds for record in records for seconds in record["steps_s"]],
        cpu_s=last.get("cpu_s"),
        losses=last["losses"],
        grad_norms=last["grad_norms"],
        sent_bytes=sent,
        expected_bytes=last["expected_bytes"],
        peak_growth_bytes=max(record["peak_growth_bytes"] for record in records),
        optimizer_bytes=last["optimizer_bytes"],
        time_s=last["time_s"] or None,
    )


def verdicts(cases: Mapping[tuple[str, int], Case], job: Job) -> list[Verdict]:
    """Compare the cases with Terrace's targets."""
    outer = list(job.tiers)[-1]
    accums = sorted({accum for _, accum in cases})
    found = []
    for name, limit in ((UNCOMPRESSED, 2.02), (COMPRESSED, 0.80)):
        for accum in accums:
            case = _good(cases, name, accum)
            sent = case.in_s(outer) if case else None
            text = f"{name}, accum {accum}: at most {limit:.2f} S between nodes"
            found.append(
                Verdict(text, "-" if sent is None else f"{sent:.3f} S", None if sent is None else sent <= limit)
            )
    for accum, rival, share in ((4, "hsdp", 3), (4, "zero3", 8), (1, "hsdp", 2)):
        ours, theirs = _good(cases, COMPRESSED, accum), _good(cases, rival, accum)
        text = f"{COMPRESSED}, accum {accum}: step at most 1/{share} of {rival}"
        if ours is None or theirs is None:
            found.append(Verdict(text, "-", None))
            continue
        ratio = ours.median_s / theirs.median_s
        words = f"{ours.median_s:.2f} / {theirs.median_s:.2f} s = 1/{1 / ratio:.1f}"
        found.append(Verdict(text, words, ratio <= 1 / share))
    return found + _optimizer(cases, job) + _ledgers(cases)


def _optimizer(cases: Mapping[tuple[str, int], Case], job: Job) -> list[Verdict]:
    found = []
    for name in (UNCOMPRESSED, COMPRESSED):
        case = next((c for (n, _), c in cases.items() if n == name and not c.error), None)
        wanted = _FP32_STATES_BYTES / job.world_size
        text = f"{name}: optimizer state of a rank 12/{job.world_size} = {wanted:g} bytes a parameter"
        if case is None:
            found.append(Verdict(text, "-", None))
            continue
        held = case.optimizer_bytes / case.num_params
        found.append(Verdict(text, f"{held:.4f}", abs(held / wanted - 1) <= OPTIMIZER_TOLERANCE))
    return found


def _ledgers(cases: Mapping[tuple[str, int], Case]) -> list[Verdict]:
    found = []
    for accum in sorted({accum for _, accum in cases}):
        text = f"Terrace's ledger, accum {accum}: within {LEDGER_TOLERANCE:.0%} of the kernel's counters, every tier"
        gaps = {
            (case.name, tier): sent / case.expected_bytes[tier] - 1
            for (_, at), case in cases.items()
            if at == accum and case.expected_bytes and case.sent_bytes
            for tier, sent in case.sent_bytes.items()
            if case.expected_bytes[tier]
        }
        if not gaps:
            found.append(Verdict(text, "-", None))
            continue
        (name, tier), gap = max(gaps.items(), key=lambda item: abs(item[1]))
        found.append(Verdict(text, f"worst {gap:+.2%} ({name}, {tier})", abs(gap) <= LEDGER_TOLERANCE))
    return found


def loss_spread(cases: Mapping[tuple[str, int], Case], accum: int, lossy: Sequence[str] = LOSSY) -> float:
    """Largest difference of two contestants' losses at the same step; lossy contestants are left out."""
    curves = [case.losses for (name, at), case in cases.items() if at == accum and not case.error and name not in lossy]
    return max((max(column) - min(column) for column in zip(*curves, strict=False)), default=0.0)


def _good(cases: Mapping[tuple[str, int], Case], name: str, accum: int) -> Case | None:
    case = cases.get((name, accum))
    return None if case is None or case.error else case

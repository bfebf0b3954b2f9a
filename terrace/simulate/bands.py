"""Error bands of predicted figures, from the errors of predicted steps that their model was not built on.

`validated.csv` has the whole-step rows of docs/validation.md and the predictions on probed CPUs
(docs/benchmarks/slow-predictions.md, docs/probing.md): device generation, axes beside data (and fp8), number of
devices, source, and error. `python -m bench.validation` writes it; tests/bench/test_validation.py checks it against the
docs. Rows that were seen while the model was built (`seen`) give no band.

The miss of a row is the ratio of the larger to the smaller figure, minus one, so one band serves seconds and rates.
Errors of one program are correlated on every machine, so a **source** is a program, whoever published its steps, and
exchangeability is assumed of sources. With k sources whose misses have the distributions F_1 .. F_k, the band is the
least b with

    (F_1(b) + ... + F_k(b)) / (k + 1) >= LEVEL

A step of a new source lies within it with at least that probability, if sources are exchangeable (pooled distributions
of a two-layer hierarchy: Dunn, Wasserman and Ramdas 1809.07441, section 3.1). No b satisfies this with fewer than
`FEWEST` sources: k of them can promise at most k / (k + 1), for a band of their largest miss. So fewer sources never
make a band narrower (`wanted`): a device's generation with fewer has the widest band of a generation or of all
accelerators together, and at least the largest miss of its own sources. A probed CPU has runs of this project alone,
and its band has the level that they can promise.

Exchangeability is assumed of steps that are alike, so rows are grouped by what a plan's description says before any of
them is priced, and a band is of its plan's group alone (Mondrian: Vovk, Gammerman and Shafer 2005, section 4.5). There
are two groups, of plans with a context axis and without: messages and products of a ring are priced by a part of the
model that no other step has. A tensor axis makes no groups, since no generation has `FEWEST` sources on both sides.

Every row is priced twice, as this runtime and as the software that ran it (terrace.cluster.named_software). A plan run
by a named software has a band of rows that are priced as their own software: of this one where it has `FEWEST` sources
on the generation, otherwise of all, by the rule above.

Sources are not independent (programs share kernels, libraries and ancestors), and errors have a bias: nearly all
published steps took longer than predicted. A band is symmetric nevertheless, and its words give their number.

Two plans of one search share most of their errors: clocks, kernels, links. Their *relative* error is the ratio of
their errors. Among pairs of unseen rows of one task (machine, model and sequence) whose numbers of devices differ by at
most a factor of `PAIR`, a share `TIE` has a relative error below `tie_share`, which is capped at `MOST_TIE`: plans that
are closer than that are reported as ties.
"""

import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import combinations
from typing import NamedTuple

from terrace.base.words import counted
from terrace.cluster.cluster import Cluster
from terrace.plan.mesh import Mesh
from terrace.plan.plan import AXES, Plan

STEP = "step"  # the kind of a row of a whole step; others serve to compare plans alone
WIDTH = "width"  # the kind of a step whose plan other rows have on other numbers of devices: it compares none
FP8 = "fp8"  # named among the axes: products of layers are in 8 bits
CPU = "CPU"  # generation of ranks on a probed CPU
OWN, ANY = "own", "any"  # the software that a row is priced as: this runtime; any other
LEVEL = 0.8  # probability that a step of another source misses by less than the band
FEWEST = 4  # sources that can promise it
PAIR, TIE, MOST_TIE = 2, 0.8, 0.05
FILE = "validated.csv"
_AXES = (*AXES, "experts", "outer")
_HEADS = ("kind", "generation", "axes", "devices", "task", "error", "source", "software", "seen")
_SEEN = "seen"
# Device name -> generation; the first key that a name contains applies.
_GENERATIONS = {
    "GB200": "Blackwell",
    "GB300": "Blackwell",
    "B200": "Blackwell",
    "B300": "Blackwell",
    "GH200": "Hopper",
    "H100": "Hopper",
    "H200": "Hopper",
    "H800": "Hopper",
    "H20": "Hopper",
    "A100": "Ampere",
    "A800": "Ampere",
    "RTX 40": "Ada",
    "MI250": "CDNA 2",
    "MI300": "CDNA 3",
    "MI325": "CDNA 3",
}


class Validated(NamedTuple):
    """A validated row. `error` is predicted over measured seconds, minus one, priced as `software` runs the step."""

    kind: str
    generation: str
    axes: frozenset[str]  # beside data: those of a mapping, "experts", "outer"; `FP8`
    devices: int
    task: str
    error: float
    source: str
    software: str = OWN
    seen: bool = False  # while the model was built: it gives no band

    @property
    def miss(self) -> float:
        """Ratio of the larger to the smaller figure, minus one."""
        return math.expm1(abs(math.log1p(self.error)))

    @property
    def family(self) -> str:
        return self.software.partition("-")[0]

    @property
    def is_step(self) -> bool:
        return self.kind in (STEP, WIDTH)


@dataclass(frozen=True, kw_only=True)
class Band:
    """`share`: relative error of a predicted figure; `words`: the rows it comes from, in a sentence."""

    share: float
    words: str

    def __str__(self) -> str:
        return f"+-{percent(self.share)}"


def percent(share: float) -> str:
    """Whole percents, with one decimal below 1 %."""
    return f"{100 * share:.{0 if share >= 0.0095 else 1}f} %"


def csv_text(rows: Iterable[Validated]) -> str:
    """CSV of validated rows."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_HEADS)
    writer.writerows([*row[:2], " ".join(sorted(row.axes)), *row[3:-1], _SEEN * row.seen] for row in rows)
    return out.getvalue()


@cache
def validated() -> tuple[Validated, ...]:
    text = (resources.files(__package__) / FILE).read_text(encoding="utf-8")
    return tuple(
        Validated(
            line["kind"],
            line["generation"],
            frozenset(line["axes"].split()),
            int(line["devices"]),
            line["task"],
            float(line["error"]),
            line["source"],
            line["software"],
            line["seen"] == _SEEN,
        )
        for line in csv.DictReader(io.StringIO(text))
    )


def generation_of(device: str) -> str:
    """Device generation by device name; "" if unknown."""
    return next((generation for name, generation in _GENERATIONS.items() if name in device), "")


def band_of(cluster: Cluster, plan: Plan) -> Band:
    """Error band of all predicted figures of a plan: seconds, rates, shares of the peak, prices."""
    device = cluster.device
    generation = generation_of(device.name)
    if device.type == "cpu":
        # A described CPU has no measured rates, so its rows do not apply.
        generation = CPU if cluster.is_measured else ""
    return _band(generation, device.software.family, Mesh.of(cluster, plan).total("context") > 1)


class Wanted(NamedTuple):
    """The rows that a band is taken from, by source, and those of them that are nearest: where they are fewer than
    `FEWEST` sources, the band is the widest of the rows.
    """

    rows: tuple[Validated, ...]
    near: tuple[Validated, ...]
    where: str  # of the nearest

    @property
    def has_own(self) -> bool:
        return len(by_source(self.near)) >= FEWEST

    @property
    def share(self) -> float:
        """The band."""
        near = by_source(self.near)
        return pooled_quantile(near, LEVEL) if self.has_own else max(widest_quantile(self.rows)[0], largest(near))


def wanted(known: Iterable[Validated], generation: str, software: str, in_context: bool) -> Wanted:
    """The rows for a plan on a generation of accelerators, run by a software, with a context axis or without."""
    rows = [row for row in known if row.is_step and not row.seen and row.generation != CPU]
    rows = [row for row in rows if (row.software == OWN) == (software == OWN)]
    group = [row for row in rows if ("context" in row.axes) == in_context]
    near = [row for row in group if generation and row.generation == generation]
    by = "" if software == OWN else f" run by {software}"
    own = [row for row in near if software in (OWN, row.family)]
    if len(by_source(own)) >= FEWEST:
        near = own
    elif by:
        by = ", each run by its own software"
    # A group of few sources is no narrower than all steps.
    alike = group if len(by_source(group)) >= FEWEST else rows
    where = f"on {generation or 'this device'}{' with a context axis' * in_context}{by}"
    return Wanted(tuple(alike), tuple(near), where)


@cache
def _band(generation: str, software: str, in_context: bool) -> Band:
    if generation == CPU:
        here = by_source(row for row in validated() if row.is_step and not row.seen and row.generation == CPU)
        level = promised(len(here))
        words = (
            f"{percent(level)} of steps on other machines miss by less ({len(here)} sets of runs of Terrace on probed "
            "CPUs)"
        )
        return Band(share=pooled_quantile(here, level), words=words)
    found = wanted(validated(), generation, software, in_context)
    number = len(by_source(found.near))
    if not found.has_own:
        return _widest(found, f"{counted(number, 'published source')} {found.where}")
    unrun = "; no GPU has run Terrace yet" if software == OWN else ""
    words = (
        f"{percent(LEVEL)} of steps of software and machines not seen before miss by less ({number} published "
        f"sources {found.where}; {_late(found.rows)}{unrun})"
    )
    return Band(share=found.share, words=words)


def widest_band(what: str) -> Band:
    """Band of a subject that no validated row is like."""
    return _widest(wanted(validated(), "", OWN, False), f"no validated step is like it ({what})")


def _widest(found: Wanted, why: str) -> Band:
    share, num_sources = widest_quantile(found.rows)
    level = percent(promised(num_sources))
    words = (
        f"{why}, so the band is the widest of other GPUs, of {num_sources} sources: {level} of their steps miss by "
        f"less; {_late(found.rows)}"
    )
    if found.share > share:
        words = f"{why}, and the band is their largest miss, which is above the widest of other GPUs; "
        words += _late(found.rows)
    return Band(share=found.share, words=words)


def _late(rows: Sequence[Validated]) -> str:
    return f"{sum(row.error < 0 for row in rows)} of all {len(rows)} published steps took longer than predicted"


def largest(sources: Sequence[Sequence[float]]) -> float:
    """The largest miss of all sources; 0 without any."""
    return max((miss for misses in sources for miss in misses), default=0.0)


def widest_quantile(rows: Iterable[Validated]) -> tuple[float, int]:
    """(Widest band of the generations of accelerators and of all of them together, number of its sources)."""
    found = [row for row in rows if row.generation != CPU]
    groups = [found] + [[row for row in found if row.generation == each] for each in {row.generation for row in found}]
    sources = [by_source(each) for each in groups]
    # A generation with few sources cannot promise as much as all of them can.
    able = [each for each in sources if len(each) >= FEWEST] or sources[:1]
    return max((pooled_quantile(each, promised(len(each))), len(each)) for each in able)


def by_source(rows: Iterable[Validated]) -> list[list[float]]:
    """Misses of the rows of each source."""
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(row.source, []).append(row.miss)
    return list(found.values())


def promised(num_sources: int) -> float:
    """Probability that a band of so many sources can promise, at most `LEVEL`."""
    return min(LEVEL, num_sources / (num_sources + 1))


def pooled_quantile(sources: Sequence[Sequence[float]], level: float) -> float:
    """The least miss b at which the mean of the sources' distributions, counted with one more, reaches `level`.

    `sources` holds the misses of each. `level` is at most k / (k + 1) of k sources.
    """
    weighted = sorted((miss, 1 / len(misses)) for misses in sources for miss in misses)
    wanted, found = level * (len(sources) + 1), 0.0
    for miss, weight in weighted:
        found += weight
        if found >= wanted * (1 - 1e-9):
            return miss
    return weighted[-1][0]


def axes_words(axes: Iterable[str]) -> str:
    present = frozenset(axes)
    named, tail = sorted(present - {FP8}, key=_AXES.index), " in fp8" * (FP8 in present)
    if len(named) < 2:
        return f"{named[0] if named else 'data'} axis{tail}"
    return f"{', '.join(named[:-1])} and {named[-1]} axes{tail}"


@cache
def tie_share() -> float:
    """Relative difference up to which the predicted steps of two plans of one search tie."""
    return min(MOST_TIE, quantile(relative_errors(validated()), TIE))


def relative_errors(rows: Iterable[Validated]) -> list[float]:
    """Relative error of each pair of rows of one task with similar numbers of devices."""
    by_task: dict[str, list[Validated]] = {}
    for row in rows:
        # CPU rows also vary with the load of the machine.
        if row.generation != CPU and row.kind != WIDTH and not row.seen and row.software == OWN:
            by_task.setdefault(row.task, []).append(row)
    return [
        math.expm1(abs(math.log1p(one.error) - math.log1p(other.error)))
        for alike in by_task.values()
        for one, other in combinations(alike, 2)
        if max(one.devices, other.devices) <= PAIR * min(one.devices, other.devices)
    ]


def quantile(misses: Sequence[float], share: float) -> float:
    """The value below which the next miss falls with probability `share`, if misses are exchangeable."""
    return sorted(misses)[min(len(misses), math.ceil(share * (len(misses) + 1))) - 1]

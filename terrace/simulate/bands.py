"""Error bands of predicted figures, from the errors of validated predictions of similar plans.

`validated.csv` has the whole-step rows of docs/validation.md and the predictions on probed CPUs
(docs/benchmarks/slow-predictions.md, docs/probing.md): device generation, axes beside data (and fp8), number of
devices, and error. `python -m bench.validation` writes it; tests/bench/test_validation.py checks it against the docs.

The miss of a row is the ratio of the larger to the smaller figure, minus one, so one band serves seconds and rates.
Rows of one plan on several numbers of devices (`WIDTH`) are not independent: they count once, with the largest miss.
`band_of` picks the band of a plan:

- Rows are **near** if they have the plan's generation and axes, and a number of devices within a factor of `NEAR`.
  With at least `FEWEST` of them, the band is the `OF_NEAR` quantile of their misses.
- Otherwise rows are **akin** if they share an axis beside data with the plan, on any number of devices, and agree with
  it on fp8, experts and islands. With at least `FEWEST` of them, the band is the `OF_FAR` quantile of their misses.
- Otherwise it is the `OF_FAR` quantile of all misses of the generation.
- A generation with fewer than `FEWEST` rows gets the band of the generation with the largest misses.

The quantile of n misses is the ceil((n + 1) share)-th smallest, capped at the largest: the next row of the kind lies
below it with at least that probability (split conformal prediction, Lei et al. 1604.04173, section 2.2).

Two plans of one search share most of their errors: clocks, kernels, links. Their *relative* error is the ratio of
their errors. Among pairs of rows of one task (machine, model and sequence) whose numbers of devices differ by at most
a factor of `PAIR`, a share `TIE` has a relative error below `tie_share`, which is capped at `MOST_TIE`: plans that are
closer than that are reported as ties.
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
NEAR, FEWEST = 4, 5
OF_NEAR, OF_FAR = 0.8, 0.95
PAIR, TIE, MOST_TIE = 2, 0.8, 0.05
FILE = "validated.csv"
_AXES = (*AXES, "experts", "outer")
_TRAITS = frozenset(("experts", "outer", FP8))  # with which steps differ in more than their messages
_HEADS = ("kind", "generation", "axes", "devices", "task", "error")
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
    """A validated row. `error` is predicted over measured seconds, minus one."""

    kind: str
    generation: str
    axes: frozenset[str]  # beside data: those of a mapping, "experts", "outer"; `FP8`
    devices: int
    task: str
    error: float

    @property
    def miss(self) -> float:
        """Ratio of the larger to the smaller figure, minus one."""
        return math.expm1(abs(math.log1p(self.error)))

    @property
    def is_step(self) -> bool:
        """Whether the row is of a whole step."""
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
    writer.writerows([*row[:2], " ".join(sorted(row.axes)), *row[3:]] for row in rows)
    return out.getvalue()


@cache
def validated() -> tuple[Validated, ...]:
    """All validated rows."""
    text = (resources.files(__package__) / FILE).read_text(encoding="utf-8")
    return tuple(
        Validated(
            line["kind"],
            line["generation"],
            frozenset(line["axes"].split()),
            int(line["devices"]),
            line["task"],
            float(line["error"]),
        )
        for line in csv.DictReader(io.StringIO(text))
    )


def generation_of(device: str) -> str:
    """Device generation by device name; "" if unknown."""
    return next((generation for name, generation in _GENERATIONS.items() if name in device), "")


def band_of(cluster: Cluster, plan: Plan) -> Band:
    """Error band of all predicted figures of a plan: seconds, rates, shares of the peak, prices."""
    device, mesh = cluster.device, Mesh.of(cluster, plan)
    generation = generation_of(device.name)
    if device.type == "cpu":
        # A described CPU has no measured rates, so its rows do not apply.
        generation = CPU if cluster.is_measured else ""
    axes = {axis for axis in AXES if axis != "data" and mesh.total(axis) > 1}
    axes |= {"experts"} if plan.experts else set()
    axes |= {"outer"} if plan.outer.has_islands else set()
    axes |= {FP8} if plan.products is not None else set()
    return _band(generation, frozenset(axes), cluster.world_size)


@cache
def _band(generation: str, axes: frozenset[str], devices: int) -> Band:
    alike = [row for row in validated() if row.is_step and generation and row.generation == generation]
    near = [row for row in alike if row.axes == axes and max(row.devices, devices) <= NEAR * min(row.devices, devices)]
    misses = misses_of(near)
    if len(misses) >= FEWEST:
        widths = sorted({row.devices for row in near})
        span = counted(widths[0], "device") if len(widths) == 1 else f"{widths[0]} to {widths[-1]} devices"
        words = f"{percent(OF_NEAR)} of {len(misses)} validated steps like it miss by less ({generation}, "
        return Band(share=quantile(misses, OF_NEAR), words=f"{words}{axes_words(axes)}, {span})")
    here = f"{generation or 'this device'}, {axes_words(axes)}, {counted(devices, 'device')}"
    related = misses_of(row for row in alike if row.axes & axes - _TRAITS and row.axes & _TRAITS == axes & _TRAITS)
    if len(related) >= FEWEST:
        words = (
            f"no validated step is near ({here}); {percent(OF_FAR)} of {len(related)} with one of its axes miss by less"
        )
        return Band(share=quantile(related, OF_FAR), words=words)
    every = misses_of(alike)
    if len(every) < FEWEST:
        return widest_band(here)
    words = f"no validated step is near ({here}); {percent(OF_FAR)} of all {len(every)} on {generation} miss by less"
    return Band(share=quantile(every, OF_FAR), words=words)


def misses_of(rows: Iterable[Validated]) -> list[float]:
    """Miss of each row. Rows of one task on several numbers of devices count once, with their largest miss."""
    found: list[float] = []
    widths: dict[str, float] = {}
    for row in rows:
        if row.kind == WIDTH:
            widths[row.task] = max(row.miss, widths.get(row.task, 0.0))
        else:
            found.append(row.miss)
    return [*found, *widths.values()]


def widest_band(what: str) -> Band:
    """Band of the generation with the largest errors, for a subject with too few validated rows."""
    generations: dict[str, list[Validated]] = {}
    for row in validated():
        if row.is_step:
            generations.setdefault(row.generation, []).append(row)
    misses = [misses_of(rows) for rows in generations.values()]
    share = max(quantile(each, OF_FAR) for each in misses)
    taken = f"band taken from all {sum(map(len, misses))} rows, of the devices missed most"
    return Band(share=share, words=f"no validated step is near ({what}): {taken}")


def axes_words(axes: Iterable[str]) -> str:
    """Names of the axes beside data, for a sentence."""
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
        if row.generation != CPU and row.kind != WIDTH:
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

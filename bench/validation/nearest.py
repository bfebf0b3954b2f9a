"""The validated rows by their devices: the file from which predicted figures get their bands.

Rows of whole steps: published ones, and those of the pages of predictions on probed CPUs. Forms of a layer, which are
plans of one machine and model, serve to compare plans alone (`terrace.simulate.bands`).
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.validation.rows import Row, Table, markdown_table
from terrace.simulate.bands import (
    CPU,
    FEWEST,
    FP8,
    MOST_TIE,
    OF_FAR,
    OF_NEAR,
    STEP,
    TIE,
    WIDTH,
    Validated,
    axes_words,
    generation_of,
    misses_of,
    quantile,
    relative_errors,
)

ROOT = Path(__file__).parents[2]
PAGES = ("docs/benchmarks/slow-predictions.md", "docs/probing.md")
_RANKS = 8  # of every row of `PAGES`
_FORMS = "Korthikanti, recomputation in a layer"

Cells = Mapping[str, str]

_TEXT = """## Bands of predicted figures

Commands show a predicted step with a band, `1.23 s +-8 %`. It is taken from the rows of this page that are of whole
steps, with those of [predictions on a slow link](benchmarks/slow-predictions.md) and on [probed
machines](probing.md#errors-of-predictions): of rows with the same generation of device, the same axes and at most four
times more or fewer devices, 80 % miss by less. A row misses by the larger of both figures over the smaller, less one.
NVIDIA's rows of one model, machine and precision count once, by the largest miss. With fewer than five plans so
near, the band is that of 95 % of those that share an axis; with fewer than five of these, of the generation; and where
it has fewer, of the generation that is missed most ([planning.md](planning.md#how-sure-a-prediction-is)).

Published steps are priced with the software of their time, so on GPUs a band is the model's, and not that of this
project's runs, of which no row is yet. Memory has no band: nobody published it beside these steps.
"""

_TIES = """Plans of one search share most of their errors. Their relative error is taken from {pairs} pairs of rows of
one machine, model and sequence, with at most twice as many devices, and of the five forms of a layer below: 80 % of
them are off each other by less than {tie:.1%}. Plans whose predicted steps are closer tie. Few pairs are plans on
equally many devices, so this is a guess from the nearest that was published.
"""


class _Setting(NamedTuple):
    device: str  # its name has the name of a generation
    devices: int
    axes: tuple[str, ...] = ()  # beside data
    task: str = ""  # rows of one machine, model and sequence
    kind: str = STEP


def _megatron(cells: Cells) -> _Setting:
    axes = tuple(axis for axis in ("tensor", "pipeline") if int(cells[axis]) > 1)
    return _Setting("A100", int(cells["GPUs"]), axes, f"megatron {cells['model']}")


def _mosaicml(cells: Cells) -> _Setting:
    task = f"{cells['device']} {cells['model']} {cells['sequence']}"
    return _Setting(cells["device"].upper(), int(cells["GPUs"]), (), task)


def _nemo(cells: Cells) -> _Setting:
    device = {"dgx-h100": "H100", "dgx-b200": "B200", "gb200-nvl72": "GB200"}[cells["system"]]
    axes = [axis for axis in ("tensor", "context", "pipeline") if int(cells[axis]) > 1]
    precision = cells["precision"]
    axes += [FP8] if precision != "bf16" else []
    return _Setting(device, int(cells["GPUs"]), tuple(axes), f"{device} {cells['model']} {precision}", WIDTH)


def _mixture(cells: Cells) -> _Setting:
    device = {"64": "H100", "256": "GB200"}[cells["GPUs"]]
    return _Setting(device, int(cells["GPUs"]), ("experts", "pipeline"), cells["model"])


def _co2(cells: Cells) -> _Setting:
    # A growth is the rate on 128 devices, counted in that on 16.
    return _Setting("A100", 128, ("outer",), f"{cells['setting']}, {cells['figure']}")


# Tables of whole steps.
STEPS: Mapping[str, Callable[[Cells], _Setting]] = {
    "Megatron-LM, Table 1": _megatron,
    "MosaicML, MPT with FSDP on A100": _mosaicml,
    "MosaicML, MPT with FSDP on H100": _mosaicml,
    "NVIDIA, dense models on H100 in bf16": _nemo,
    "NVIDIA, dense models on H100 in fp8": _nemo,
    "NVIDIA, dense models on Blackwell": _nemo,
    "Megatron, mixtures of experts": _mixture,
    "CO2, local steps over TCP": _co2,
}
# Tables of parts of a step, of bandwidths, of gains: they have no part in bands of steps.
PARTS = (
    "Zero bubble, passes of a stage",
    _FORMS,
    "AxoNN, nested groups on Perlmutter",
    "AxoNN, nested groups on Frontier",
    "Zeppelin, gain of balancing by cost",
    "FSMoE, parts of a layer",
    "FSMoE, gains over PipeMoE",
)


def nearest_rows(tables: Sequence[Table]) -> list[Validated]:
    """The rows of `terrace/simulate/validated.csv`, from the tables of the page and from `PAGES`."""
    by_title = {table.title: table for table in tables}
    rows = [row for title, setting in STEPS.items() for row in _steps(by_title[title], setting)]
    return [*rows, *_forms(by_title[_FORMS]), *_probed()]


def section(rows: Sequence[Validated]) -> str:
    """The section of the page on the bands that these rows give."""
    kinds: dict[tuple[str, frozenset[str]], list[Validated]] = defaultdict(list)
    generations: dict[str, list[Validated]] = defaultdict(list)
    for row in rows:
        if row.is_step:
            kinds[row.generation, row.axes].append(row)
            generations[row.generation].append(row)
    lines = []
    for (generation, axes), alike in kinds.items():
        widths = sorted({row.devices for row in alike})
        span = str(widths[0]) if len(widths) == 1 else f"{widths[0]} to {widths[-1]}"
        misses = misses_of(alike)
        near = f"{quantile(misses, OF_NEAR):.1%}" if len(misses) >= FEWEST else "too few rows"
        far = f"{quantile(misses_of(generations[generation]), OF_FAR):.1%}"
        lines.append((generation, axes_words(axes), span, str(len(alike)), str(len(misses)), near, far))
    pairs = relative_errors(rows)
    tie = min(MOST_TIE, quantile(pairs, TIE))
    heads = ("generation", "axes", "devices", "rows", "plans", "band of all these", "band of the generation")
    return f"{_TEXT}\n{markdown_table(heads, lines)}\n{_TIES.format(pairs=len(pairs), tie=tie)}"


def _steps(table: Table, setting: Callable[[Cells], _Setting]) -> Iterator[Validated]:
    for row in table.rows:
        device, devices, axes, task, kind = setting(dict(zip(table.heads, row.cells, strict=True)))
        # Of a rate, the step's error is that of its inverse.
        ratio = row.modelled / row.published if table.unit == "s" else row.published / row.modelled
        yield Validated(kind, generation_of(device), frozenset(axes), devices, task, round(ratio - 1, 4))


def _forms(table: Table) -> Iterator[Validated]:
    """A row for each form of the layer: forward and backward together, on eight tensor ranks."""
    forms: dict[str, list[Row]] = defaultdict(list)
    for row in table.rows:
        forms[row.cells[0]].append(row)
    for passes in forms.values():
        ratio = sum(row.modelled for row in passes) / sum(row.published for row in passes)
        yield Validated("layer", generation_of("A100"), frozenset(("tensor",)), 8, "22B layer", round(ratio - 1, 4))


def _probed() -> Iterator[Validated]:
    for name in PAGES:
        for cells in _table_of((ROOT / name).read_text(encoding="utf-8")):
            ratio = float(cells["predicted s"]) / float(cells["measured s"])
            plan = cells["plan"]
            axes = [axis for axis, sign in (("outer", "every"), ("pipeline", "stages")) if sign in plan]
            yield Validated(STEP, CPU, frozenset(axes), _RANKS, cells.get("place", "slow link"), round(ratio - 1, 4))


def _table_of(text: str) -> Iterator[Cells]:
    """The rows of the table of a page that has predicted and measured seconds."""
    heads: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split("|")] if line.startswith("|") else []
        if "predicted s" in cells:
            heads = cells
        elif not cells:
            heads = []
        elif heads and not re.fullmatch(r"[-: ]+", cells[0]):
            yield dict(zip(heads, cells, strict=True))

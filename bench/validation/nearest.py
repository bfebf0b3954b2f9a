"""The validated rows by their devices: the file that predicted figures get their bands from (`terrace.simulate.bands`).

Rows of whole steps: published ones that were seen while the model was built, which give no band, those of
`bench.validation.held_out`, which were not, and those of the pages of predictions on probed CPUs.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.validation.rows import Row, Table, markdown_table
from terrace.simulate.bands import (
    ANY,
    CPU,
    FEWEST,
    FP8,
    LEVEL,
    MOST_TIE,
    OWN,
    STEP,
    TIE,
    WIDTH,
    Validated,
    by_source,
    generation_of,
    pooled_quantile,
    promised,
    quantile,
    relative_errors,
    wanted,
)

ROOT = Path(__file__).parents[2]
PAGES = ("docs/benchmarks/slow-predictions.md", "docs/probing.md")
_RANKS = 8  # of every row of `PAGES`
_FORMS = "Korthikanti, recomputation in a layer"

Cells = Mapping[str, str]

_TEXT = """## Bands of predicted figures

Commands show a predicted step with a band, `1.23 s +-30 %`. It is taken from steps that the model was not built on.
Their sources (programs) have the same weight, whatever their numbers of rows. Of the steps of a new source, {level:.0%}
miss by less than the band, if that source could as well have been one of these. The miss of a step is the larger of
both figures divided by the smaller, minus one. From k sources a band can promise at most k / (k + 1), and for that it
must be their largest miss, so a generation with fewer than {fewest} sources has the widest band of all, and at least
the largest miss of its own: nothing is promised of it. Plans with a context axis and plans without have bands of their
own. The column *as a named software* is of a plan run by one (`--as`), from the same steps priced as the software that
ran them
([planning.md](planning.md#how-sure-a-prediction-is)). Bands of probed CPUs are from runs of this project ([on a slow
link](benchmarks/slow-predictions.md), [on probed machines](probing.md#errors-of-predictions)). Memory has no band:
nobody published it beside these steps.
"""

_SEEN = """Rows of these tables are *seen*: terms of the model were added after their residuals had been looked at, or
their software was described for them. They give no band and are no evidence for the next machine:
"""

_TIES = """Plans of one search share most of their errors. Their relative error is taken from {pairs} pairs of unseen
rows of one machine, model and sequence, with at most twice as many devices: 80 % of the pairs differ by less than
{off:.1%}. Plans whose predicted steps are closer than {tie:.1%} tie: more would let a plan come first that is
predicted to be much slower.
"""


class _Setting(NamedTuple):
    device: str  # its name has the name of a generation
    devices: int
    axes: tuple[str, ...] = ()  # beside data
    task: str = ""  # rows of one machine, model and sequence
    kind: str = STEP
    software: str = ""  # that the table prices the step as


def _megatron(cells: Cells) -> _Setting:
    axes = tuple(axis for axis in ("tensor", "pipeline") if int(cells[axis]) > 1)
    return _Setting("A100", int(cells["GPUs"]), axes, f"megatron {cells['model']}", software="megatron")


def _mosaicml(cells: Cells) -> _Setting:
    task = f"{cells['device']} {cells['model']} {cells['sequence']}"
    return _Setting(cells["device"].upper(), int(cells["GPUs"]), (), task, software="composer")


def _nemo(cells: Cells) -> _Setting:
    device = {"dgx-h100": "H100", "dgx-b200": "B200", "gb200-nvl72": "GB200"}[cells["system"]]
    axes = [axis for axis in ("tensor", "context", "pipeline") if int(cells[axis]) > 1]
    precision = cells["precision"]
    axes += [FP8] if precision != "bf16" else []
    return _Setting(device, int(cells["GPUs"]), tuple(axes), f"{device} {cells['model']} {precision}", WIDTH, "te")


def _mixture(cells: Cells) -> _Setting:
    device = "H100" if cells["model"].startswith("Mixtral") else "GB200"
    axes = ("experts",) if cells["model"].startswith("gpt-oss") else ("experts", "pipeline")
    return _Setting(device, int(cells["GPUs"]), axes, cells["model"], software="megatron")


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
    """The rows of `terrace/simulate/validated.csv` that are not held out, from the page's tables and from `PAGES`."""
    by_title = {table.title: table for table in tables}
    rows = [row for title, setting in STEPS.items() for row in _steps(by_title[title], setting)]
    return [*rows, *_forms(by_title[_FORMS]), *_probed()]


def section(rows: Sequence[Validated]) -> str:
    """The section of the page on the bands that these rows give."""
    seen = defaultdict[str, list[Validated]](list)
    for row in rows:
        if row.is_step and row.seen and row.source in STEPS:
            seen[row.generation].append(row)
    tables = [
        (generation, ", ".join(dict.fromkeys(row.source for row in alike)), str(len(alike)))
        for generation, alike in seen.items()
    ]
    pairs = relative_errors(rows)
    off = quantile(pairs, TIE)
    ties = _TIES.format(pairs=len(pairs), off=off, tie=min(MOST_TIE, off))
    heads = ("generation", "sources", "steps", "promised", "as a named software", "band")
    parts = _TEXT.format(level=LEVEL, fewest=FEWEST), markdown_table(heads, list(_bands(rows))), ties, _SEEN
    return "\n".join([*parts, markdown_table(("generation", "tables", "rows"), tables)])


def _bands(rows: Sequence[Validated]) -> Iterator[tuple[str, ...]]:
    """A row for each generation, for one that no step is of, and for the group of plans with a context axis."""
    known = [row for row in rows if row.is_step and not row.seen]
    cpu = by_source(row for row in known if row.generation == CPU)
    steps, level = sum(map(len, cpu)), promised(len(cpu))
    yield CPU, str(len(cpu)), str(steps), f"{level:.0%}", "", f"{pooled_quantile(cpu, level):.1%}"
    for generation in dict.fromkeys([*(row.generation for row in known if row.generation != CPU), ""]):
        for in_context in (False, True):
            own, named = (wanted(rows, generation, software, in_context) for software in (OWN, ANY))
            if in_context and not own.near:
                continue
            name = (generation or "any other GPU") + ", context axis" * in_context
            counts = str(len(by_source(own.near))), str(len(own.near)), f"{LEVEL:.0%}" if own.has_own else ""
            yield (name, *counts, f"{named.share:.1%}", f"{own.share:.1%}")


def _steps(table: Table, setting: Callable[[Cells], _Setting]) -> Iterator[Validated]:
    for row in table.rows:
        found = setting(dict(zip(table.heads, row.cells, strict=True)))
        # Of a rate, the step's error is that of its inverse.
        ratio = row.modelled / row.published if table.unit == "s" else row.published / row.modelled
        yield _seen(found, ratio - 1, table.title)


def _seen(row: _Setting, error: float, title: str) -> Validated:
    generation, axes = generation_of(row.device), frozenset(row.axes)
    software = row.software or OWN
    return Validated(row.kind, generation, axes, row.devices, row.task, round(error, 4), title, software, True)


def _forms(table: Table) -> Iterator[Validated]:
    """A row for each form of the layer: forward and backward together, on eight tensor ranks."""
    forms: dict[str, list[Row]] = defaultdict(list)
    for row in table.rows:
        forms[row.cells[0]].append(row)
    for passes in forms.values():
        ratio = sum(row.modelled for row in passes) / sum(row.published for row in passes)
        yield _seen(_Setting("A100", 8, ("tensor",), "22B layer", "layer", "megatron"), ratio - 1, _FORMS)


def _probed() -> Iterator[Validated]:
    for name in PAGES:
        for cells in _table_of((ROOT / name).read_text(encoding="utf-8")):
            ratio = float(cells["predicted s"]) / float(cells["measured s"])
            plan = cells["plan"]
            axes = [axis for axis, sign in (("outer", "every"), ("pipeline", "stages")) if sign in plan]
            place = cells.get("place", "slow link")
            yield Validated(STEP, CPU, frozenset(axes), _RANKS, place, round(ratio - 1, 4), place)


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

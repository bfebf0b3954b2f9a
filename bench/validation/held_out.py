"""Published steps that the cost model was not built on, and whether bands hold on a source that they do not know.

`data/held_out.csv` has a row for each step. No constant, no term and no software's description was taken from them or
changed after they had been compared; the sources were chosen by whether they say their plan, before any was priced.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from bench.validation.published import Line, cluster_of, published_s, step_of
from bench.validation.rows import markdown_table, read_rows
from terrace.plan.plan import AXES
from terrace.simulate.bands import (
    CPU,
    FEWEST,
    FP8,
    LEVEL,
    OWN,
    STEP,
    Validated,
    by_source,
    generation_of,
    pooled_quantile,
    widest_quantile,
)
from terrace.simulate.step import predict_step

FILE = "held_out.csv"
SOURCES: Mapping[str, str] = {
    "layouts": "Hagemann et al. 2311.05610, their rows with sequence parallelism: flash attention 2, kernels for norms",
    "fms-fsdp": "README of foundation-model-stack/fms-fsdp: nodes with 400 and 800 Gbit/s",
    "torchtitan": "docs/performance.md of pytorch/torchtitan (64 A100; 405B on 128 H100) and its "
    "benchmarks/llama3_h100_202412_torchtitan.md (compiled rows)",
    "trainy": "benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md of pytorch/torchtitan",
    "torchao": "torchao/float8/README.md and torchao/prototype/mx_formats/README.md of pytorch/ao; its B200 are power "
    "limited, no figure given",
    "kempner": "benchmarks/mfu_scaling, weak_scaling_160gpu and 175b_360gpu of KempnerInstitute/KempnerForge: 4 H200 "
    "a node",
    "llama3": "The Llama 3 Herd of Models, 2407.21783, table 4, without the row of 131,072 tokens, whose count of "
    "FLOPs is not said",
    "korthikanti": "Korthikanti et al. 2205.05198, table 5, without the 22B, whose layer is in another table here",
    "mt-nlg": "Smith et al. 2201.11990, section 2.4",
    "gpt-neox": "Black et al. 2204.06745: 150,000 steps in 1,830 hours, whatever else these contain",
}

_TEXT = """## Steps that the model was not built on

Published steps priced as this runtime would run the plan that their source names, on presets as they are with the
nodes and links that it states. None of them was seen while the model was built, and nothing was changed after they had
been compared: **these rows, and no others, give the bands of predicted steps.** None was run by Terrace, which no GPU
has run yet. An error below zero promises a faster step than the source's software reached; nearly all are. What the
sources do that this runtime does not is in no figure: kernels of their own, launches of uncompiled layers, flat
parameters that are copied, allocators that are short of memory.

{sources}
"""


def lines() -> list[Line]:
    """The rows of the file, each a published step."""
    return list(read_rows(FILE))


def row_of(line: Line) -> Validated:
    """The validated row of a published step, priced as this runtime."""
    cluster = cluster_of(line)
    axes = [axis for axis in AXES if axis != "data" and int(line.get(axis, "1")) > 1]
    axes += [FP8] if line["precision"] != "bf16" else []
    task = f"{line['source']} {line['preset']} {line['model']} {line['sequence']} {line['precision']}"
    error = predict_step(step_of(line)).step_s / published_s(line) - 1
    generation = generation_of(cluster.device.name)
    return Validated(STEP, generation, frozenset(axes), int(line["gpus"]), task, round(error, 4), line["source"])


def held_out_rows() -> list[Validated]:
    """All rows, in the order of the file; about a minute of processor time."""
    return [row_of(line) for line in lines()]


class Held(NamedTuple):
    """How the bands of a generation held when each of its sources in turn was left out.

    `coverage`: share of the left-out source's steps within the band, mean over sources. `width`: mean band.
    """

    generation: str
    sources: int
    rows: int
    coverage: float
    width: float


def leave_one_out(rows: Sequence[Validated], software: str = OWN) -> list[Held]:
    """Leave one source out, for every generation and for all accelerators together ("all").

    As `terrace.simulate.bands`: a generation with fewer than `FEWEST` other sources has the widest band of the others.
    """
    known = [row for row in rows if row.is_step and not row.seen and row.software == software]
    known = [row for row in known if row.generation != CPU]
    groups: list[tuple[str, Callable[[Validated], bool]]] = [("all", lambda row: True)]
    for generation in dict.fromkeys(row.generation for row in known):
        groups.append((generation, lambda row, name=generation: row.generation == name))  # type: ignore[misc]
    found = []
    for name, belongs in groups:
        here = [row for row in known if belongs(row)]
        sources = dict.fromkeys(row.source for row in here)
        shares, widths = [], []
        for source in sources:
            near = by_source(row for row in here if row.source != source)
            rest = [row for row in known if row.source != source]
            band = pooled_quantile(near, LEVEL) if len(near) >= FEWEST else widest_quantile(rest)[0]
            left = [row.miss for row in here if row.source == source]
            shares.append(fmean(miss <= band for miss in left))
            widths.append(band)
        found.append(Held(name, len(sources), len(here), fmean(shares), fmean(widths)))
    return found


def held_table(rows: Sequence[Validated], software: str = OWN) -> str:
    """The table of `leave_one_out` in Markdown."""
    heads = ("generation", "sources", "steps", f"held within the band of {LEVEL:.0%}", "mean band")
    body = [
        (each.generation, str(each.sources), str(each.rows), f"{each.coverage:.0%}", f"{each.width:.0%}")
        for each in leave_one_out(rows, software)
    ]
    return markdown_table(heads, body)


def section(rows: Iterable[Validated]) -> str:
    """The section of the page on these rows."""
    known = [row for row in rows if row.software == OWN and row.source in SOURCES]
    by_name: dict[tuple[str, str], list[Validated]] = defaultdict(list)
    for row in known:
        by_name[row.source, row.generation].append(row)
    heads = ("source", "generation", "steps", "mean error", "largest", "bias")
    body = []
    for (source, generation), alike in by_name.items():
        errors = [row.error for row in alike]
        mean, most = fmean(map(abs, errors)), max(errors, key=abs)
        body.append((source, generation, str(len(alike)), f"{mean:.1%}", f"{most:+.1%}", f"{fmean(errors):+.1%}"))
    names = "".join(f"- **{name}**: {words}.\n" for name, words in SOURCES.items())
    parts = [_TEXT.format(sources=names.strip()), markdown_table(heads, body), _HELD, held_table(known), _ROWS]
    return "\n".join([*parts, _rows_table(known)])


_HELD = f"""Each source left out in turn, its steps held against the band of the others (`python -m bench.validation
--held-out`). A band promises {LEVEL:.0%}; a generation with fewer than {FEWEST} other sources has the widest band of
the others. One source says little about a generation: that of Blackwell ran on devices of limited power.
"""

_ROWS = "The steps:\n"


def _rows_table(rows: Sequence[Validated]) -> str:
    heads = (
        "source",
        "preset",
        "model",
        "tokens",
        "GPUs",
        "tensor",
        "pipeline",
        "micro-batch",
        "recomputed",
        "precision",
    )
    names = (
        "source",
        "preset",
        "model",
        "sequence",
        "gpus",
        "tensor",
        "pipeline",
        "micro_batch",
        "recompute",
        "precision",
    )
    body = []
    for line, row in zip(lines(), rows, strict=True):
        cells = [line[name] for name in (*names, "precision")]
        body.append((*cells, f"{published_s(line):.4g}", f"{row.error:+.1%}"))
    return markdown_table((*heads, "published, s", "error"), body)

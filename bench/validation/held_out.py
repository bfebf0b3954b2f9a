"""Published steps that the cost model was not built on, and whether bands hold for a source that is left out.

`data/held_out.csv` has a row for each step. No constant, no term and no software's description was taken from them or
changed after they had been compared. Sources were chosen, before any was priced, by whether they state their plan.
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
    largest,
    pooled_quantile,
    widest_quantile,
)
from terrace.simulate.step import predict_step

FILE = "held_out.csv"
SOURCES: Mapping[str, str] = {
    "layouts": "Hagemann et al. 2311.05610, their rows with sequence parallelism: flash attention 2, kernels for norms",
    "fms-fsdp": "the rates of 128 A100 are those of the first README of foundation-model-stack/fms-fsdp; links of 400 "
    "and 800 Gbit/s and the rates of 96 H100 are from Maximizing training throughput using PyTorch FSDP (pytorch.org, "
    "March 2024), whose A100 rates (7B 3700, 70B 370) are 2 to 3 % lower and no second measurement of these plans. "
    "Without both 13B that recompute every n layers, n not said",
    "torchtitan": "docs/performance.md of pytorch/torchtitan (64 A100; 405B on 128 H100) and its "
    "benchmarks/llama3_h100_202412_torchtitan.md: compiled rows, tables 1 to 4. `selective op` is priced as every "
    "second layer. Without asynchronous tensor parallelism (tables 5 and 6 and the rest of 4), which fuses messages "
    "into products as no plan here does",
    "trainy": "benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md of pytorch/torchtitan",
    "torchao": "torchao/float8/README.md and torchao/prototype/mx_formats/README.md of pytorch/ao, which train with "
    "torchtitan and name devices alone: nodes of the presets are assumed. Its B200 are power limited, no figure given",
    "kempner": "benchmarks/mfu_scaling, weak_scaling_160gpu and 175b_360gpu of KempnerInstitute/KempnerForge: 4 H200 "
    "a node. InfiniBand NDR is said of the 175B alone and assumed for all; the NVSwitch of an eight-GPU board is, too, "
    "which boards with four often lack. The 13B on 8 GPUs without tensor ranks was not compiled",
    "llama3": "The Llama 3 Herd of Models, 2407.21783, table 4, without the row of 131,072 tokens, whose count of "
    "FLOPs is not said. 8 chunks a rank are inferred from the layers, as they are not said either",
    "korthikanti": "Korthikanti et al. 2205.05198, table 5, without the 22B, whose layer is in another table here. "
    "Models and degrees of the 530B and 1T are also in Megatron-LM's Table 1, which was seen",
    "mt-nlg": "Smith et al. 2201.11990, section 2.4",
    "gpt-neox": "Black et al. 2204.06745 and configs/20B.yml of EleutherAI/gpt-neox: 150,000 steps in 1,830 hours, "
    "which contain evaluations and saves. fp16 is priced as bf16: the same rates and bytes, without the scale of "
    "the loss",
}
# Publications whose steps were run by one program are one source of a band.
PROGRAMS: Mapping[str, str] = {"trainy": "torchtitan", "torchao": "torchtitan"}

_TEXT = """## Steps that the model was not built on

Published steps priced as this runtime would run the plan that their publication names, on presets as they are with the
nodes and links that it states; what it does not state of a machine is assumed to be as in the preset, also the capacity
and clocks of its devices. None was seen while the model was built, and nothing was changed in the model after they had
been compared: **these rows, and no others, give the bands of predicted steps.** They are unseen by the model, not
by its authors, who had read the papers; Llama 8B, 70B and 405B on H100 are in seen tables, too, with other software.
None was run by Terrace, which no GPU has run yet.

**An error below zero promises a faster step than the program reached, and {late} of {steps} are.** Predictions
leave out what the programs do and this runtime does not: kernels of their own, attention that is slower than the
fastest kernel of the device, launches of uncompiled layers, copies of flat parameters, allocators short of memory.

A program's errors are correlated on every machine, so a **source is a program**: torchtitan, trainy and torchao all run
torchtitan and count as one source. Forks that changed how a step runs (of Megatron-LM: mt-nlg, gpt-neox) count
separately, although they share an ancestor, so sources are not independent.

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
    return Validated(STEP, generation, frozenset(axes), int(line["gpus"]), task, round(error, 4), program_of(line))


def program_of(line: Line) -> str:
    """The source of a row: the program that ran it, by the name of the publication where that is its only one."""
    return PROGRAMS.get(line["source"], line["source"])


def held_out_rows() -> list[Validated]:
    """All rows, in the order of the file; about a minute of processor time."""
    return [row_of(line) for line in lines()]


class Held(NamedTuple):
    """How the bands of a generation held when each of its sources in turn was left out.

    `coverage`: share of the left-out source's steps within the band, mean over sources. `widths`: the bands without
    each source.
    """

    generation: str
    sources: int
    rows: int
    coverage: float
    widths: tuple[float, ...]


def leave_one_out(rows: Sequence[Validated], software: str = OWN) -> list[Held]:
    """Leave one source out, for every generation and for all accelerators together ("all").

    As in `terrace.simulate.bands`, a generation with fewer than `FEWEST` other sources has the widest band of
    the others, or their largest miss.
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
            few = max(widest_quantile(rest)[0], largest(near))
            band = pooled_quantile(near, LEVEL) if len(near) >= FEWEST else few
            left = [row.miss for row in here if row.source == source]
            shares.append(fmean(miss <= band for miss in left))
            widths.append(band)
        found.append(Held(name, len(sources), len(here), fmean(shares), tuple(widths)))
    return found


def held_table(rows: Sequence[Validated], software: str = OWN) -> str:
    """The table of `leave_one_out` in Markdown."""
    heads = ("generation", "sources", "steps", f"held within the band of {LEVEL:.0%}", "bands")
    body = [
        (
            each.generation,
            str(each.sources),
            str(each.rows),
            f"{each.coverage:.0%}",
            f"{min(each.widths):.0%} to {max(each.widths):.0%}",
        )
        for each in leave_one_out(rows, software)
    ]
    return markdown_table(heads, body)


def section(rows: Iterable[Validated]) -> str:
    """The section of the page on these rows, which are in the order of the file."""
    known = [row for row in rows if row.software == OWN]
    by_name: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for line, row in zip(lines(), known, strict=True):
        by_name[line["source"], row.source, row.generation].append(row.error)
    heads = ("publication", "source", "generation", "steps", "mean error", "largest", "bias")
    body = []
    for name, errors in by_name.items():
        mean, most = fmean(map(abs, errors)), max(errors, key=abs)
        body.append((*name, str(len(errors)), f"{mean:.1%}", f"{most:+.1%}", f"{fmean(errors):+.1%}"))
    names = "".join(f"- **{name}**: {words}.\n" for name, words in SOURCES.items())
    late = sum(row.error < 0 for row in known)
    parts = [_TEXT.format(sources=names.strip(), late=late, steps=len(known)), markdown_table(heads, body)]
    return "\n".join([*parts, _HELD, held_table(known), _ROWS, _rows_table(known)])


_HELD = f"""The table leaves each source out in turn and compares its steps with the band of the others (`python -m
bench.validation --held-out`). A band promises {LEVEL:.0%}; a generation with fewer than {FEWEST} other sources has the
widest band of all, and at least their largest miss. With {FEWEST} sources a band is the largest miss, so a single step
sets it. The ranges show how much bands depend on one source. One source says little about a generation: that of
Blackwell ran on devices of limited power, and all its steps are outside the band of the others.
"""

_ROWS = "The steps:\n"

# Heading -> column of the file.
_COLUMNS: Mapping[str, str] = {
    "publication": "source",
    "preset": "preset",
    "model": "model",
    "tokens": "sequence",
    "GPUs": "gpus",
    "tensor": "tensor",
    "context": "context",
    "pipeline": "pipeline",
    "micro-batch": "micro_batch",
    "recomputed": "recompute",
    "precision": "precision",
}


def _rows_table(rows: Sequence[Validated]) -> str:
    body = [
        (*(line[name] for name in _COLUMNS.values()), f"{published_s(line):.4g}", f"{row.error:+.1%}")
        for line, row in zip(lines(), rows, strict=True)
    ]
    return markdown_table((*_COLUMNS, "published, s", "error"), body)

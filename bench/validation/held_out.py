"""Published steps that the cost model was not built on, and whether bands hold for a source that is left out.

`data/held_out.csv` has a row for each step. No constant, no term and no software's description was taken from them or
changed after they had been compared. Sources were chosen, before any was priced, by whether they state their plan.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from bench.validation.published import Line, cluster_of, published_s, step_of
from bench.validation.rows import markdown_table, read_rows
from terrace.plan.plan import AXES
from terrace.simulate.bands import CPU, FEWEST, FP8, LEVEL, OWN, STEP, Validated, generation_of, wanted
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
# (Software, axis): rows with this axis were seen, priced as this software, before a cost of it on the axis was stated.
TAUGHT = frozenset({("fsdp2", "tensor")})
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


def row_of(line: Line, software: str = OWN) -> Validated:
    """The validated row of a published step, priced as this runtime or as the software that ran it."""
    cluster = cluster_of(line)
    axes = [axis for axis in AXES if axis != "data" and int(line.get(axis, "1")) > 1]
    axes += [FP8] if line["precision"] != "bf16" else []
    task = f"{line['source']} {line['preset']} {line['model']} {line['sequence']} {line['precision']}"
    error = predict_step(step_of(line, software)).step_s / published_s(line) - 1
    generation, devices = generation_of(cluster.device.name), int(line["gpus"])
    row = Validated(STEP, generation, frozenset(axes), devices, task, round(error, 4), program_of(line), software)
    return row._replace(seen=(row.family, "tensor") in TAUGHT and "tensor" in axes)


def program_of(line: Line) -> str:
    """The source of a row: the program that ran it, by the name of the publication where that is its only one."""
    return PROGRAMS.get(line["source"], line["source"])


def held_out_rows() -> list[Validated]:
    """All rows in the order of the file, as this runtime and then as their software: half a processor minute."""
    return [row_of(line) for line in lines()] + [row_of(line, line["software"]) for line in lines()]


class Held(NamedTuple):
    """How the bands of a group of steps held when each of its sources in turn was left out.

    `coverage`: share of the left-out source's steps within the band, mean over sources. `widths`: the bands of the
    steps without each source. `misses`: mean error of each source's steps.
    """

    name: str
    sources: int
    rows: int
    coverage: float
    widths: tuple[float, ...]
    misses: tuple[float, ...]


def leave_one_out(rows: Sequence[Validated], *, named: bool = False) -> list[Held]:
    """Leave one source out, for all accelerators ("all"), each generation, and with `named` each software.

    Every step has the band that a command would print for it (`terrace.simulate.bands.wanted`) without its source.
    `named`: rows priced as the software that ran them, otherwise as this runtime.
    """
    known = [row for row in rows if row.is_step and not row.seen and row.generation != CPU]
    known = [row for row in known if (row.software != OWN) == named]
    bands: dict[tuple[str, ...], float] = {}
    inside = list[tuple[Validated, float]]()
    for row in known:
        key = row.source, row.generation, row.family, "context" * ("context" in row.axes)
        if key not in bands:
            rest = [other for other in known if other.source != row.source]
            bands[key] = wanted(rest, row.generation, row.family, "context" in row.axes).share
        inside.append((row, bands[key]))
    groups: dict[str, list[tuple[Validated, float]]] = {"all": inside}
    for row, band in inside:
        groups.setdefault(row.generation, []).append((row, band))
    for row, band in inside if named else ():
        groups.setdefault(row.family, []).append((row, band))
    return [_held(name, pairs) for name, pairs in groups.items()]


def _held(name: str, pairs: Sequence[tuple[Validated, float]]) -> Held:
    shares, widths, misses = [], list[float](), []
    sources = dict.fromkeys(row.source for row, _ in pairs)
    for source in sources:
        own = [(row, band) for row, band in pairs if row.source == source]
        shares.append(fmean(row.miss <= band for row, band in own))
        widths += dict.fromkeys(band for _, band in own)
        misses.append(fmean(abs(row.error) for row, _ in own))
    return Held(name, len(sources), len(pairs), fmean(shares), tuple(widths), tuple(misses))


def held_table(rows: Sequence[Validated], *, named: bool = False) -> str:
    """The table of `leave_one_out` in Markdown."""
    of = "generation or software" if named else "generation"
    heads = (of, "sources", "steps", f"held within the band of {LEVEL:.0%}", "bands", "mean", "mean error")
    body = [
        (
            each.name,
            str(each.sources),
            str(each.rows),
            f"{each.coverage:.0%}",
            f"{min(each.widths):.0%} to {max(each.widths):.0%}",
            f"{fmean(each.widths):.0%}",
            f"{fmean(each.misses):.1%}",
        )
        for each in leave_one_out(rows, named=named)
    ]
    return markdown_table(heads, body)


def section(rows: Iterable[Validated]) -> str:
    """The section of the page on these rows, which are in the order of the file, once for each pricing."""
    rows = list(rows)
    known, named = ([row for row in rows if (row.software == OWN) == own] for own in (True, False))
    by_name: dict[tuple[str, ...], list[tuple[float, float]]] = defaultdict(list)
    for line, row, other in zip(lines(), known, named, strict=True):
        by_name[line["source"], row.source, other.software, row.generation].append((row.error, other.error))
    heads = ("publication", "source", "software", "generation", "steps", "mean error", "largest", "bias")
    body = list[tuple[str, ...]]()
    for name, pairs in by_name.items():
        errors, as_named = zip(*pairs, strict=True)
        mean, most = fmean(map(abs, errors)), max(errors, key=abs)
        own = f"{mean:.1%}", f"{most:+.1%}", f"{fmean(errors):+.1%}"
        body.append((*name, str(len(errors)), *own, f"{fmean(map(abs, as_named)):.1%}", f"{fmean(as_named):+.1%}"))
    names = "".join(f"- **{name}**: {words}.\n" for name, words in SOURCES.items())
    late = sum(row.error < 0 for row in known)
    parts = [
        _TEXT.format(sources=names.strip(), late=late, steps=len(known)),
        markdown_table((*heads, "mean as named", "bias as named"), body),
    ]
    parts += [_HELD, held_table(known), _NAMED, held_table(named, named=True), _ROWS, _rows_table(known, named)]
    return "\n".join(parts)


_NAMED = """As the software that ran them, these steps are priced by `terrace/cluster/named_software.py`. Its costs are
from source code and were written before the steps were priced by them, but for one: that messages of a tensor axis are
waited for under `fsdp2`. Those rows count as seen. All steps of `te` are in seen tables, and nothing here was run by
`nanotron`, so both have the widest band:
"""

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


def _rows_table(rows: Sequence[Validated], named: Sequence[Validated]) -> str:
    body = [
        (
            *(line[name] for name in _COLUMNS.values()),
            f"{published_s(line):.4g}",
            f"{other.error:+.1%}",
            f"{row.error:+.1%}",
        )
        for line, row, other in zip(lines(), rows, named, strict=True)
    ]
    return markdown_table((*_COLUMNS, "published, s", "as named", "error"), body)

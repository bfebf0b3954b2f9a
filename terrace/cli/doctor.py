"""`terrace doctor`: facts about this machine, the parts Terrace will use and why, and fixes for missing ones.

Given a model, a cluster or a plan, it also checks that they fit together. `--network` starts the ranks and measures the
links of every tier.
"""

import argparse
import json
import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from terrace.base.errors import ConfigError, TerraceError
from terrace.base.extras import install
from terrace.base.words import counted, quantity, seconds
from terrace.cli.lines import DOCTOR_SECONDS
from terrace.cli.options import resolve_run
from terrace.cli.terminal import Terminal
from terrace.launch.launchers import rank_of
from terrace.probe.findings import Finding, findings
from terrace.probe.machine import Machine, look
from terrace.train.config import RunConfig

if TYPE_CHECKING:
    import torch

    from terrace.probe.network import MeasuredTier

_MARKS = {"fine": "ok", "absent": "absent", "note": "note", "blocks": "BLOCKS"}
_STYLES = {"fine": "", "absent": "dim", "note": "yellow", "blocks": "bold red"}
_SLOW = 0.5  # of the file's bandwidth: below it predictions are far off
_MOST_S = 30.0
_TRIED_BYTES = 4096  # of a file of kept states
_HEAD = 128  # size of heads of most large models


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Prints the findings; returns 0, or 1 if one of them blocks."""
    options.seconds = DOCTOR_SECONDS if options.seconds is None else options.seconds
    if not (math.isfinite(options.seconds) and 0 < options.seconds <= _MOST_S):
        raise ConfigError(f"--seconds {options.seconds:g} must be above 0 and at most {_MOST_S:g}")
    machine = look(Path())
    found = [*findings(machine), *_attention(machine), *_products(machine), *_disk(machine)]
    # Under a launcher all ranks measure, one prints.
    is_first = rank_of(machine.variables) == "0"
    asked = [getattr(options, name) for name in ("config", "model", "cluster", "plan", "data", "ranks")]
    # Without options of a run the doctor looks at the machine only.
    if rest or any(each is not None for each in asked):
        found += _run_findings(options, rest, machine)
    links: list[MeasuredTier] | None = []
    if options.network:
        links = _links(options, rest, machine, found)
    if not is_first or links is None:  # under a launcher only rank 0 prints
        return 0
    # After the machine's findings, so that blocking ones come first on the screen.
    found += [_link_finding(link) for link in links]
    if options.json:
        table = {"machine": asdict(machine), "findings": [asdict(each) for each in found]}
        print(json.dumps(table | {"links": [asdict(link) for link in links]}, indent=1))
    else:
        _show(machine, found)
    return int(any(each.level == "blocks" for each in found))


def _attention(machine: Machine) -> Iterator[Finding]:
    if not _has_torch(machine):
        return
    import torch

    from terrace.model import attention_plans, pair_kernels

    device, dtypes = _device(machine), (torch.bfloat16, torch.float32)
    for about, is_cut in (("attention", False), ("attention, documents", True)):
        found = (attention_plans.describe(device, dtype, _HEAD, is_grouped=True, is_cut=is_cut) for dtype in dtypes)
        yield Finding(level="fine", about=about, words=", ".join(found))
    words = ", ".join(pair_kernels.describe(device, dtype) for dtype in dtypes)
    yield Finding(level="fine", about="attention pairs", words=words)


def _device(machine: Machine) -> "torch.device":
    import torch

    from terrace.accelerator import HOST, TYPE

    return torch.device(TYPE) if machine.gpus and machine.has_nccl else HOST


def _products(machine: Machine) -> Iterator[Finding]:
    if not _has_torch(machine) or (machine.gpus and machine.has_nccl):
        return
    from terrace.probe.products import bf16_slowdown

    slowdown = bf16_slowdown()
    words = f"in bf16 {slowdown:.1f} times the time of fp32: "
    if slowdown > 1:
        words += 'compute = "fp32" with messages = "bf16" is faster here (the default if the cluster file has it so)'
    else:
        words += 'compute = "bf16" is faster here'
    yield Finding(level="fine", about="products", words=words)


def _disk(machine: Machine) -> Iterator[Finding]:
    if not _has_torch(machine):
        return
    from terrace.runtime.kept.file import KeptFile

    try:
        file = KeptFile(Path(), [_TRIED_BYTES])
        file.close()
    except TerraceError as error:
        yield Finding(level="absent", about="disk", words=f"no states can be kept below the device: {error}")
        return
    free = shutil.disk_usage(Path()).free
    words = f"{file.file_system}, {quantity(free, 'B')} free, {'' if file.is_direct else 'without '}direct I/O"
    yield Finding(level="fine", about="disk", words=f"{words}: for states below the device (plan.keep)")


def _has_torch(machine: Machine) -> bool:
    return not machine.torch_error and machine.packages.get("torch") is not None


def _run_findings(options: argparse.Namespace, rest: Sequence[str], machine: Machine) -> list[Finding]:
    from terrace.cli.checks import check_run

    try:
        config = resolve_run(options, rest)
        found = check_run(config, machine, _plan_command(options, config))
        return [*found, *_attention_of_run(config, machine), *_parts_of_run(config, machine)]
    except TerraceError as error:
        return [Finding(level="blocks", about="settings", words=str(error))]


def _attention_of_run(run: RunConfig, machine: Machine) -> Iterator[Finding]:
    device = _device(machine) if _has_torch(machine) else None
    # On another machine another kernel may serve.
    if device is None or device.type != run.cluster.device.type:
        return
    from terrace.train.adapted import attention_words

    yield Finding(level="fine", about="attention of a run", words=attention_words(run, device).split(": ", 1)[1])


def _parts_of_run(run: RunConfig, machine: Machine) -> Iterator[Finding]:
    # Refused here, as a run is refused, where the package or a device is missing.
    if run.train.kernels == "torch" or not _has_torch(machine):
        return
    from terrace.model.liger import serve
    from terrace.train.rules import parts_words

    device = _device(machine)
    if device.type == run.cluster.device.type:
        serve((), run.train.kernels, device)
    yield Finding(level="fine", about="parts of a run", words=parts_words(run))


def _plan_command(options: argparse.Namespace, config: RunConfig) -> str:
    # A command can repeat the run's settings only where model and cluster were given by name.
    if options.model is None or options.cluster is None:
        return "terrace plan"
    sizes = f"--batch {config.rows} --sequence {config.train.sequence} --compute {config.plan.compute}"
    return f"terrace plan --model {options.model} --cluster {options.cluster} {sizes}"


def _links(
    options: argparse.Namespace, rest: Sequence[str], machine: Machine, found: list[Finding]
) -> "list[MeasuredTier] | None":
    # None on all ranks of a launcher but the first; blocking findings are appended to `found`.
    if not _has_torch(machine):
        words = "measuring needs torch, which is not there or does not work"
        found.append(Finding(level="blocks", about="links", words=words, fix=install("torch")))
        return []
    # Imported here: probing needs torch, and the doctor must work without it.
    from terrace.cli import probing

    cluster = resolve_run(options, rest).cluster
    return probing.run_links(cluster, options.seconds, quiet=options.json)


def _link_finding(link: "MeasuredTier") -> Finding:
    reached = f"{quantity(link.bandwidth_bytes_per_s, 'B/s')} after {seconds(link.latency_s)}"
    links = f"{quantity(link.given_bandwidth_bytes_per_s, 'B/s')} after {seconds(link.given_latency_s)}"
    words, about = f"{reached}; the cluster's file says {links}", f"tier {link.tier}"
    # Well below the file's rate its predictions are not to be trusted.
    if link.share >= _SLOW:
        return Finding(level="fine", about=about, words=words)
    fix = "predictions are off: terrace probe writes a cluster file with the measured rates"
    return Finding(level="note", about=about, words=words, fix=fix)


def _show(machine: Machine, found: Sequence[Finding]) -> None:
    console = Terminal()
    print(f"{machine.system}, {counted(machine.num_cores, 'core')}")
    if machine.variables:
        print("set: " + ", ".join(f"{name}={value}" for name, value in machine.variables.items()))
    print()
    width = max(len(each.about) for each in found)
    for each in found:
        style, line = _STYLES[each.level], f"{_MARKS[each.level]:>6}  {each.about:<{width}}  {each.words}"
        line += f": {each.fix}" * (each.level == "absent")
        console.print(line, style=style, soft_wrap=True)
        if each.fix and each.level != "absent":
            console.print(f"{'':>6}  {'':<{width}}  -> {each.fix}", style=style, soft_wrap=True)
    blocking = [each.about for each in found if each.level == "blocks"]
    notes = sum(each.level == "note" for each in found)
    verdict = f"blocked by {', '.join(blocking)}" if blocking else "nothing blocks"
    print(f"\n{verdict}" + (f"; {counted(notes, 'note')} above" if notes else ""))

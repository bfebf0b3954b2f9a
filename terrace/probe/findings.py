"""Conclusions from a `Machine`: which backends will be used and why, warnings, and obstacles with their fixes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from terrace.base.errors import ConfigError
from terrace.base.extras import install
from terrace.base.words import counted
from terrace.launch.launchers import place
from terrace.probe.machine import NEEDED, PACKAGES, Machine

Level = Literal["fine", "absent", "note", "blocks"]

_OLDEST_PYTHON = (3, 11)
_OLDEST_TORCH = (2, 11)  # as in pyproject.toml
_FEW_FILES = 1024  # each rank holds several sockets for every other rank
_LITTLE_DISK_BYTES = 1_000_000_000
_LITTLE_MEMORY_BYTES = 400_000_000  # of a rank that imported torch and holds a little work


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One check: its subject, the result, and a fix if needed."""

    level: Level
    about: str
    words: str
    fix: str = ""


def findings(machine: Machine) -> list[Finding]:
    return [*_software(machine), *_backend(machine), *_limits(machine), *_launcher(machine)]


def _software(machine: Machine) -> Iterator[Finding]:
    version = ".".join(map(str, machine.python))
    if machine.python[:2] < _OLDEST_PYTHON:
        oldest = ".".join(map(str, _OLDEST_PYTHON))
        yield Finding(level="blocks", about="python", words=f"{version} is too old", fix=f"install Python {oldest}")
    else:
        yield Finding(level="fine", about="python", words=version)
    for name in NEEDED:
        found = machine.packages.get(name)
        if found is None:
            words = f"absent: planning works, {PACKAGES[name]} does not"
            yield Finding(level="blocks", about=name, words=words, fix=install(name))
        elif name == "torch" and machine.torch_error:
            words = f"{found} cannot be imported: {machine.torch_error}"
            fix = "pip install --force-reinstall torch"
            yield Finding(level="blocks", about=name, words=words, fix=fix)
        elif name == "torch" and _numbers(found) < _OLDEST_TORCH:
            fix = f"pip install 'torch>={'.'.join(map(str, _OLDEST_TORCH))}'"
            yield Finding(level="note", about=name, words=f"{found} was not tried with Terrace", fix=fix)
        else:
            yield Finding(level="fine", about=name, words=found)
    for name, purpose in PACKAGES.items():
        if name not in NEEDED:
            found = machine.packages.get(name)
            if found is not None:
                yield Finding(level="fine", about=name, words=found)
            else:
                yield Finding(level="absent", about=name, words=f"only for {purpose}", fix=install(name))


def _backend(machine: Machine) -> Iterator[Finding]:
    # Without a working torch there is nothing beyond the software findings.
    if machine.packages.get("torch") is None or machine.torch_error:
        return
    if machine.gpus and machine.has_nccl:
        names = ", ".join(dict.fromkeys(gpu.name for gpu in machine.gpus))
        words = f"nccl on CUDA: {len(machine.gpus)} x {names}; more local ranks than that run on the CPU"
        yield Finding(level="fine", about="backend", words=words)
        has_triton = machine.packages.get("triton") is not None
        words = "block codecs are Triton kernels" if has_triton else "block codecs are plain torch, which is slower"
        fix = "" if has_triton else "pip install triton"
        yield Finding(level="fine" if has_triton else "note", about="codecs", words=words, fix=fix)
        return
    if machine.gpus:
        words = f"torch sees {len(machine.gpus)} CUDA devices but was built without nccl, so ranks run on the CPU"
        yield Finding(level="note", about="backend", words=words, fix="install a build of torch with nccl")
    elif machine.has_nvidia and machine.torch_cuda is None:
        words = "an NVIDIA driver is here, but this torch was built for the CPU"
        yield Finding(level="note", about="backend", words=words, fix="install the CUDA build of torch")
    elif machine.has_nvidia:
        words = "an NVIDIA driver is here, but torch sees no device"
        fix = "look at nvidia-smi, CUDA_VISIBLE_DEVICES, and whether the driver is new enough for torch's CUDA "
        yield Finding(level="note", about="backend", words=words, fix=f"{fix}{machine.torch_cuda}")
    if machine.has_gloo:
        why = "" if machine.gpus or machine.has_nvidia else ": this machine has no usable CUDA device"
        yield Finding(level="fine", about="backend", words=f"gloo on the CPU{why}")
    else:
        words = "this torch has neither usable nccl nor gloo, so ranks cannot communicate"
        yield Finding(level="blocks", about="backend", words=words, fix="install a build of torch with gloo")


def _limits(machine: Machine) -> Iterator[Finding]:
    ranks = max(1, machine.free_memory_bytes // _LITTLE_MEMORY_BYTES)
    if machine.free_memory_bytes < _LITTLE_MEMORY_BYTES:
        words = f"{machine.free_memory_bytes / 1e6:.0f} MB are free, less than one rank takes"
        yield Finding(level="note", about="memory", words=words, fix="end other programs")
    else:
        words = f"{machine.free_memory_bytes / 1e9:.1f} of {machine.memory_bytes / 1e9:.1f} GB free: room for about "
        yield Finding(level="fine", about="memory", words=f"{words}{counted(ranks, 'small local rank')}")
    words = f"{machine.free_disk_bytes / 1e9:.1f} GB free here"
    if machine.free_disk_bytes < _LITTLE_DISK_BYTES:
        yield Finding(level="note", about="disk", words=words, fix="name a --folder on another disk")
    else:
        yield Finding(level="fine", about="disk", words=words)
    if 0 <= machine.open_files < _FEW_FILES:
        words = f"{machine.open_files} open files at most, and a rank holds a socket for every other one"
        yield Finding(level="note", about="open files", words=words, fix="ulimit -n 65536")
    if machine.fabrics and machine.locked_bytes >= 0:
        words = f"{', '.join(machine.fabrics)} is here, but only {machine.locked_bytes} B may be locked in memory"
        yield Finding(level="note", about="locked memory", words=words, fix="ulimit -l unlimited")
    outside = [name for name in machine.interfaces if name not in ("lo", "lo0")]
    if outside:
        yield Finding(level="fine", about="network", words=", ".join((*outside, *machine.fabrics)))
    else:
        words = "only the loopback: ranks of this machine can communicate, ranks of several machines cannot"
        yield Finding(level="note", about="network", words=words)


def _launcher(machine: Machine) -> Iterator[Finding]:
    try:
        own = place(machine.variables)
    except ConfigError as error:
        words, _, fix = str(error).rpartition("; ")
        yield Finding(level="blocks", about="launcher", words=words, fix=fix)
        return
    if own is not None:
        words = f"{own.launcher}: this is rank {own.rank} of {own.world_size}, which meet at {own.address}:{own.port}"
        yield Finding(level="fine", about="launcher", words=words)
        return
    yield Finding(level="fine", about="launcher", words="none: ranks are processes of this machine")


def _numbers(version: str) -> tuple[int, int]:
    parts = [part for part in version.split("+")[0].split(".") if part.isdecimal()]
    return (int(parts[0]), int(parts[1])) if len(parts) >= 2 else (0, 0)

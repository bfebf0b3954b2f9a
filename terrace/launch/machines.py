"""Which ranks run on which machine, whether that fits the tiers, and whether all ranks run the same code."""

import hashlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from operator import mul
from pathlib import Path
from typing import Any

from terrace.base.errors import ConfigError
from terrace.launch.postmortem import compress, in_words

# A tier of one of these names is one machine: an operating system with its devices.
MACHINE_TIERS = ("node", "tray", "host", "machine")
_MAX_SHOWN = 8  # machines in the line of the map


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class Facts:
    """What a rank reports when ranks meet: where it runs, and with which code and configuration.

    `boot`: id of the running kernel, equal in all containers of a machine, empty if unknown; `device`: a CUDA device's
    uuid, empty on a CPU; `numa`: its NUMA node, or -1; `versions`: of Python, torch and Terrace's files; `sections`: a
    digest of each section of the configuration; `backend`: torch's backend for messages; `why`: the reason for that
    backend.
    """

    host: str
    boot: str = ""
    device: str = ""
    numa: int = -1
    versions: Mapping[str, str] = field(default_factory=dict)
    sections: Mapping[str, str] = field(default_factory=dict)
    backend: str = ""
    why: str = ""


def files_digest() -> str:
    """Hash of Terrace's own Python files, since a version number does not distinguish two checkouts."""
    root = Path(__file__).parent.parent
    found = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        found.update(f"{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes())
    return found.hexdigest()[:12]


def numa_of(properties: Any) -> int:
    """NUMA node of a CUDA device, given torch's properties of it; -1 if the system does not tell."""
    try:
        bus = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        return int(Path("/sys/bus/pci/devices", bus, "numa_node").read_text())
    except (AttributeError, OSError, ValueError):
        return -1


def check_same_code(facts: Sequence[Facts]) -> None:
    """Raises `ConfigError` if a rank's versions or backend differ from rank 0's, or two ranks share a CUDA device."""
    for own in facts:
        for name, version in facts[0].versions.items():
            if own.versions.get(name) != version:
                others = [r for r, other in enumerate(facts) if other.versions.get(name) != version]
                raise ConfigError(
                    f"{in_words(others)} on {', '.join(sorted({facts[r].host for r in others}))} would run {name} "
                    f"{own.versions.get(name, 'none')}, and rank 0 on {facts[0].host} runs {version}: install the same "
                    "on every machine"
                )
    for rank, own in enumerate(facts):
        if own.backend != facts[0].backend:  # a world with nccl on some machines and gloo on others would hang
            raise ConfigError(
                f"rank {rank} on {own.host} would use {own.backend} ({own.why}), but rank 0 uses {facts[0].backend}: "
                "give every machine working devices, or hide them from all"
            )
    users: dict[tuple[str, str], int] = {}
    for rank, own in enumerate(facts):
        if own.device and (first := users.setdefault((own.host, own.device), rank)) != rank:
            raise ConfigError(
                f"rank {first} and rank {rank} on {own.host} would share the device {own.device}: give every rank a "
                "device of its own (LOCAL_RANK, CUDA_VISIBLE_DEVICES)"
            )


def other_configurations(facts: Sequence[Facts]) -> list[str]:
    """One line for each set of sections in which ranks have another configuration than rank 0."""
    found: dict[tuple[str, ...], list[int]] = {}
    for rank, own in enumerate(facts):
        names = own.sections.keys() | facts[0].sections.keys()
        different = tuple(sorted(name for name in names if own.sections.get(name) != facts[0].sections.get(name)))
        if different:
            found.setdefault(different, []).append(rank)
    return [
        f"{in_words(ranks)} started with other values in {', '.join(f'[{name}]' for name in names)}; rank 0's are used"
        for names, ranks in found.items()
    ]


def boot_id() -> str:
    """Id of the running kernel. It identifies a machine: host names may repeat, and containers have their own."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def names_of(facts: Sequence[Facts]) -> tuple[list[str], list[str]]:
    """Every rank's host name, and the name of its machine, which is the machine's first host. Duplicate names get a
    number.
    """
    boots: dict[str, list[str]] = {}
    for each in facts:
        known = boots.setdefault(each.host, [])
        if each.boot not in known:
            known.append(each.boot)
    hosts = []
    for each in facts:
        number = boots[each.host].index(each.boot) + 1
        hosts.append(each.host if number == 1 else f"{each.host} ({number})")
    first: dict[str, str] = {}
    machines = [first.setdefault(each.boot or host, host) for each, host in zip(facts, hosts, strict=True)]
    return hosts, machines


def arrange(machines: Sequence[str], numas: Sequence[int] = ()) -> list[int]:
    """New rank of each old one, so that the ranks of a machine, and of its NUMA nodes, are adjacent.

    Machines and NUMA nodes keep the order of their first ranks, and the ranks within them keep theirs; rank 0 stays
    rank 0.
    """
    nodes = list(zip(machines, numas or [-1] * len(machines), strict=True))
    first = {machine: rank for rank, machine in reversed(list(enumerate(machines)))}
    of_node = {node: rank for rank, node in reversed(list(enumerate(nodes)))}
    order = sorted(range(len(nodes)), key=lambda rank: (first[machines[rank]], of_node[nodes[rank]], rank))
    new = [0] * len(order)
    for number, rank in enumerate(order):
        new[rank] = number
    return new


def check_tiers(machines: Sequence[str], tiers: Sequence[tuple[str, int]]) -> None:
    """Raises `ConfigError` unless every tier up to the machine tier lies inside one machine.

    `machines` names each rank's machine; `tiers` are names and sizes, innermost first. Ranks on a single machine may
    emulate any cluster.
    """
    if len(set(machines)) < 2:
        return
    names = [name for name, _ in tiers]
    inside = max((names.index(name) for name in MACHINE_TIERS if name in names), default=-1)
    for (name, _), joined in list(zip(tiers, accumulate((size for _, size in tiers), mul), strict=True))[: inside + 1]:
        for start in range(0, len(machines), joined):
            members = machines[start : start + joined]
            if len(set(members)) > 1:
                raise ConfigError(
                    f"tier {name!r} joins {joined} ranks of one machine, but ranks {start} to "
                    f"{start + len(members) - 1} are on {' and '.join(sorted(set(members)))}: start a multiple of "
                    f"{joined} ranks on each machine, one machine after the other, or change the sizes of the tiers, "
                    f"for example --cluster.tiers.{name}.size N"
                )


def machine_map(machines: Sequence[str], started: Sequence[int] = ()) -> str:
    """A line on which ranks run where; `started` are the launcher's rank numbers."""
    counts = Counter(machines)
    runs = [list(group) for _, group in groupby(range(len(machines)), key=machines.__getitem__)]
    parts = []
    for ranks in runs:
        text = f"{compress(ranks)} on {machines[ranks[0]]}"
        if started and [started[rank] for rank in ranks] != ranks:
            text += f" (started as {compress(sorted(started[rank] for rank in ranks))})"
        parts.append(text)
    shown = parts if len(parts) <= _MAX_SHOWN else [*parts[: _MAX_SHOWN - 1], "...", parts[-1]]
    return f"{len(counts)} {'machine' if len(counts) == 1 else 'machines'}: ranks {', '.join(shown)}"

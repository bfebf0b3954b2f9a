"""Which ranks run on which machine, whether that fits the tiers, and whether all ranks run the same code."""

import hashlib
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


@dataclass(frozen=True)
class Facts:
    """A rank's part of the meeting: where it runs, and which code and configuration it would run.

    `device`: a CUDA device's uuid, empty on a CPU; `numa`: its NUMA node, or -1; `versions`: of Python, torch and
    Terrace's files; `sections`: a digest of each section of its configuration.
    """

    host: str
    device: str = ""
    numa: int = -1
    versions: Mapping[str, str] = field(default_factory=dict)
    sections: Mapping[str, str] = field(default_factory=dict)


def files_digest() -> str:
    """Hash of Terrace's own Python files: a version number does not tell two checkouts apart."""
    root = Path(__file__).parent.parent
    found = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        found.update(f"{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes())
    return found.hexdigest()[:12]


def numa_of(properties: Any) -> int:
    """NUMA node of a CUDA device, given torch's properties of it; -1 where the system does not say."""
    try:
        bus = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        return int(Path("/sys/bus/pci/devices", bus, "numa_node").read_text())
    except (AttributeError, OSError, ValueError):
        return -1


def check_same_code(facts: Sequence[Facts]) -> None:
    """Raises `ConfigError` when a rank's versions differ from rank 0's, or when two ranks share a CUDA device."""
    for own in facts:
        for name, version in facts[0].versions.items():
            if own.versions.get(name) != version:
                others = [r for r, other in enumerate(facts) if other.versions.get(name) != version]
                raise ConfigError(
                    f"{in_words(others)} on {', '.join(sorted({facts[r].host for r in others}))} would run {name} "
                    f"{own.versions.get(name, 'none')}, and rank 0 on {facts[0].host} runs {version}: install the same "
                    "on every machine"
                )
    users: dict[tuple[str, str], int] = {}
    for rank, own in enumerate(facts):
        if own.device and (first := users.setdefault((own.host, own.device), rank)) != rank:
            raise ConfigError(
                f"rank {first} and rank {rank} on {own.host} would share the device {own.device}: give every rank a "
                "device of its own (LOCAL_RANK, CUDA_VISIBLE_DEVICES)"
            )


def other_configurations(facts: Sequence[Facts]) -> list[str]:
    """A line for each set of sections in which ranks were started with another configuration than rank 0."""
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


def arrange(hosts: Sequence[str]) -> list[int]:
    """New number of every rank, by its old one, so that the ranks of a machine follow one another.

    Machines keep the order of their first ranks, and ranks of a machine keep theirs; rank 0 stays rank 0.
    """
    first = {host: rank for rank, host in reversed(list(enumerate(hosts)))}
    order = sorted(range(len(hosts)), key=lambda rank: (first[hosts[rank]], rank))
    new = [0] * len(hosts)
    for number, rank in enumerate(order):
        new[rank] = number
    return new


def check_tiers(hosts: Sequence[str], tiers: Sequence[tuple[str, int]]) -> None:
    """Raises `ConfigError` unless every tier up to the machine's lies inside one machine.

    `hosts` are the hosts of the ranks in order; `tiers` are names and sizes, innermost first. Ranks on a single host
    may stand for any cluster.
    """
    if len(set(hosts)) < 2:
        return
    names = [name for name, _ in tiers]
    inside = max((names.index(name) for name in MACHINE_TIERS if name in names), default=-1)
    for (name, _), joined in list(zip(tiers, accumulate((size for _, size in tiers), mul), strict=True))[: inside + 1]:
        for start in range(0, len(hosts), joined):
            members = hosts[start : start + joined]
            if len(set(members)) > 1:
                raise ConfigError(
                    f"tier {name!r} joins {joined} ranks of one machine, but ranks {start} to "
                    f"{start + len(members) - 1} are on {' and '.join(sorted(set(members)))}: start a multiple of "
                    f"{joined} ranks on each machine, one machine after the other, or change the sizes of the tiers, "
                    f"for example --cluster.tiers.{name}.size N"
                )


def machine_map(hosts: Sequence[str], started: Sequence[int] | None = None) -> str:
    """A line that says which ranks run where; `started` has the numbers by which the launcher started them."""
    counts = Counter(hosts)
    runs = [list(group) for _, group in groupby(range(len(hosts)), key=hosts.__getitem__)]
    parts = []
    for ranks in runs:
        text = f"{compress(ranks)} on {hosts[ranks[0]]}"
        if started is not None and [started[rank] for rank in ranks] != ranks:
            text += f" (started as {compress(sorted(started[rank] for rank in ranks))})"
        parts.append(text)
    shown = parts if len(parts) <= _MAX_SHOWN else [*parts[: _MAX_SHOWN - 1], "...", parts[-1]]
    return f"{len(counts)} {'machine' if len(counts) == 1 else 'machines'}: ranks {', '.join(shown)}"

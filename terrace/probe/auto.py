"""`cluster = "auto"`: the cluster of this machine, from its GPUs, or from its cores if it has none.

Memory is the machine's, minus what the driver reserves where nvidia-smi reports the total. All other constants are
those of the preset with that device, or of the nearest one, as the text states; `terrace probe` measures them.
Pure: a function of facts that are looked up elsewhere.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from terrace.base.errors import ClusterError
from terrace.base.words import counted
from terrace.cluster.presets import cluster_table, lay_over, sizes_for
from terrace.launch.machines import MACHINE_TIERS
from terrace.probe.environment import Ranks
from terrace.probe.gpus import Gpus

AUTO = "auto"

# (Pattern of a device's name, preset with its constants, whether they are that device's own); the first match counts.
_PRESETS = (
    (r"GH200", "alps", True),
    (r"H200 NVL", "dgx-h200", False),
    (r"\bH200", "dgx-h200", True),
    (r"H100 (PCIe|NVL)|H800|\bH20\b", "dgx-h100", False),
    (r"\bH100", "dgx-h100", True),
    (r"GB200", "gb200-nvl72", True),
    (r"GB300", "gb200-nvl72", False),
    (r"\bB200", "dgx-b200", True),
    (r"B100|B300", "dgx-b200", False),
    (r"A100.*PCIE", "pcie-a100", True),
    (r"A100.*40GB", "perlmutter", True),
    (r"A100", "dgx-a100", True),
    (r"MI250X", "frontier", True),
    (r"MI300X", "mi300x", True),
    (r"MI3\d\d|gfx9(42|50)", "mi300x", False),
    (r"AMD|Instinct", "frontier", False),
)
_OTHER = "pcie-a100"
# Architectures before Ampere have no bf16 units.
_WITHOUT_BF16 = r"\b[VPMK]100|\bT4\b|\b[PMK]\d0\b|GTX|RTX 20|Quadro RTX|TITAN|Tesla"
# Maximum share of nvidia-smi's total that the driver reserves: 0.4 (B200) to 2.9 % on known devices (T4: 15360 MiB, of
# which a process gets 14.56 GiB: MagicQuill, issue 57; CatVTON, issue 133). Beyond it, the memory size is another.
_KEPT = 0.03
_LEAST_BYTES = 1e9  # of a process on a CPU
_MOST_PROCESSES = 64
_CORES_OF_LOCAL = 4  # processes of the preset `local` that share a core: eight on two


@dataclass(frozen=True, kw_only=True)
class Auto:
    table: Mapping[str, Any]
    words: tuple[str, ...]


def auto_cluster(gpus: Gpus, num_cores: int, memory_bytes: int, ranks: Ranks | None = None) -> Auto:
    """The cluster of machines like this one: one rank per GPU, or, without GPUs, one process per core.

    Under a launcher (`ranks`) it has that many ranks, on world size / local ranks machines. Raises `ClusterError` if
    that is no whole number.
    """
    here = len(gpus.devices) or _num_processes(num_cores, memory_bytes)
    local, nodes = here, 1
    if ranks is not None:
        local = ranks.local or min(here, ranks.world_size)
        nodes, rest = divmod(ranks.world_size, local)
        if rest:
            raise ClusterError(
                f"cluster 'auto': {ranks.world_size} ranks are no multiple of the {local} on this machine: start as "
                "many on every machine, or name a cluster file"
            )
    if not gpus.devices:
        return _of_cores(local, nodes, num_cores, memory_bytes)
    table, words = _of_gpus(gpus, local)
    if local < len(gpus.devices):
        words.append(f"{counted(local, 'rank')} started on {counted(len(gpus.devices), 'GPU')}: start one for each")
    names = [tier["name"] for tier in table["tiers"]]
    sizes = [*sizes_for(local, [tier["size"] for tier in table["tiers"][:-1]]), nodes]
    overrides = {"tiers": {name: {"size": size} for name, size in zip(names, sizes, strict=True)}}
    return Auto(table=lay_over({"cluster": table}, {"cluster": overrides})["cluster"], words=tuple(words))


def _of_gpus(gpus: Gpus, local: int) -> tuple[dict[str, Any], list[str]]:
    # Ranks wait for each other, so the device with the least memory counts.
    device = min(gpus.devices, key=lambda each: each.memory_bytes)
    found = ((preset, own) for pattern, preset, own in _PRESETS if re.search(pattern, device.name, re.IGNORECASE))
    preset, own = next(found, (_OTHER, False))
    table = cluster_table(preset)
    peaks = dict(table["device"]["peak_flops_per_s"])
    without = not own and re.search(_WITHOUT_BF16, device.name) is not None
    if without:
        peaks = {"fp32": peaks["fp32"]}
    room_bytes = _process_bytes(device.memory_bytes, gpus.source, table["device"]["memory_bytes"], own)
    figures: dict[str, Any] = {"name": device.name, "peak_flops_per_s": peaks, "memory_bytes": room_bytes}
    node, origin = _machine_tiers(gpus, preset, local)
    table |= {"name": AUTO, "device": table["device"] | figures, "tiers": [*node, table["tiers"][-1]]}
    words = [
        f"{counted(len(gpus.devices), 'GPU')} by {gpus.source}, {device.name}: "
        f"{room_bytes / 1e9:.1f} GB of memory for a process, other constants "
        + (f"of preset {preset}" if own else f"of the nearest preset, {preset}: terrace probe measures this device's")
    ]
    words += ["the device has no units for bf16"] if without else []
    return table, words + ([origin] if local > 1 else [])


def _process_bytes(found_bytes: float, source: str, preset_bytes: float, own: bool) -> float:
    """Device memory available to a process: less than nvidia-smi's total; torch and AMD's driver report it directly.

    `own`: the device is the preset's, although devices of that name may differ in memory.
    """
    if not found_bytes:
        return preset_bytes
    if own and abs(found_bytes - preset_bytes) <= _KEPT * preset_bytes:
        return min(float(found_bytes), preset_bytes)
    return found_bytes * (1 - _KEPT) if source == "nvidia-smi" else float(found_bytes)


def _machine_tiers(gpus: Gpus, preset: str, local: int) -> tuple[list[dict[str, Any]], str]:
    """Tiers of a machine, the outermost called `node`, and a line on their origin."""
    of = preset
    if gpus.link == "pcie":
        of = "pcie-a100"
    elif (gpus.link == "nvlink" and preset == "pcie-a100") or (preset == "perlmutter" and local > 4):
        of = "dgx-a100"
    elif preset == "frontier" and local > 8:
        of = "pcie-a100"
    tiers = [dict(tier) for tier in cluster_table(of)["tiers"]]
    inside = max(index for index, tier in enumerate(tiers) if tier["name"] in MACHINE_TIERS)
    tiers = tiers[: inside + 1]
    tiers[-1]["name"] = "node"
    kind = {"nvlink": "NVLink between all pairs", "xgmi": "Infinity Fabric", "pcie": "PCIe between some pairs"}
    links = f"{kind[gpus.link]} by {gpus.source}" if gpus.link else "links not probed"
    return tiers, f"tier node: {links}, constants of preset {of}; terrace probe measures them"


def _num_processes(num_cores: int, memory_bytes: int) -> int:
    most = min(num_cores, int(memory_bytes / _LEAST_BYTES), _MOST_PROCESSES)
    # A power of two divides most batches.
    return 1 << (max(1, most).bit_length() - 1)


def _of_cores(local: int, nodes: int, num_cores: int, memory_bytes: int) -> Auto:
    table = cluster_table("local")
    device, tiers = dict(table["device"]), {tier["name"]: tier for tier in table["tiers"]}
    # Rates of the preset `local` are those of a process when several share a core.
    share = _CORES_OF_LOCAL * min(1.0, num_cores / local)
    device |= {
        "name": "one core of a CPU",
        "memory_bytes": float(memory_bytes // local),
        "memory_bandwidth_bytes_per_s": device["memory_bandwidth_bytes_per_s"] * share,
        "peak_flops_per_s": {name: peak * share for name, peak in device["peak_flops_per_s"].items()},
        "source": "guess: preset local, a process on a core",
    }
    sizes = {"node": local, "system": nodes}
    table |= {"name": AUTO, "device": device, "tiers": [tiers[name] | {"size": size} for name, size in sizes.items()]}
    processes = "process" if local == 1 else "processes"
    words = (
        f"no GPU: {local} {processes} on {counted(num_cores, 'core')}, constants are guesses: terrace probe measures"
    )
    return Auto(table=table, words=(words,))

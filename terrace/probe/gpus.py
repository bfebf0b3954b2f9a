"""GPUs of this machine and the links between them, looked up without torch where possible.

NVIDIA's are read from nvidia-smi, AMD's from the kernel's files (/sys/class/kfd). If a driver exists but neither works,
torch is used. Devices hidden by the environment do not count.
"""

import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from terrace.probe.machine import Gpu, torch_gpus

Link = Literal["nvlink", "xgmi", "pcie", ""]  # the slowest of all pairs; "": not known
Ask = Callable[..., str | None]  # words of a command -> its output, None where it fails

_QUERY = ("nvidia-smi", "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits")
_TOPOLOGY = ("nvidia-smi", "topo", "-m")
_DRIVER = ("proc/driver/nvidia/version", "dev/nvidiactl", "dev/dxg")
_KFD = "sys/class/kfd/kfd/topology/nodes"
_XGMI = "11"  # type of a link in the kernel's kfd_topology.h
_GFX = {"90010": "AMD MI250X GCD (gfx90a)", "90402": "AMD gfx942", "90500": "AMD gfx950"}
_TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """Devices that a run here may use; `source` names the source."""

    devices: tuple[Gpu, ...] = field(default=())
    link: Link = ""
    source: str = ""


def look_for_gpus(variables: Mapping[str, str], folder: Path = Path("/"), ask: Ask | None = None) -> Gpus:
    """The visible GPUs; none without a driver. `folder` and `ask` replace the file system root and the shell in
    tests.
    """
    if any((folder / name).exists() for name in _DRIVER):
        found = _nvidia(variables.get("CUDA_VISIBLE_DEVICES"), ask or _output)
    elif (folder / _KFD).is_dir():
        shown = (variables.get(name) for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"))
        found = _amd(next((each for each in shown if each is not None), None), folder / _KFD)
    else:
        return Gpus()
    return Gpus(devices=torch_gpus(), source="torch") if found is None else found


def _nvidia(shown: str | None, ask: Ask) -> Gpus | None:
    text = ask(*_QUERY)
    # A MIG partition has its own memory size, which the table of devices does not list.
    if text is None or "MIG-" in (shown or ""):
        return None
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]
    if not rows or any(len(row) != 4 for row in rows):
        return None
    kept = [rows[index] for index in _visible(shown, [row[1] for row in rows])]
    devices = tuple(Gpu(name=row[2], memory_bytes=int(row[3]) * 2**20 if row[3].isdecimal() else 0) for row in kept)
    link = _nvidia_link(ask(*_TOPOLOGY), [row[0] for row in kept]) if len(kept) > 1 else ""
    return Gpus(devices=devices, link=link, source="nvidia-smi")


def _nvidia_link(text: str | None, indices: list[str]) -> Link:
    # The matrix has a row and a column for each device: NV# where # links of NVLink join two.
    rows = [line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", text or "").splitlines()]
    names = next(([cell for cell in row if re.fullmatch(r"GPU\d+", cell)] for row in rows if "GPU0" in row), [])
    # A row has further cells, on cores and memory.
    of_devices = [row for row in rows if row and row[0] in names]
    cells = {(row[0], other): cell for row in of_devices for other, cell in zip(names, row[1:], strict=False)}
    own = [f"GPU{index}" for index in indices]
    pairs = [cells.get((one, other), "") for one in own for other in own if one != other]
    if not pairs or not all(pairs):
        return ""
    return "nvlink" if all(pair.startswith("NV") for pair in pairs) else "pcie"


def _amd(shown: str | None, folder: Path) -> Gpus | None:
    try:
        nodes = sorted((path for path in folder.iterdir() if path.name.isdecimal()), key=lambda path: int(path.name))
        tables = {path: _properties(path / "properties") for path in nodes}
        every = [path for path in nodes if int(tables[path].get("simd_count", "0"))]
        kept = [every[index] for index in _visible(shown, [path.name for path in every])]
        devices = tuple(_amd_device(path, tables[path]) for path in kept)
        names = {path.name for path in kept}
        joined = [_properties(each) for path in kept for each in path.glob("io_links/*/properties")]
    except (OSError, ValueError):
        return None
    pairs = {(each.get("node_from"), each.get("node_to")) for each in joined if each.get("type") == _XGMI}
    whole = all((one, other) in pairs for one in names for other in names if one != other)
    link: Link = "" if len(kept) < 2 else "xgmi" if whole or pairs else "pcie"
    return Gpus(devices=devices, link=link, source="/sys/class/kfd")


def _amd_device(path: Path, table: Mapping[str, str]) -> Gpu:
    banks = [_properties(bank) for bank in path.glob("mem_banks/*/properties")]
    version = table.get("gfx_target_version", "")
    memory = sum(int(bank.get("size_in_bytes", "0")) for bank in banks)
    return Gpu(name=_GFX.get(version, f"AMD gfx {version}"), memory_bytes=memory)


def _properties(path: Path) -> dict[str, str]:
    pairs = (line.split(maxsplit=1) for line in path.read_text(encoding="utf-8").splitlines())
    return {pair[0]: pair[1].strip() for pair in pairs if len(pair) == 2}


def _visible(shown: str | None, names: list[str]) -> list[int]:
    """Indexes of the devices in a list of numbers or names; as in CUDA, the first unknown entry ends it."""
    if shown is None:
        return list(range(len(names)))
    found = list[int]()
    for word in (each.strip() for each in shown.split(",")):
        matching = [index for index, name in enumerate(names) if word and name.startswith(word)]
        if word.isdecimal() and int(word) < len(names):
            found.append(int(word))
        elif len(matching) == 1 and not word.isdecimal():
            found += matching
        else:
            break
    return found


def _output(*words: str) -> str | None:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None

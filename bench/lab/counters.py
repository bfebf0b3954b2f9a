"""The kernel's counters for this process: bytes sent per link, resident memory."""

import ctypes
import gc
from pathlib import Path

from terrace.lab.rehearse.counters import read

_KIB = 1024


def sent_bytes(num_tiers: int, table: Path = Path("/proc/self/net/dev")) -> list[int] | None:
    """Bytes sent over each tier's interface t0, t1, ..., headers included; None without them."""
    counts = read(table)
    return [counts[tier] for tier in range(num_tiers)] if counts.keys() >= set(range(num_tiers)) else None


def trim() -> None:
    """Return free memory to the kernel; glibc keeps it otherwise."""
    gc.collect()
    trim_heap = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim_heap is not None:
        trim_heap(0)


def resident_bytes() -> int:
    return _status("VmRSS")


def peak_resident_bytes() -> int:
    """The largest resident memory since the start, or since `forget_peak`."""
    return _status("VmHWM")


def forget_peak() -> bool:
    """Reset the peak; False where the kernel does not allow it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * _KIB
    raise RuntimeError(f"the kernel does not report {field}")

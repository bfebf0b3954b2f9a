"""Headroom: device memory that every plan leaves free, as a share ("5%") or in bytes ("4GB").

Predicted memory counts tensors, the process (CUDA context, communicators) and average allocator overhead. The headroom
covers what it does not count: kernels' scratch memory, RoPE tables, above-average fragmentation, and prediction error.
"""

import re

# The allowed error of predicted memory on a GPU (the goal of `bench/gpu.py`), so that what is predicted to fit does
# fit. With process and allocator, which are counted separately, about a tenth of an 80 GB device holds no tensors;
# vLLM, which counts neither, leaves a tenth free (`gpu_memory_utilization` = 0.9).
DEFAULT = "5%"
_UNITS = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "MiB": 2.0**20, "GiB": 2.0**30}


_FORM = re.compile(r"(\d+(?:\.\d+)?) ?(%|[kMGT]?B|[MG]iB)")


def headroom_error(headroom: str, memory_bytes: float) -> str:
    """What is wrong with a headroom, and the fix; "" if it is valid."""
    if _FORM.fullmatch(headroom) is None:
        return "must be a share of the memory or bytes of it: write 5% or 4GB"
    nothing = headroom_bytes(headroom, memory_bytes) >= memory_bytes
    return f"leaves nothing of {memory_bytes / 1e9:.4g} GB: give less" if nothing else ""


def headroom_bytes(headroom: str, memory_bytes: float) -> float:
    ((text, unit),) = _FORM.findall(headroom)  # a `Device` has checked the form
    number = float(text)
    return number / 100 * memory_bytes if unit == "%" else number * _UNITS[unit]


def room_words(memory_bytes: float, headroom: str) -> str:
    """The memory that a plan may use, and how it is computed, as text."""
    kept = headroom_bytes(headroom, memory_bytes)
    whole = f"{memory_bytes / 1e9:.4g} GB"
    return f"{max(0.0, memory_bytes - kept) / 1e9:.4g} GB ({whole} less a headroom of {headroom})" if kept else whole

"""Device: one accelerator, or one process on a CPU. Its constants, and the ranges that they must lie in."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Literal, get_args

from terrace.base.errors import ClusterError, did_you_mean
from terrace.base.hashing import hashed_once
from terrace.cluster.below import Mark, Medium
from terrace.cluster.software import OWN, Software

_FLASH2_HALF_HEAD = 16.0  # `attention_half_head` of flash attention 2: heads of 64 reach 0.9 of the rate of 128
_TUNED_HEAD = 128  # head size of `Kernels.attention`


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Shares of a device's peaks that kernels reach. The defaults are ideal.

    A tile is (rows, columns, its share of `gemm`): the part of a matmul's result that one core computes at a time.
    """

    gemm: float = 1.0  # share of the peak that a large matrix product reaches
    gemm_fp8: float = 0.0  # the same for 8-bit floats, of their peak; 0: as `gemm`
    gemm_half_depth: float = 0.0  # inner size at which a matmul reaches half of that
    num_cores: int = 0  # cores that compute tiles; 0: any number of tiles fills the device
    tiles: tuple[tuple[int, int, float], ...] = ()  # empty: no tile quantisation
    memory: float = 1.0  # share of the memory bandwidth
    stream: float = 0.0  # the same for plain sums, matmul operands and the optimizer; 0: as `memory`
    attention: float = 1.0  # share of the peak that flash attention reaches forward, long rows and heads of 128
    attention_backward: float = 0.0  # the same backward, of the FLOPs of its five matmuls; 0: as forward
    flash2: float = 0.0  # share of flash attention 2, if `attention` is another kernel; 0: as `attention`
    flash2_backward: float = 0.0  # the same backward
    attention_half_head: float = 0.0  # head size at half the rate of infinitely large heads; see `attention_share`
    attention_half_keys: float = 0.0  # number of keys that reaches half the share, for all kernels
    attention_half_keys_backward: float = 0.0  # the same backward; 0: as forward
    codec: float = 1.0  # share of the memory bandwidth that encoding and decoding block formats reaches
    launch_s: float = 0.0  # overhead per kernel
    host_layer_s: float = 0.0  # time the host needs to launch the kernels of one layer, in one direction
    optimizer_s: float = 0.0  # overhead per optimizer step
    source: str = ""

    def attention_share(
        self, head_dim: int, keys: float = math.inf, *, backward: bool = False, flash2: bool = False
    ) -> float:
        """Share of the peak that flash attention reaches with heads of `head_dim` and `keys` keys per row.

        `flash2`: of version 2, used for documents, windows, and context ranks with large heads. Kernels are tuned for
        heads of up to 128; larger ones gain nothing (Shah et al. 2407.08608, figures 5 and 6).
        """
        share = self.attention_backward if backward and self.attention_backward else self.attention
        head, half_head = min(head_dim, _TUNED_HEAD), self.attention_half_head
        if flash2 and self.flash2:
            share = self.flash2_backward if backward and self.flash2_backward else self.flash2
            half_head = _FLASH2_HALF_HEAD
        share *= head / (head + half_head) * (1 + half_head / _TUNED_HEAD)
        half_keys = (self.attention_half_keys_backward if backward else 0.0) or self.attention_half_keys
        return share if math.isinf(keys) else share * keys / (keys + half_keys)


IDEAL = Kernels()


# The allowed error of predicted memory on a GPU (the goal of `bench/gpu.py`), so that what is predicted to fit does
# fit. With process and allocator, which are counted separately, about a tenth of an 80 GB device holds no tensors;
# vLLM, which counts neither, leaves a tenth free (`gpu_memory_utilization` = 0.9).
DEFAULT_HEADROOM = "5%"
_UNITS = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "MiB": 2.0**20, "GiB": 2.0**30}


_HEADROOM = re.compile(r"(\d+(?:\.\d+)?) ?(%|[kMGT]?B|[MG]iB)")


def headroom_error(headroom: str, memory_bytes: float) -> str:
    """What is wrong with a headroom, and the fix; "" if it is valid."""
    if _HEADROOM.fullmatch(headroom) is None:
        return "must be a share of the memory or bytes of it: write 5% or 4GB"
    nothing = headroom_bytes(headroom, memory_bytes) >= memory_bytes
    return f"leaves nothing of {memory_bytes / 1e9:.4g} GB: give less" if nothing else ""


def headroom_bytes(headroom: str, memory_bytes: float) -> float:
    """Device memory that every plan leaves free, of a share ("5%") or bytes ("4GB").

    Predicted memory counts tensors, the process (CUDA context, communicators) and average allocator overhead. The
    headroom covers what it does not count: kernels' scratch memory, RoPE tables, above-average fragmentation, and
    prediction error.
    """
    ((text, unit),) = _HEADROOM.findall(headroom)  # a `Device` has checked the form
    number = float(text)
    return number / 100 * memory_bytes if unit == "%" else number * _UNITS[unit]


def room_words(memory_bytes: float, headroom: str) -> str:
    """The memory that a plan may use, and how it is computed, as text."""
    kept = headroom_bytes(headroom, memory_bytes)
    whole = f"{memory_bytes / 1e9:.4g} GB"
    return f"{max(0.0, memory_bytes - kept) / 1e9:.4g} GB ({whole} less a headroom of {headroom})" if kept else whole


DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp4", "int8")  # for which a device may give its FLOP/s

# Plausible ranges, which catch GB given as bytes and wrong exponents.
_LEAST_BYTES, LEAST_RATE, MOST_RATE, LONGEST_S = 1e3, 1e-6, 1e20, 1e12
_MOST_WATTS = 1e6


@hashed_once
@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator (or one process on a CPU).

    `peak_flops_per_s` maps a dtype name ("bf16", "fp32", ...) to dense FLOP/s. `marks` maps the name of a constant
    ("memory_bandwidth_bytes_per_s", "kernels.gemm", ...) to its mark, by default "preset". `memory_bytes` is what a
    process can allocate, less than the physical memory.
    """

    name: str
    memory_bytes: float
    memory_bandwidth_bytes_per_s: float
    peak_flops_per_s: Mapping[str, float] = field(hash=False)  # mappings are unhashable; still compared by equality
    backend: Literal["cuda", "rocm", "cpu"] = "cuda"  # whose kernels run
    headroom: str = DEFAULT_HEADROOM  # memory that plans leave free, as a share or bytes (`headroom_bytes`)
    overlap_penalty: float = 0.0  # slowdown of compute during messages: 0 none, 1 by the full duration of the messages
    power_watts: float = 0.0  # maximum power; 0: unknown
    spread: float = 0.0  # relative standard deviation of clocks between such devices
    kernels: Kernels = IDEAL
    # Memory below it: "host", "disk"
    below: Mapping[str, Medium] = field(default_factory=dict, hash=False, metadata={"absent": {}})
    marks: Mapping[str, Mark] = field(default_factory=dict, hash=False)
    source: str = ""
    software: Software = field(default=OWN, metadata={"key": False})  # that runs on it; never a key of a file
    pace: float = field(
        default=1.0, init=False
    )  # clock of the cluster's slowest device over the mean; set by `Cluster`

    @property
    def type(self) -> Literal["cuda", "cpu"]:
        """Torch's type of such devices, which under ROCm is "cuda", too. What a backward keeps depends on it."""
        return "cpu" if self.backend == "cpu" else "cuda"

    @cached_property
    def usable_bytes(self) -> float:
        return self.memory_bytes - headroom_bytes(self.headroom, self.memory_bytes)

    @property
    def room_words(self) -> str:
        return room_words(self.memory_bytes, self.headroom)

    @property
    def bf16_slowdown(self) -> float:
        """fp32 peak over bf16 peak of a CPU; 1 if either is missing, and for other devices."""
        peaks = self.peak_flops_per_s
        return peaks["fp32"] / peaks["bf16"] if self.type == "cpu" and {"fp32", "bf16"} <= peaks.keys() else 1.0


def check_device(device: Device) -> None:
    if not device.peak_flops_per_s:
        raise ClusterError("device.peak_flops_per_s is empty: give the dense FLOP/s of at least one dtype")
    for dtype in device.peak_flops_per_s:
        if dtype not in DTYPES:
            raise ClusterError(
                f"device.peak_flops_per_s.{dtype} has no effect: no dtype has that name{did_you_mean(dtype, DTYPES)}"
            )
    figures = {
        "memory_bytes": device.memory_bytes,
        "memory_bandwidth_bytes_per_s": device.memory_bandwidth_bytes_per_s,
        **{f"peak_flops_per_s.{dtype}": peak for dtype, peak in device.peak_flops_per_s.items()},
    }
    for name, value in figures.items():
        least = _LEAST_BYTES if name == "memory_bytes" else LEAST_RATE
        if not least <= value <= MOST_RATE:
            raise ClusterError(
                f"device.{name} = {value} must be a positive number between {least:g} and {MOST_RATE:g}: "
                f"give the vendor's figure in {_unit(name)}"
            )
    if wrong := headroom_error(device.headroom, device.memory_bytes):
        raise ClusterError(f"device.headroom = {device.headroom!r} {wrong}")
    for name in ("overlap_penalty", "spread"):
        if not 0 <= getattr(device, name) <= 1:
            raise ClusterError(f"device.{name} = {getattr(device, name)} must lie between 0 and 1")
    if not 0 <= device.power_watts <= _MOST_WATTS:
        raise ClusterError(
            f"device.power_watts = {device.power_watts} must lie between 0 (not known) and {_MOST_WATTS:g}: give the "
            "watts of one device"
        )
    _check_kernels(device.kernels)
    known = {each.name for each in fields(Device) if each.init} | {f"kernels.{each.name}" for each in fields(Kernels)}
    known |= {f"peak_flops_per_s.{dtype}" for dtype in device.peak_flops_per_s}
    check_marks("device", device.marks, known)


def _unit(name: str) -> str:
    if name == "memory_bytes":
        return "bytes, not GB"
    return "bytes/s, not GB/s" if name == "memory_bandwidth_bytes_per_s" else "FLOP/s, not TFLOP/s"


def _check_kernels(kernels: Kernels) -> None:
    for name in ("gemm", "memory", "attention", "codec"):
        check_share(f"device.kernels.{name}", getattr(kernels, name))
    for name in (
        "gemm_half_depth",
        "attention_half_head",
        "attention_half_keys",
        "attention_half_keys_backward",
        "num_cores",
        "launch_s",
        "host_layer_s",
        "optimizer_s",
    ):
        value = getattr(kernels, name)
        if not 0 <= value <= LONGEST_S:
            raise ClusterError(f"device.kernels.{name} = {value}: give zero or a positive number up to {LONGEST_S:g}")
    for name in ("stream", "gemm_fp8", "attention_backward", "flash2", "flash2_backward"):
        value = getattr(kernels, name)
        if not 0 <= value <= 1:
            raise ClusterError(f"device.kernels.{name} = {value} must lie between 0 and 1: it is a share of a peak")
    for rows, columns, share in kernels.tiles:
        if rows < 1 or columns < 1:
            raise ClusterError(f"device.kernels.tiles has a tile of {rows} x {columns}: give at least 1 x 1")
        check_share("share of a tile in device.kernels.tiles", share)


def check_share(name: str, value: float) -> None:
    if not LEAST_RATE <= value <= 1:
        raise ClusterError(f"{name} = {value} must lie between {LEAST_RATE:g} and 1: it is a share of a peak")


def check_marks(owner: str, marks: Mapping[str, Mark], known: set[str]) -> None:
    for name, mark in marks.items():
        if name not in known:
            raise ClusterError(f"{owner}.marks names {name!r}, which is no constant of it{did_you_mean(name, known)}")
        if mark not in get_args(Mark):
            raise ClusterError(f"{owner}.marks.{name} = {mark!r} is no mark{did_you_mean(mark, get_args(Mark))}")

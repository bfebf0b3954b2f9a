"""`terrace probe`, then `terrace train` on its cluster file: step and memory, predicted beside measured.

    prediction:probe      the cluster file
    prediction:compiled   a run as people start it on CUDA: blocks through `torch.compile`
    prediction:plain      the same without `torch.compile`; the probe measures compiled layers, so its step has no goal

The step is also predicted from the preset that the device's name chooses, which needs no probe. Predictions are made
here and measured figures are read from `metrics.jsonl`, so a run that fails at its end still has its rows.
"""

import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.common import decoder
from bench.gpu_parts.setting import Row, Setting
from terrace.cli.here import named_table
from terrace.cli.overrides import parse_overrides
from terrace.cluster.cluster import Cluster
from terrace.cluster.presets import parse_cluster
from terrace.model.blocks import num_params
from terrace.model.config import to_table
from terrace.simulate.fullest import Job, fullest_stage
from terrace.train.config import RunConfig
from terrace.train.metrics import StepRecord, read_metrics
from terrace.train.prediction import predict
from terrace.train.resolve import resolve

STEP_BAND, MEMORY_BAND = 0.1, 0.05  # goals on a GPU
STEPS, WARM_UP = 14, 4  # the first compile, and load kernels
# Half the layers of the stack that `training` has: a run writes its state before the first step and after the last.
LAYERS = 9
_MEMORY_DISK = Path("/dev/shm")
_SPARE = 3  # checkpoints for which there must be room on it: the kept one, the next, and as much again
_STATE_BYTES = 12  # of a parameter in a checkpoint: fp32 master and two moments


def rows(setting: Setting, which: str) -> Iterator[Row]:
    """Those of `probe`, `compiled` or `plain`."""
    if which == "probe":
        yield from _probe(setting)
        return
    words = train_words(setting, is_compiled=which == "compiled")
    run = run_of(words)
    folder = _run_folder(setting, which, _SPARE * _STATE_BYTES * num_params(run.model))
    failed = _terrace(["train", *words, "--folder", str(folder)])
    try:
        path = folder / "metrics.jsonl"
        yield from _compared(setting, run, which, read_metrics(path) if path.exists() else [])
    finally:
        for name in ("config.toml", "metrics.jsonl", "report.json"):
            if (folder / name).exists():
                shutil.copy(folder / name, setting.folder / "prediction" / f"{which}-{name}")
        shutil.rmtree(folder, ignore_errors=True)  # the checkpoint: gigabytes, perhaps of main memory
    yield Row(f"run, {which}", failed or "trained to its end", not failed)


def probe_words(setting: Setting, memory_bytes: int | None) -> list[str]:
    """Arguments of `terrace probe`: one rank, on this device with its memory and its peak."""
    words = ["--out", str(_cluster_file(setting)), "--force", "--seconds", str(setting.size(30, 2)), *_one_rank()]
    if setting.is_cuda:
        words += ["--cluster.device.memory_bytes", f"{memory_bytes:d}"]
        # A share of the peak needs the peak; on a CPU the probe measures it.
        words += ["--cluster.device.peak_flops_per_s.bf16", f"{setting.peak_tflops * 1e12:g}"]
    return words


def train_words(setting: Setting, *, is_compiled: bool) -> list[str]:
    """Arguments of `terrace train`, but its folder."""
    config = decoder(setting.size(2048, 64), setting.size(LAYERS, 2), setting.size(32000, 257))
    model = setting.folder / "prediction" / "model.json"
    model.parent.mkdir(exist_ok=True)
    model.write_text(json.dumps(to_table(config)), encoding="utf-8")
    sizes = {"steps": setting.size(STEPS, 6), "batch": setting.size(8, 2), "sequence": setting.size(2048, 32)}
    keys = {f"train.{key}": str(value) for key, value in sizes.items()}
    keys |= {"train.warmup_steps": "0", "train.compile": str(is_compiled).lower(), "optimizer.lr": "1e-4"}
    # Saved while the steps wait: they are few, and all of them would run beside the first save.
    keys |= {"train.background_save": "false", "train.keep_checkpoints": "1"}
    keys |= {"plan.micro_batch": str(setting.size(4, 1)), "plan.compute": "bf16"}
    given = [word for key, value in keys.items() for word in (f"--{key}", value)]
    return ["--plan", "ddp", "--cluster", str(_cluster_file(setting)), "--model", str(model), *given]


def run_of(words: Sequence[str]) -> RunConfig:
    """The run of these arguments of `terrace train`; raises as the command does."""
    flags = {name: words[words.index(f"--{name}") + 1] for name in ("plan", "cluster", "model")}
    return resolve(None, flags, parse_overrides(words[2 * len(flags) :]))


def starting_cluster(words: Sequence[str]) -> Cluster:
    """The cluster that a probe with these arguments starts from."""
    return parse_cluster(named_table(words[words.index("--cluster") + 1], 1))


def _one_rank() -> list[str]:
    return ["--cluster", "auto", "--ranks", "1"]


def _probe(setting: Setting) -> Iterator[Row]:
    _cluster_file(setting).parent.mkdir(exist_ok=True)
    memory_bytes = torch.cuda.get_device_properties(0).total_memory if setting.is_cuda else None
    if failed := _terrace(["probe", *probe_words(setting, memory_bytes)]):
        yield Row("probe", failed, False)
        return
    device = parse_cluster(_table(setting)).device
    kernels = device.kernels
    words = f"products {kernels.gemm:.0%} of the peak, half at a depth of {kernels.gemm_half_depth:.0f}; memory "
    words += f"{kernels.memory:.0%} of {device.memory_bandwidth_bytes_per_s / 1e9:.0f} GB/s; attention "
    words += f"{kernels.attention:.0%} and {kernels.attention_backward:.0%}; a launch {kernels.launch_s * 1e6:.1f} us, "
    yield Row("probe", f"{words}a layer {kernels.host_layer_s * 1e6:.0f} us of the host")


def _compared(setting: Setting, run: RunConfig, which: str, records: Sequence[StepRecord]) -> Iterator[Row]:
    steady = records[setting.size(WARM_UP, 2) :]
    if not steady:
        yield Row(f"step, {which}", f"{len(records)} steps were run: none to measure", False)
        return
    # The first steps compile, and the median is of whole steps, so that a pause of the machine counts in none.
    found_s = statistics.median(sum(record.time_s.values()) for record in steady)
    said_s = predict(run, run.cluster).reports[0].step_s
    yield _beside(setting, f"step, {which}", (said_s, found_s), 1e3, "ms", STEP_BAND if which == "compiled" else None)
    yield from _memory(setting, run, which, steady[-1].peak_memory_bytes)
    if setting.is_cuda:
        by_preset = starting_cluster(_one_rank())
        preset_s = predict(replace(run, cluster=by_preset), by_preset).reports[0].step_s
        yield _beside(setting, f"step, {which}, by the preset alone", (preset_s, found_s), 1e3, "ms", None)


def _memory(setting: Setting, run: RunConfig, which: str, measured: Mapping[str, int]) -> Iterator[Row]:
    # By device: tensors beside those that its allocator gave out, and with what it loses beside what it reserved; on a
    # CPU the whole process beside its resident memory.
    job = Job(cluster=run.cluster, plan=run.plan, num_micros=run.num_micros())
    parts = fullest_stage(job, run.blocks(), run.train.sequence, "cuda" if setting.is_cuda else "cpu")[1]
    whole, context, allocator = sum(parts.values()), parts["context"], parts["allocator"]
    said = {"allocated": whole - context - allocator, "reserved": whole - context, "resident": whole}
    for kind, num_bytes in measured.items():
        yield _beside(setting, f"memory {kind}, {which}", (said[kind], num_bytes), 1e-9, "GB", MEMORY_BAND)


def _beside(setting: Setting, name: str, pair: tuple[float, float], scale: float, unit: str, band: float | None) -> Row:
    said, found = pair
    error = said / found - 1
    words = f"{said * scale:.3g} {unit} predicted, {found * scale:.3g} measured, {error:+.1%}"
    return Row(name, words) if band is None else Row(name, words, setting.goal(abs(error) <= band), f"{band:.0%}")


def _cluster_file(setting: Setting) -> Path:
    return setting.folder / "prediction" / "cluster.toml"


def _table(setting: Setting) -> dict[str, Any]:
    return named_table(str(_cluster_file(setting)))


def _run_folder(setting: Setting, which: str, num_bytes: int) -> Path:
    """An absent folder for a run: in main memory where it has room for `num_bytes`, so that no disk is waited for."""
    in_memory = _MEMORY_DISK.is_dir() and shutil.disk_usage(_MEMORY_DISK).free > num_bytes
    folder = (_MEMORY_DISK if in_memory else setting.folder / "prediction") / f"terrace-bench-gpu-{which}"
    shutil.rmtree(folder, ignore_errors=True)  # of a part that was killed
    return folder


def _terrace(words: Sequence[str]) -> str:
    """Run a command of this tree, which is then found first: another copy may be installed. Returns its failure."""
    done = subprocess.run([sys.executable, "-m", "terrace", *words], cwd=Path(__file__).parents[2], check=False)
    return f"terrace {words[0]} ended with {done.returncode}" if done.returncode else ""

"""`terrace probe`, then `terrace train` on its cluster file: step and memory, predicted beside measured."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.common import decoder
from bench.gpu_parts.setting import Row, Setting
from terrace.model.config import to_table
from terrace.simulate.advice import Job, fullest_stage
from terrace.train.config import resolve

STEP_BAND, MEMORY_BAND = 0.1, 0.05  # goals on a GPU
_ONE_RANK = ("package", "node", "system")  # the tiers of the cluster that the probe starts from


def rows(setting: Setting) -> Iterator[Row]:
    """Findings of the probe, then rows for the step and for memory."""
    folder = setting.folder / "prediction"
    folder.mkdir(exist_ok=True)
    sizes = [word for tier in _ONE_RANK for word in (f"--cluster.tiers.{tier}.size", "1")]
    kind = ["--cluster.device.backend", "cuda" if setting.is_cuda else "cpu"]
    seconds = setting.size(40, 2)
    _terrace(
        [
            "probe",
            "--out",
            str(folder / "cluster.toml"),
            "--force",
            "--seconds",
            str(seconds),
            *sizes,
            *kind,
            *_peaks(setting),
        ],
    )
    config = decoder(setting.size(2048, 64), setting.size(18, 2), setting.size(32000, 257))
    (folder / "model.json").write_text(json.dumps(to_table(config)), encoding="utf-8")
    keys = {"steps": setting.size(12, 6), "batch": setting.size(8, 2), "sequence": setting.size(2048, 32)}
    words = [word for key, value in keys.items() for word in (f"--train.{key}", str(value))]
    words += ["--train.compile", "false"]  # the probe's layers are not compiled, either
    words += ["--train.warmup_steps", "0", "--plan.micro_batch", str(setting.size(4, 1)), "--plan.compute", "bf16"]
    files = {"cluster": "cluster.toml", "model": "model.json", "folder": "run"}
    where = [word for key, name in files.items() for word in (f"--{key}", str(folder / name))]
    _terrace(["train", "--plan", "ddp", *where, *words])
    report = json.loads((folder / "run" / "report.json").read_text(encoding="utf-8"))
    said, found = (sum(report[side]["time_s"].values()) for side in ("predicted", "measured"))
    yield _beside(setting, "step", (said, found), 1e3, "ms", STEP_BAND)
    yield from _memory(setting, folder / "run")


def _memory(setting: Setting, run_folder: Path) -> Iterator[Row]:
    # By device: tensors beside those that its allocator gave out, and with what it loses beside what it reserved; on a
    # CPU the whole process beside its resident memory.
    run = resolve(str(run_folder / "config.toml"), {}, {})
    job = Job(cluster=run.cluster, plan=run.plan, num_micros=run.num_micros())
    parts = fullest_stage(job, run.blocks(), run.train.sequence, "cuda" if setting.is_cuda else "cpu")[1]
    whole, context, allocator = sum(parts.values()), parts["context"], parts["allocator"]
    last = (run_folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1]
    measured: dict[str, int] = json.loads(last)["peak_memory_bytes"]
    said = {"allocated": whole - context - allocator, "reserved": whole - context, "resident": whole}
    for kind, num_bytes in measured.items():
        yield _beside(setting, f"memory {kind}", (said[kind], num_bytes), 1e-9, "GB", MEMORY_BAND)


def _beside(setting: Setting, name: str, pair: tuple[float, float], scale: float, unit: str, band: float) -> Row:
    said, found = pair
    error = said / found - 1
    words = f"{said * scale:.3g} {unit} predicted, {found * scale:.3g} measured, {error:+.1%}"
    return Row(name, words, setting.goal(abs(error) <= band), f"{band:.0%}")


def _peaks(setting: Setting) -> list[str]:
    # A share of the peak needs the peak; on a CPU the probe measures it.
    if not setting.is_cuda:
        return []
    return ["--cluster.device.peak_flops_per_s.bf16", f"{setting.peak_tflops * 1e12:g}"]


def _terrace(words: Sequence[str]) -> None:
    # Among this tree's files, which are then found first: another copy may be installed.
    done = subprocess.run([sys.executable, "-m", "terrace", *words], cwd=Path(__file__).parents[2], check=False)
    if done.returncode:
        sys.exit(f"terrace {words[0]} ended with {done.returncode}")

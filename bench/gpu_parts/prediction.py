"""`terrace probe`, then `terrace train` on its cluster file: step and memory, predicted beside measured."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.common import decoder
from bench.gpu_parts.setting import Row, Setting
from terrace.model.config import to_table

STEP_BAND, MEMORY_BAND = 0.1, 0.05  # goals on a GPU
_ONE_RANK = ("package", "node", "system")  # the tiers of the cluster that the probe starts from


def rows(setting: Setting) -> Iterator[Row]:
    """What the probe found, then one row for the step and one for memory."""
    folder = setting.folder / "prediction"
    folder.mkdir(exist_ok=True)
    sizes = [word for tier in _ONE_RANK for word in (f"--cluster.tiers.{tier}.size", "1")]
    kind = ["--cluster.device.backend", "cuda" if setting.is_cuda else "cpu"]
    seconds = setting.size(40, 2)
    _terrace(
        ["probe", "--out", "cluster.toml", "--force", "--seconds", str(seconds), *sizes, *kind, *_peaks(setting)],
        folder,
    )
    config = decoder(setting.size(2048, 64), setting.size(18, 2), setting.size(32000, 257))
    (folder / "model.json").write_text(json.dumps(to_table(config)), encoding="utf-8")
    keys = {"steps": setting.size(12, 6), "batch": setting.size(8, 2), "sequence": setting.size(2048, 32)}
    words = [word for key, value in keys.items() for word in (f"--train.{key}", str(value))]
    words += ["--train.warmup_steps", "0", "--plan.micro_batch", str(setting.size(4, 1)), "--plan.compute", "bf16"]
    where = ["--cluster", "cluster.toml", "--plan", "ddp", "--model", "model.json", "--folder", "run"]
    _terrace(["train", *where, *words], folder)
    report = json.loads((folder / "run" / "report.json").read_text(encoding="utf-8"))
    predicted, measured = report["predicted"], report["measured"]
    for what, unit, scale, band in (("time_s", "ms", 1e3, STEP_BAND), ("memory_bytes", "GB", 1e-9, MEMORY_BAND)):
        said, found = (sum(side[what].values()) for side in (predicted, measured))
        error = said / found - 1
        name = "step" if what == "time_s" else "memory"
        words_of = f"{said * scale:.3g} {unit} predicted, {found * scale:.3g} measured, {error:+.1%} (goal {band:.0%})"
        yield Row(name, words_of, abs(error) <= band or setting.tiny)


def _peaks(setting: Setting) -> list[str]:
    # A share of the peak needs the peak; on a CPU the probe measures it.
    if not setting.is_cuda:
        return []
    return ["--cluster.device.peak_flops_per_s.bf16", f"{setting.peak_tflops * 1e12:g}"]


def _terrace(words: Sequence[str], folder: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "terrace", *words], cwd=folder, check=False)
    if done.returncode:
        sys.exit(f"terrace {words[0]} ended with {done.returncode}")

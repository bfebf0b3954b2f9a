"""States on a disk: memory, bytes and seconds of a step beside their formulas.

    python -m bench.offload                              a decoder of 60 M parameters, on the device and on the disk
    python -m bench.offload --states optimizer,params,grads      all three states on the disk
    python -m bench.offload --hidden 1024 --layers 16 --limit 2.2e9

Each way of keeping is a process of its own, one rank on a CPU. Its anonymous memory (RssAnon of /proc/self/status) is
compared with the model state that the program predicts, over that of the other way; bytes with the kernel's counters
(/proc/self/io); and a step with the larger of its passes and its bytes at the rate that the disk reached before. With
`--limit`, the process is put into a memory group (bench.memory_group).
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

import terrace
from bench.common import decoder, real_blocks
from bench.memory_group import memory_group
from terrace.model.blocks import block_specs
from terrace.model.decoder import token_loss
from terrace.plan.wire import MessageClass


def anonymous_bytes() -> int:
    """Anonymous memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def disk_bytes() -> tuple[int, int]:
    """Bytes that this process has had read and written."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"]), int(lines["write_bytes"])


def measure(options: argparse.Namespace, medium: str) -> dict[str, Any]:
    """Figures of one process that keeps the states of `options` on `medium`."""
    config = decoder(options.hidden, options.layers, options.vocab)
    blocks = real_blocks(config)
    numel = sum(parameter.numel() for block in blocks for parameter in block.parameters())
    plan = {"preset": "ddp", "compute": options.compute, "keep": dict.fromkeys(options.states.split(","), medium)}
    trainer = terrace.Trainer(
        blocks,
        plan=plan,
        cluster="local",
        loss=token_loss,
        lr=1e-4,
        declared=block_specs(config),
        activation=(options.sequence, options.hidden),
        keep_folder=options.folder if medium == "disk" else None,
        say=lambda words: None,
    )
    del blocks
    generator = torch.Generator().manual_seed(0)
    steps, losses = [], []
    for step in range(options.steps):
        tokens = torch.randint(options.vocab, (options.batch, options.sequence + 1), generator=generator)
        before = disk_bytes()
        result = trainer.step(tokens[:, :-1], tokens[:, 1:])
        trainer.engine.drain()
        if step >= options.warmup:  # after the prediction, and the first writes of every piece
            after = disk_bytes()
            steps.append((result.time_s, after[0] - before[0], after[1] - before[1]))
        losses.append(result.loss)
    report = trainer.report()
    predicted = report.predicted
    assert predicted is not None, "one step was timed"
    mean_s = {name: statistics.mean(each[0].get(name, 0.0) for each in steps) for name in steps[0][0]}
    sent = {f"{message}.{tier}": size for (message, tier), size in report.measured.sent_bytes.items()}
    found = {
        "numel": numel,
        "anonymous_bytes": anonymous_bytes(),
        "state_bytes": sum(report.measured.memory_bytes.values()),
        "step_s": sum(mean_s.values()),
        "steps_s": [sum(each[0].values()) for each in steps],
        "wait_s": sum(spent for name, spent in mean_s.items() if name.startswith("wait ")),
        "passes_s": sum(mean_s.get(name, 0.0) for name in ("forward", "backward", "clip")),
        "update_s": mean_s.get("update", 0.0),
        "predicted_s": predicted.step_s,
        "predicted_bytes": predicted.sent_bytes.get((MessageClass.KEEP_READ, "disk"), 0),
        "predicted_written_bytes": predicted.sent_bytes.get((MessageClass.KEEP_WRITE, "disk"), 0),
        "measured_bytes": sent.get("keep_read.disk", 0),
        "measured_written_bytes": sent.get("keep_write.disk", 0),
        "read_bytes": statistics.mean(each[1] for each in steps),
        "written_bytes": statistics.mean(each[2] for each in steps),
        "rate": trainer.engine.below.rate(medium),
        "losses": losses,
    }
    trainer.close()
    return found


def in_process(options: argparse.Namespace, medium: str, words: Sequence[str]) -> dict[str, Any]:
    """`measure` in a process of its own."""
    with memory_group(int(options.limit)) if options.limit else nullcontext() as group:
        done = subprocess.run(
            [sys.executable, "-m", "bench.offload", *words, "--measure", medium],
            capture_output=True,
            text=True,
            check=False,
            preexec_fn=None if group is None else group.enter,
        )
    if done.returncode:
        return {"error": f"exit {done.returncode}: {done.stderr.strip().splitlines()[-1:]}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("hidden", 512), ("layers", 16), ("vocab", 8192), ("batch", 1), ("sequence", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=2, help="steps that are not measured")
    parser.add_argument("--compute", default="fp32")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--limit", type=float, default=0.0, help="bytes of memory of the process")
    parser.add_argument("--states", default="optimizer", help="states on the disk: some of optimizer,params,grads")
    parser.add_argument("--measure", default="", help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.measure:
        print(json.dumps(measure(options, options.measure)))
        return
    found = {medium: in_process(options, medium, words) for medium in ("device", "disk")}
    for medium, figures in found.items():
        print(f"{medium}: {json.dumps(figures)}")
    if any("error" in each for each in found.values()):
        return
    device, disk = found["device"], found["disk"]
    saved, formula = (device[key] - disk[key] for key in ("anonymous_bytes", "state_bytes"))
    passing_s = disk["predicted_bytes"] / disk["rate"]
    least_s = max(disk["passes_s"] + disk["update_s"], passing_s)
    print(f"parameters {disk['numel'] / 1e6:.1f} M; losses equal: {device['losses'] == disk['losses']}")
    print(f"anonymous memory {saved / 1e6:.1f} MB less, by formula {formula / 1e6:.1f} MB: {saved / formula - 1:+.1%}")
    for name, formula_name in (("read_bytes", "predicted_bytes"), ("written_bytes", "predicted_written_bytes")):
        print(f"{name} of the kernel {disk[name]:,.0f}, by formula {disk[formula_name]:,}")
    print(f"step {disk['step_s']:.2f} s, at the disk's {disk['rate'] / 1e6:.0f} MB/s {passing_s:.2f} s")
    print(f"over max(compute, bytes / rate): {disk['step_s'] / least_s - 1:+.1%}")
    print(f"predicted {disk['predicted_s']:.2f} s: {disk['predicted_s'] / disk['step_s'] - 1:+.1%}")


if __name__ == "__main__":
    main(sys.argv[1:])

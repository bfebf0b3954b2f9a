"""A table whose states are several times the memory that its process may have, trained from a disk.

    python -m bench.tables_limit                      3.1 M rows of 64 elements, 2.4 GB of states, in 0.6 GB of memory
    python -m bench.tables_limit --rows 10_000_000

The process is put into a memory control group (cgroup v1 or v2) whose limit is the states of the table divided by
`--times`, page cache included. Each step looks up ids that are drawn uniformly, as predictions assume. Figures beside
their formulas: the most anonymous memory (RssAnon, sampled), bytes by the kernel's counters (/proc/self/io), and
seconds of a step beside the prediction with the rates that the disk had before the steps.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.common import engine_with
from bench.memory_group import memory_group
from bench.offload import anonymous_bytes, disk_bytes
from bench.offload_limit import forward_seconds, sampled
from terrace.base.errors import ConfigError
from terrace.cluster.cluster import Cluster
from terrace.model.params import ParamSpec
from terrace.model.spec import BlockSpec
from terrace.plan.keep import Keep
from terrace.plan.kept_rows import passing_bytes
from terrace.plan.presets import preset
from terrace.runtime.batch import Batch
from terrace.runtime.engine import Engine
from terrace.simulate.step import Step, predict_step
from terrace.train.calibrate import measure as calibrate
from terrace.train.joining import read_cluster

STATE_BYTES = 12  # of an element: itself and two moments, in fp32
_PRODUCT = 192  # side of the matrices whose product tells the FLOP/s
_WARM = 3  # steps before those that count


class Table(nn.Module):
    """Ids (B, fields) to vectors (B, fields, width)."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, 1).expand(rows, width))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class Network(nn.Module):
    """Vectors (B, fields, width) to logits (B)."""

    def __init__(self, fields: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(fields * width, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, vectors: Tensor) -> Tensor:
        logits: Tensor = self.layers(vectors.flatten(1)).squeeze(1)
        return logits


def click_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of the cross entropies of logits (B) and labels (B, fields), whose first field is the click."""
    return F.binary_cross_entropy_with_logits(logits, labels[:, 0].to(logits.dtype), reduction="sum")


def limit_of(options: argparse.Namespace) -> int:
    """Bytes of the memory group."""
    return int(options.rows * options.width * STATE_BYTES / options.times)


def cluster_of(options: argparse.Namespace) -> Cluster:
    """One CPU with the memory of the group, and the disk of the preset."""
    found = read_cluster("local", 1)
    return replace(found, device=replace(found.device, memory_bytes=float(limit_of(options))))


def make(options: argparse.Namespace) -> Engine:
    """An engine whose table begins with equal rows, which are written and need no memory."""
    table, network = Table(options.rows, options.width), Network(options.fields, options.width)
    shape = (options.rows, options.width)
    dims = (("vocab", options.rows), ("hidden", options.width))
    declared = (
        BlockSpec(name="table", params=(ParamSpec(name="weight", shape=shape, dims=dims),)),
        BlockSpec(
            name="network",
            params=tuple(ParamSpec(name=name, shape=tuple(each.shape)) for name, each in network.named_parameters()),
        ),
    )
    own, cluster = dict(network.named_parameters()), cluster_of(options)
    row = torch.linspace(-0.1, 0.1, options.width)
    plan = replace(preset("ddp", cluster), vocabulary={cluster.tiers[0].name: 1}, keep=Keep(table="disk"))
    return engine_with(
        [table, network],
        names=["table", "network"],
        objective=click_loss,
        cluster=cluster,
        plan=replace(plan, micro_batch=options.batch),
        num_micros=1,
        rank=0,
        declared=declared,
        sequence=options.fields,
        initial=lambda block, name, shape: row.expand(shape) if block == "table" else own[name].detach(),
        keep_folder=options.folder,
    )


def predicted(engine: Engine, forward_s: float) -> Any:
    """The step on this machine as it is now; the network's forward takes `forward_s`."""
    side = torch.ones(_PRODUCT, _PRODUCT)
    cluster, program = calibrate(engine, lambda: side @ side, 2 * _PRODUCT**3), engine.program
    work = (0.0, cluster.device.peak_flops_per_s[program.plan.compute] * forward_s)
    step = Step(
        cluster=cluster,
        plan=program.plan,
        blocks=program.blocks,
        num_micros=program.num_micros,
        sequence=program.model.sequence,
        work=work,
    )
    return predict_step(step).reports[0]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Figures of this process."""
    before = anonymous_bytes()
    engine, rows = make(options), list[dict[str, Any]]()

    def step(number: int) -> Any:
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(0, options.rows, (options.batch, options.fields), generator=generator)
        found = engine.step([Batch(ids, ids % 2)], 1e-3)
        engine.drain()
        return found

    for number in range(_WARM):
        step(number)
    report = predicted(engine, forward_seconds(engine, lambda: step(_WARM))[1])
    sent_bytes = engine.program.expected_bytes
    for number in range(_WARM, _WARM + options.steps):
        counted, begin_s = disk_bytes(), time.perf_counter()
        with sampled() as anonymous:
            result = step(number)
        moved = [after - earlier for earlier, after in zip(counted, disk_bytes(), strict=True)]
        figures = {"anonymous_bytes": anonymous[0], "moved": moved, "time_s": dict(result.time_s)}
        rows.append(figures | {"wall_s": time.perf_counter() - begin_s})
    look_ups, program = engine.program.model.routed.look_ups(0), engine.program
    on_device = passing_bytes(program.plan, look_ups, 1, in_host=True) + look_ups.gradient_bytes(1, program.plan.sums)
    found = {
        "formula_bytes": before + sum(engine.report({}).memory_bytes.values()) + on_device,
        "resting_bytes": program.resting_bytes["disk"],
        "predicted_bytes": [sent_bytes[message, "disk"] for message, _ in sorted(sent_bytes) if message in _ROWS],
        "predicted_s": dict(report.time_s),
        "rows": rows,
    }
    engine.check_bytes()
    engine.close()
    return found


_ROWS = ("row_read", "row_write")


def options_of(words: Sequence[str]) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rows", 3_125_000), ("width", 64), ("batch", 4096), ("fields", 8), ("steps", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--times", type=float, default=4.0, help="the table's states over the memory of the group")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(words)


def lines_of(found: dict[str, Any]) -> list[str]:
    """What is printed of the figures."""
    lines = [f"{found['resting_bytes'] / 1e9:.2f} GB of pages on the disk"]
    for row in found["rows"]:
        near = row["anonymous_bytes"] / found["formula_bytes"] - 1
        lines.append(f"anonymous memory {row['anonymous_bytes'] / 1e6:.0f} MB, formula {100 * near:+.1f} %")
        pairs = zip(row["moved"], found["predicted_bytes"], strict=True)
        lines.append("bytes read, written by the kernel: " + ", ".join(f"{one:,} of {mean:,}" for one, mean in pairs))
        spent_s, mean_s = row["wall_s"], sum(found["predicted_s"].values())
        lines.append(f"step {spent_s:.2f} s, predicted {mean_s:.2f} s ({100 * (mean_s / spent_s - 1):+.0f} %)")
        lines.append("  " + ", ".join(f"{name} {value:.3f}" for name, value in row["time_s"].items() if value > 1e-3))
    lines.append("predicted " + ", ".join(f"{name} {value:.3f}" for name, value in found["predicted_s"].items()))
    return lines


def main(words: Sequence[str]) -> None:
    """Measure in a group, and print the figures."""
    options = options_of(words)
    if options.measure:
        print(json.dumps(measure(options)))
        return
    limit = limit_of(options)
    print(f"{limit * options.times / 1e9:.2f} GB of states, a memory group of {limit / 1e6:.0f} MB")
    command = [sys.executable, "-m", "bench.tables_limit", *words, "--measure"]
    try:
        with memory_group(limit) as group:
            ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, preexec_fn=group.enter)
    except ConfigError as error:
        sys.exit(f"nothing was measured: {error}")
    if ended.returncode:
        sys.exit(f"the measuring process ended with {ended.returncode}")
    print("\n".join(lines_of(json.loads(ended.stdout.splitlines()[-1]))))


if __name__ == "__main__":
    main(sys.argv[1:])

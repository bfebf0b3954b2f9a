"""A model whose states are several times the memory that its process may have, trained from a disk.

    python -m bench.offload_limit                          170 M parameters, 3.4 GB of states, in 0.85 GB of memory
    python -m bench.offload_limit --rate 1.5e8            with the disk held to 150 MB/s each way


The process is put into a memory control group (cgroup v1 or v2) whose limit is the model's states divided by
`--times`, page cache included. Parameters, gradients and optimizer states are kept on the disk. Figures beside their
formulas: the most anonymous memory (RssAnon, sampled), bytes by the kernel's counters (/proc/self/io), and seconds of
a step, beside the prediction and the larger of computing and of bytes at the rate that a lane had in the same step. The
same model with its states on the device is started in such a group, too, and is refused.
"""

import argparse
import json
import math
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.common import block_names, decoder, engine_of, micro_batches
from bench.memory_group import memory_group
from bench.offload import anonymous_bytes, disk_bytes
from terrace.base.errors import ConfigError
from terrace.cluster.below import Medium
from terrace.cluster.cluster import Cluster
from terrace.comm.collectives import DTYPES
from terrace.comm.pace import UNPACED
from terrace.lab.pace import Pacer
from terrace.model.block_operations import layer_operations
from terrace.model.blocks import block_specs
from terrace.model.config import ModelConfig
from terrace.model.decoder import build_blocks
from terrace.model.init import initial_value
from terrace.plan.keep import Keep
from terrace.plan.presets import preset
from terrace.plan.wire import MessageClass
from terrace.program.report import StepReport
from terrace.runtime.batch import Batch
from terrace.runtime.engine import Engine
from terrace.runtime.kept.channel import Work
from terrace.simulate.footprint import work_of
from terrace.simulate.held_activations import activation_bytes, activations_by_block
from terrace.simulate.step import Step, predict_step
from terrace.train.calibrate import measure as calibrate
from terrace.train.first_step import FirstStep
from terrace.train.joining import read_cluster

BELOW = Keep(optimizer="disk", params="disk", grads="disk")
STATE_BYTES = 4 + 4 + 4 + 8  # of a parameter in fp32: working copy, gradient, master copy, moments
_SAMPLE_S = 0.005
_TIMED = 2  # steps in which forwards are timed
_PRODUCT = 192  # side of the matrices whose product tells the FLOP/s
LANES = (("read", MessageClass.KEEP_READ), ("write", MessageClass.KEEP_WRITE))


@contextmanager
def sampled() -> Iterator[list[int]]:
    """Anonymous memory of this process, sampled until the end: the most, and how often it was read."""
    found, over = [0, 0], threading.Event()

    def sample() -> None:
        while not over.wait(_SAMPLE_S):
            found[0] = max(found[0], anonymous_bytes())
            found[1] += 1

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


def config_of(options: argparse.Namespace) -> ModelConfig:
    return decoder(options.hidden, options.layers, options.vocab)


def numel_of(config: ModelConfig) -> int:
    return sum(spec.num_trainable for spec in block_specs(config))


def cluster_of(options: argparse.Namespace) -> Cluster:
    """One CPU with the memory of the group, and a disk of `--rate` bytes per second each way, else as in the preset."""
    found, rate = read_cluster("local", 1), options.rate
    disk = Medium(memory_bytes=1e12, read_bytes_per_s=rate, write_bytes_per_s=rate) if rate else None
    below = found.device.below if disk is None else {"disk": disk}
    return replace(found, device=replace(found.device, memory_bytes=float(limit_of(options)), below=below))


def limit_of(options: argparse.Namespace) -> int:
    """Bytes of the memory group."""
    return int(numel_of(config_of(options)) * STATE_BYTES / options.times)


class Busy:
    """Seconds in which each lane of the media was busy."""

    def __init__(self) -> None:
        self.seconds = defaultdict[str, float](float)

    def around(self, work: Work, category: str, lane: str) -> Work:
        def timed() -> None:
            begin_s = time.perf_counter()
            work()
            self.seconds[category] += time.perf_counter() - begin_s  # one thread a lane

        return timed

    def taken(self) -> list[float]:
        """Seconds of reads and of writes since the last call."""
        found = [self.seconds[message] for _, message in LANES]
        self.seconds.clear()
        return found


def make(options: argparse.Namespace, keep: Keep) -> tuple[Engine, Cluster]:
    """An engine whose initial values are made parameter by parameter, so that they are never all in memory."""
    config, cluster = config_of(options), cluster_of(options)
    plan = replace(preset("ddp", cluster), keep=keep, unit=options.micros)
    modules = build_blocks(config)
    engine = engine_of(
        modules,
        cluster,
        plan,
        options.micros,
        declared=block_specs(config),
        sequence=options.sequence,
        initial=lambda block, name, shape: initial_value(config, block, name, shape, 0),
        keep_folder=options.folder if keep.is_below else None,
        pacer=Pacer(cluster, 1.0) if options.rate else UNPACED,
    )
    return engine, cluster


def forward_seconds(engine: Engine, step: Callable[[], object]) -> dict[int, float]:
    """Seconds of the forward of each block: the least of some steps, since other processes take turns."""
    found: dict[int, float] = {}
    for _ in range(_TIMED):
        first = FirstStep(block_names(list(engine.state.modules.values())), engine.device)
        with first.watching(engine):
            step()
        found = {block: min(each, found.get(block, each)) for block, each in first.seconds.items()}
    return found


class Predicted:
    """Predictions of an engine's step, from the seconds of its blocks' forwards and the machine as it is now."""

    def __init__(self, engine: Engine, seconds: Mapping[int, float]) -> None:
        self._program, compute = engine.program, engine.program.plan.compute
        side = torch.ones(_PRODUCT, _PRODUCT, dtype=DTYPES[compute])
        self._cluster = calibrate(engine, lambda: side @ side, 2 * _PRODUCT**3)
        peak = self._cluster.device.peak_flops_per_s[compute]
        self._work = tuple(peak * seconds[block] for block in sorted(seconds))  # FLOPs of as many seconds

    @property
    def rate(self) -> float:
        """Bytes per second that the disk reads while it writes as many."""
        return self._cluster.device.below["disk"].read_bytes_per_s

    def step(self, read_rate: float, write_rate: float) -> StepReport:
        """The step on media of these bytes per second each way."""
        device, program = self._cluster.device, self._program
        media = {
            name: replace(medium, read_bytes_per_s=read_rate, write_bytes_per_s=write_rate)
            for name, medium in device.below.items()
        }
        cluster = replace(self._cluster, device=replace(device, below=media))
        found = predict_step(
            Step(
                cluster=cluster,
                plan=program.plan,
                blocks=program.blocks,
                num_micros=program.num_micros,
                sequence=program.model.sequence,
                work=self._work,
            )
        )
        return found.reports[0]


def measure(options: argparse.Namespace, keep: Keep) -> dict[str, Any]:
    """Figures of one process with states where `keep` says."""
    before = anonymous_bytes()
    engine, cluster = make(options, keep)
    config, rows = config_of(options), []
    shape = (options.batch, options.sequence)

    def step(number: int) -> Any:
        batches = [Batch(*each) for each in micro_batches(number, 0, options.micros, shape, options.vocab)]
        found = engine.step(batches, 1e-4)
        engine.drain()
        return found

    step(0)
    predicted = Predicted(engine, forward_seconds(engine, lambda: step(1)))
    before_steps = predicted.step(predicted.rate, predicted.rate)
    sent_bytes = [before_steps.sent_bytes[message, "disk"] for _, message in LANES]
    step(2)  # which reads again what was read ahead before the disk was measured
    losses, busy = list[float](), Busy()
    engine.below.trace(busy.around)
    for number in range(3, 3 + options.steps):
        counted, begin_s = disk_bytes(), time.perf_counter()
        with sampled() as anonymous:
            result = step(number)
        busy_s = busy.taken()
        moved = [after - earlier for earlier, after in zip(counted, disk_bytes(), strict=True)]
        at_rates = predicted.step(*(size / spent_s for size, spent_s in zip(sent_bytes, busy_s, strict=True)))
        row = {"wall_s": time.perf_counter() - begin_s, "anonymous_bytes": anonymous[0], "moved": moved}
        rows.append(row | {"busy_s": busy_s, "time_s": result.time_s, "predicted_s": at_rates.step_s})
        losses.append(result.loss)
    report = engine.report({})
    work = work_of(cluster, engine.program.plan, layer_operations(config), options.sequence)
    held = activations_by_block(work, engine.program.plan, engine.program.blocks, "cpu")
    found = {
        "numel": numel_of(config),
        "formula_bytes": before + sum(report.memory_bytes.values()) + activation_bytes(engine.program, held),
        "state_bytes": sum(report.memory_bytes.values()),
        "rows": rows,
        "predicted_bytes": sent_bytes,
        "predicted_s": before_steps.step_s,
        "rate": predicted.rate,
        "losses": losses,
    }
    engine.close()
    return found


def in_group(words: Sequence[str], medium: str, limit: int) -> "subprocess.CompletedProcess[str]":
    """A process in a group of `limit` bytes that has measured states on `medium`, or was killed."""
    with memory_group(limit) as group:
        return subprocess.run(
            [sys.executable, "-m", "bench.offload_limit", *words, "--measure", medium],
            capture_output=True,
            text=True,
            check=False,
            preexec_fn=group.enter,
        )


def options_of(words: Sequence[str]) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("hidden", 768), ("layers", 24), ("vocab", 2048), ("batch", 1), ("sequence", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--micros", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--times", type=float, default=4.0, help="the model's states over the memory of the group")
    parser.add_argument("--rate", type=float, default=0.0, help="bytes per second to which the disk is held each way")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--measure", default="", help=argparse.SUPPRESS)
    return parser.parse_args(words)


def main(words: Sequence[str]) -> None:
    options = options_of(words)
    if options.measure:
        print(json.dumps(measure(options, BELOW if options.measure == "disk" else Keep())))
        return
    limit = limit_of(options)
    print(f"{limit * options.times / 1e9:.2f} GB of states, a memory group of {limit / 1e6:.0f} MB")
    try:
        on_device, on_disk = (in_group(words, medium, limit) for medium in ("device", "disk"))
    except ConfigError as error:
        sys.exit(f"nothing was measured: {error}")
    print(f"states on the device: {ended(on_device)}")
    if on_disk.returncode:
        sys.exit(f"states on the disk: {ended(on_disk)}")
    show(json.loads(on_disk.stdout.splitlines()[-1]))


def ended(process: "subprocess.CompletedProcess[str]") -> str:
    """How a process ended."""
    if process.returncode < 0:
        return f"ended by {signal.Signals(-process.returncode).name}"
    said = process.stderr.strip().splitlines()[-1:] if process.returncode else ["trained"]
    return f"exit {process.returncode}: {' '.join(said)}"


def show(found: dict[str, Any]) -> None:
    """Print figures beside their formulas."""
    print(f"parameters {found['numel'] / 1e6:.1f} M; losses {', '.join(f'{each:.4f}' for each in found['losses'])}")
    print(f"disk before the steps {found['rate'] / 1e6:.0f} MB/s each way; predicted step {found['predicted_s']:.2f} s")
    for row in found["rows"]:
        most, formula = row["anonymous_bytes"], found["formula_bytes"]
        print(f"anonymous memory {most / 1e6:.1f} MB, by formula {formula / 1e6:.1f} MB: {most / formula - 1:+.1%}")
        for (way, _), moved, expected, busy_s in zip(
            LANES, row["moved"], found["predicted_bytes"], row["busy_s"], strict=True
        ):
            rate = f"{expected / busy_s / 1e6:.0f} MB/s"
            print(f"  {way}: {moved:,} B by the kernel, {moved - expected:+,} over the formula, at {rate}")
        computed_s = math.fsum(row["time_s"].get(each, 0.0) for each in ("forward", "backward", "clip", "update"))
        least_s = max(computed_s, *row["busy_s"])
        print(
            f"  step {row['wall_s']:.2f} s, compute {computed_s:.2f} s, lanes "
            f"{' and '.join(f'{each:.2f}' for each in row['busy_s'])} s: {row['wall_s'] / least_s - 1:+.1%} over the "
            f"largest; predicted at these rates {row['predicted_s'] / row['wall_s'] - 1:+.1%}"
        )
    middle = statistics.median(row["wall_s"] for row in found["rows"])
    print(f"median step {middle:.2f} s, predicted {found['predicted_s'] / middle - 1:+.1%}")


if __name__ == "__main__":
    main(sys.argv[1:])

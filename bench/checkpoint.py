"""Cost of a checkpoint: slow-down of the steps during a save, and the save's rate over a plain write's.

Steps: rounds of some steps in one process, by turns without a save, with a save in the background, and with a save that
they wait for; the save belongs to the round from its copy to the last of its steps, and must end in it. Rate: a save's
file (with its checksum and sync) by turns with a plain sequential write of the same bytes and an fsync, on the same
disk.

Targets: a round with a background save takes at most 5 % longer; a save writes at no less than 80 % of the plain rate.
"""

import argparse
import hashlib
import os
import statistics
import sys
import tempfile
import time
import zlib
from pathlib import Path

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, not in __all__

from bench.claims import compared, judge, options_for_claims, print_table, ratio_words
from bench.common import ADAMW, Step, alternate, decoder, engine_of, local_cluster, micro_batches, real_blocks
from terrace.checkpoint.saving import Saver
from terrace.checkpoint.writing import snapshot_of
from terrace.launch.world import World
from terrace.model.blocks import num_params
from terrace.model.config import ModelConfig
from terrace.plan.presets import preset
from terrace.runtime.batch import Batch
from terrace.runtime.engine import Engine

TARGET_TIME, TARGET_RATE = 1.05, 0.8
SEQUENCE = 128
_CHUNK_BYTES = 8 << 20


def make_engine(config: ModelConfig) -> Engine:
    """An engine on a world of one."""
    cluster = local_cluster({"node": 1})
    return engine_of(real_blocks(config), cluster, preset("ddp", cluster), 1)


def rounds_of(engine: Engine, config: ModelConfig, folder: Path, every: int, batch: int) -> dict[str, Step]:
    """The contestants: each makes `every` steps, with the save in its name."""
    worlds = [World(0, 1, 0, 1, HashStore()) for _ in range(2)]
    savers = {
        "beside": Saver(engine, worlds[0], folder / "beside", {}, 1),
        "waiting": Saver(engine, worlds[1], folder / "waiting", {}, 1, background=False),
    }

    def contestant(saver: Saver | None) -> Step:
        def step(number: int) -> float:
            if saver is not None:
                saver.start(number + 1)
            for inner in range(every):
                batches = micro_batches(number * every + inner, 0, 1, (batch, SEQUENCE), config.vocab_size)
                loss = engine.step([Batch(*batch) for batch in batches], ADAMW.lr).loss
            if saver is not None:
                saver.finish()
            return loss

        return step

    return {"no save": contestant(None), **{name: contestant(saver) for name, saver in savers.items()}}


def write_plainly(path: Path, data: memoryview) -> float:
    """Write and sync; return the seconds."""
    begin_s = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for start in range(0, len(data), _CHUNK_BYTES):
            file.write(data[start : start + _CHUNK_BYTES])
        os.fsync(file.fileno())
    return time.perf_counter() - begin_s


def rates(engine: Engine, folder: Path, rounds: int) -> tuple[int, list[float], list[float]]:
    """Size of a file, and the seconds of each write by a save and of each plain one."""
    snapshot = snapshot_of(engine.state)
    snapshot.take()
    entry = snapshot.write(folder / "file")
    data = memoryview((folder / "file").read_bytes())
    saved_s, plain_s = [], []
    for number in range(rounds):
        for name in ("saved", "plain") if number % 2 else ("plain", "saved"):
            (folder / "file").unlink()
            if name == "plain":
                plain_s.append(write_plainly(folder / "file", data))
            else:
                begin_s = time.perf_counter()
                snapshot.write(folder / "file")
                saved_s.append(time.perf_counter() - begin_s)
    return int(entry["num_bytes"]), saved_s, plain_s


def checksum_rates() -> str:
    """Bytes per second of the checksum and of its alternatives, in words."""
    data, found = os.urandom(64 << 20), []
    for name, compute in (("crc32", zlib.crc32), ("sha256", hashlib.sha256), ("blake2b", hashlib.blake2b)):
        times_s = []
        for _ in range(3):
            begin_s = time.perf_counter()
            compute(data)
            times_s.append(time.perf_counter() - begin_s)
        found.append(f"{name} {len(data) / min(times_s) / 1e9:.2f}")
    return f"checksums on one core, GB/s: {', '.join(found)}"


def main() -> int:
    """Print the tables; return 1 when --check is given and a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--every", type=int, default=10, help="steps of a round")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step")
    parser.add_argument("--folder", help="where to write (default: a temporary folder)")
    options_for_claims(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = decoder(options.hidden, options.layers)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        engine = make_engine(config)
        num_bytes, saved_s, plain_s = rates(engine, folder, options.rounds)
        print(
            f"{num_params(config) / 1e6:.1f} M parameters, a file of {num_bytes / 1e6:.0f} MB\n{checksum_rates()}\n"
            f"written at {num_bytes / statistics.median(saved_s) / 1e6:.0f} MB/s, plainly at "
            f"{num_bytes / statistics.median(plain_s) / 1e6:.0f} MB/s",
            flush=True,
        )
        contestants = rounds_of(engine, config, folder, options.every, options.batch)
        timings = alternate(contestants, options.rounds, warmup=1, before=lambda: None)
    base, rows = timings["no save"].wall_s, []
    for contestant, timing in timings.items():
        rows.append([contestant, f"{statistics.median(timing.wall_s):.2f}", ratio_words(timing.wall_s, base)])
    print()
    print_table(["save", f"s for {options.every} steps", "ratio (quartiles)"], rows)
    beside = timings["beside"].wall_s
    return judge(
        [
            compared(f"{options.every} steps with a background save, to none", beside, base, TARGET_TIME),
            compared("rate of a save, to a plain write", plain_s, saved_s, TARGET_RATE, at_least=True),
        ],
        options,
    )


if __name__ == "__main__":
    sys.exit(main())

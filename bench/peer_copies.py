"""Restart from memory against restart from disk: seconds, and bytes read, of the same state after a lost machine.

Two ranks stand for two machines, with a memory folder each. They train a step, save it to disk and copy it to memory;
then the second machine's memory is lost. By turns the state is restored from disk (as a restarted run does: rank 0
checks every file, each rank reads its boxes, from a disk cache that was emptied for these files) and from memory (rank
0 joins the lists of all hosts, each host checks its files of the newest step, missing files travel, each rank reads its
boxes). Seconds are from one meeting of the ranks to the next, so the slower rank counts. Bytes from disk are those that
the kernel has read for the ranks (`read_bytes` of /proc/self/io).
"""

import os
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from bench.claims import compared, judge, measured, print_table
from bench.common import ADAMW, bench_parser, decoder, engine_of, local_cluster, micro_batches, real_blocks
from terrace.checkpoint.layout import latest
from terrace.checkpoint.memory import held, memory_folder, newest, place, run_id
from terrace.checkpoint.peer_copies import PeerCopies, gather_files
from terrace.checkpoint.reading import Checkpoint, newest_whole, restore
from terrace.checkpoint.writing import save
from terrace.launch.start import LocalPool, World
from terrace.model.blocks import num_params
from terrace.plan.partners import find_partners
from terrace.plan.presets import preset
from terrace.runtime.batch import Batch
from terrace.runtime.engine import Engine

HOSTS = ("first", "second")
_LIMIT_S = 600.0
GOAL = 1.1
_BOUND = "the file is in the page cache, which costs no more to read than another process's memory"
Row = tuple[float, int, int]  # seconds, bytes from disk, bytes between machines


def read_bytes() -> int:
    """Bytes that this process has read from disks."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def forget(folder: Path) -> None:
    """Have the kernel drop its cache of a folder's files."""
    for path in folder.iterdir():
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def from_disk(engine: Engine, world: World, run: Path) -> int:
    """Restore from disk as a restarted run does."""
    folder = str(newest_whole(run)[0].folder) if world.rank == 0 else ""
    restore(engine.state, Checkpoint(Path(engine.comm.exchange(folder)[0])))
    engine.refresh()
    return 0


def from_memory(engine: Engine, world: World, run: Path) -> int:
    """Restore from memory as a restarted run does; returns the bytes that went between machines."""
    here = held(memory_folder(run_id(run), run, world.hosts[world.rank]))
    copies = [copy for told in engine.comm.exchange(list(here.copies)) for copy in told]
    found = newest(copies, here.folder)
    assert found is not None
    assert engine.comm.exchange(sorted(here.check(found.text))) == [[]] * world.world_size
    checkpoint = Checkpoint(place(here, found.text))
    num_bytes = gather_files(engine.state, checkpoint, world, engine.comm.exchange)
    restore(engine.state, checkpoint)
    engine.refresh()
    return num_bytes


def rank_of(world: World, run: Path, hidden: int, layers: int, rounds: int) -> tuple[float, int, dict[str, list[Row]]]:
    """One rank: seconds of a copy, bytes of all parts, and the rounds of both ways."""
    world = replace(world, hosts=HOSTS, machines=HOSTS)
    config, cluster = decoder(hidden, layers), local_cluster({"node": 2})
    engine = engine_of(real_blocks(config), cluster, preset("zero3", cluster), 1, rank=world.rank)
    batch = micro_batches(0, world.rank, 1, (2, 64), config.vocab_size)
    engine.step([Batch(*each) for each in batch], ADAMW.lr)
    engine.drain()
    save(engine, run, 1, {}, 1)
    partners = find_partners([2], HOSTS)
    assert partners is not None
    peers = PeerCopies(engine, world, run, partners, {}, timedelta(seconds=_LIMIT_S))
    copy_s = [peers.copy(1) for _ in range(3)][-1]
    parts_bytes = sum(engine.comm.exchange(peers.own_bytes))
    kept, rows = memory_folder(run_id(run), run, HOSTS[0]), dict[str, list[Row]]()
    checkpoint = latest(run)
    assert checkpoint is not None
    for _ in range(rounds):
        for name, restart in (("disk", from_disk), ("memory", from_memory)):
            if world.rank == 1:
                shutil.rmtree(memory_folder(run_id(run), run, HOSTS[1]), ignore_errors=True)
            if world.rank == 0:
                forget(checkpoint)
                for left in kept.glob("*.step-*"):
                    shutil.rmtree(left)
            dist.barrier()
            begin_s, before = time.perf_counter(), read_bytes()
            moved = restart(engine, world, run)
            dist.barrier()
            took_s = time.perf_counter() - begin_s
            rows.setdefault(name, []).append((took_s, sum(engine.comm.exchange(read_bytes() - before)), moved))
    peers.close()
    engine.close()
    return copy_s, parts_bytes, rows


def main() -> int:
    """Print the table; return 1 when --check is given and restarting from memory read from a disk."""
    parser = bench_parser(__doc__, hidden=512, layers=3, rounds=5)
    parser.add_argument("--folder", help="where the checkpoints go (default: a temporary folder)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name, LocalPool(2) as pool:
        sizes = (options.hidden, options.layers, options.rounds)
        copy_s, parts_bytes, rows = pool.run(2, rank_of, Path(name), *sizes, timeout_s=_LIMIT_S)[0]
    count = num_params(decoder(*sizes[:2]))
    print(
        f"{count / 1e6:.1f} M parameters, {parts_bytes / 1e6:.0f} MB of state on 2 ranks; a copy takes {copy_s:.2f} s\n"
    )
    table = []
    for way, found in rows.items():
        seconds, disk, moved = zip(*found, strict=True)
        low, high = min(seconds), max(seconds)
        median = f"{statistics.median(seconds):.2f} ({low:.2f} - {high:.2f})"
        table.append([way, median, f"{statistics.median(disk) / 1e6:.1f}", f"{statistics.median(moved) / 1e6:.1f}"])
    print_table(["restart from", "s: median (least - most)", "MB from disk", "MB between machines"], table)
    read = max(disk for _, disk, _ in rows["memory"])
    restarts_s = {way: [took_s for took_s, _, _ in found] for way, found in rows.items()}
    contestants = restarts_s["memory"], restarts_s["disk"]
    claims = [
        measured("read from disk for a restart from memory", [float(read)], 0.0, unit="bytes"),
        compared("a restart from another machine's memory, to one from disk", *contestants, GOAL, bound=_BOUND),
    ]
    return judge(claims, options)


if __name__ == "__main__":
    sys.exit(main())

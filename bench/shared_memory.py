"""Processor time of messages between two ranks of one machine: shared memory against gloo over the loopback.

A gather makes both halves of a bf16 buffer whole on both ranks; a reduction adds both ranks' values of a half in fp32.
gloo runs the all-to-alls of `terrace.comm`. Through shared memory a rank copies its half into a region that both have
mapped, waits on semaphores, and copies or adds from there; a buffer that lived in the region would save the first copy.
Each way has two processes of its own, which take turns; processor seconds are of all threads of both.
"""

import mmap
import multiprocessing
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Semaphore
from time import process_time

import torch
import torch.distributed as dist
from torch import Tensor

from bench.claims import print_table, ratio_words
from bench.common import bench_parser, free_port

RANKS = 2
WAYS = ("gloo", "shared memory")
OPERATIONS = ("gather", "reduce")
Signals = tuple[Sequence[Semaphore], Sequence[Semaphore]]  # by rank: its half is written; it has read the other's
Take = Callable[[Tensor], object]
Exchange = Callable[[Tensor, Take], None]  # sends a half; calls back with the other rank's


def over_loopback(rank: int, port: int, most: int) -> Exchange:
    """Halves of up to `most` elements, exchanged by gloo's all-to-all."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    buffer = torch.empty(most, dtype=torch.bfloat16)

    def exchange(sent: Tensor, take: Take) -> None:
        incoming = buffer[: sent.numel()]
        splits = [0, 0]
        splits[1 - rank] = sent.numel()
        dist.all_to_all_single(incoming, sent, splits, splits)
        take(incoming)

    return exchange


def through_memory(rank: int, path: str, most: int, signals: Signals) -> Exchange:
    """Halves of up to `most` elements, exchanged through a file that both ranks have mapped."""
    with open(path, "r+b") as file:
        mapped = mmap.mmap(file.fileno(), RANKS * 2 * most)
    region = torch.frombuffer(mapped, dtype=torch.bfloat16).view(RANKS, most)
    written, read = signals

    def exchange(sent: Tensor, take: Take) -> None:
        region[rank, : sent.numel()].copy_(sent)
        written[rank].release()
        written[1 - rank].acquire()
        take(region[1 - rank, : sent.numel()])
        read[rank].release()
        read[1 - rank].acquire()  # before the region is written again

    return exchange


def work(end: Connection, way: str, rank: int, port: int, path: str, most: int, signals: Signals) -> None:
    """A rank: (operation, elements, repeats) from the pipe -> processor seconds of one, and a sum to compare."""
    torch.set_num_threads(1)
    exchange = over_loopback(rank, port, most) if way == "gloo" else through_memory(rank, path, most, signals)
    while (asked := end.recv()) is not None:
        operation, size, repeats = asked
        end.send(repeated(operation, size, repeats, rank, exchange, copies=way != "gloo"))


def repeated(
    operation: str, size: int, repeats: int, rank: int, exchange: Exchange, *, copies: bool
) -> tuple[float, float]:
    """Processor seconds of one operation on `size` elements, and the sum of its result."""
    whole = torch.arange(size).remainder(251).add(rank).to(torch.bfloat16)
    halves, total = whole.view(RANKS, -1), torch.empty(size // RANKS)

    def place(incoming: Tensor) -> None:
        if copies:  # gloo receives a half where it belongs
            halves[1 - rank].copy_(incoming)

    def add(incoming: Tensor) -> None:
        torch.add(total.copy_(halves[rank]), incoming, out=total)

    sent, take = (halves[rank], place) if operation == "gather" else (halves[1 - rank], add)
    begin_s = process_time()
    for _ in range(repeats):
        exchange(sent, take)
    return (process_time() - begin_s) / repeats, float(total.sum()) if operation == "reduce" else 0.0


def main() -> int:
    """Measure both ways in turns, and print processor seconds and their ratio."""
    options = bench_parser(__doc__, rounds=7, repeats=20).parse_args()
    context, sizes = multiprocessing.get_context("spawn"), [2**20 * megabytes // 2 for megabytes in (1, 2, 4, 8, 16)]
    most, port = max(sizes) // RANKS, free_port()
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        file.truncate(RANKS * 2 * most)
        ends: dict[str, list[Connection]] = {}
        signals = tuple([context.Semaphore(0) for _ in range(RANKS)] for _ in range(2))
        for way in WAYS:
            ends[way] = []
            for rank in range(RANKS):
                ours, theirs = context.Pipe()
                arguments = (theirs, way, rank, port, file.name, most, signals)
                context.Process(target=work, args=arguments, daemon=True).start()
                ends[way].append(ours)
        rows = []
        for operation in OPERATIONS:
            for size in sizes:
                seconds: dict[str, list[float]] = {way: [] for way in WAYS}
                sums = set()
                for number in range(options.rounds + 1):
                    for way in WAYS if number % 2 else reversed(WAYS):
                        for end in ends[way]:
                            end.send((operation, size, options.repeats))
                        found = [end.recv() for end in ends[way]]
                        sums.add(tuple(total for _, total in found))
                        if number:  # the first warms up
                            seconds[way].append(sum(cpu_s for cpu_s, _ in found))
                assert len(sums) == 1, "the two ways do not add alike"
                each = [f"{1e3 * statistics.median(seconds[way]):.2f}" for way in WAYS]
                rows.append([operation, f"{2 * size >> 20}", *each, ratio_words(seconds[WAYS[1]], seconds[WAYS[0]])])
        for way in WAYS:
            for end in ends[way]:
                end.send(None)
    print_table(["operation", "MB", *(f"{way} ms" for way in WAYS), "shared memory / gloo (quartiles)"], rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())

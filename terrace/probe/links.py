"""Collectives of each tier, through the runtime's own groups, lanes and collectives.

Each tier gets a layout in which only that tier has data ranks: a gather or reduction then crosses only this tier, while
all groups of the tier work at once, as in a step.
"""

import math
import statistics
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch
from torch import Tensor

from terrace.cluster.cluster import Cluster
from terrace.comm.collectives import DTYPES, Collectives
from terrace.comm.groups import TierGroups
from terrace.comm.lane import make_lane
from terrace.comm.ledger import Ledger, Meter
from terrace.comm.pace import Pace
from terrace.comm.rounding import Origin
from terrace.plan.layout import Layout
from terrace.plan.plan import Plan
from terrace.plan.wire import MessageClass
from terrace.probe.compute import TRAINS_IN, Say
from terrace.probe.fit import LinkSample
from terrace.probe.grid import message_sizes
from terrace.probe.samples import Concurrent, Overlap, TierSamples
from terrace.probe.timing import Stopwatch, Work
from terrace.program.message import Transfer
from terrace.program.resolve import flat_transfer

_NUM_SIZES = 7
FIRST_BYTES = 256 << 10  # of a group; its time bounds the size of the other messages
LARGEST_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}
# Messages during compute: on a GPU as long as those of a large block, which use more multiprocessors than short ones.
OVERLAP_BYTES = {"cpu": FIRST_BYTES, "cuda": 64 << 20}
_PRODUCT = {"cpu": 256, "cuda": 4096}
_OUTLAST = 2.0  # times the computing beside messages, which slow down as well
_CALLS_A_LOOP = 2  # of the largest message
_DRAINING = 2  # times the first message: far more than the burst that a slow link lets through
_ROUNDS = 5  # each of compute, messages and both
_SKEW_BYTES = 64 << 10  # of a group, around the messages of a small model
_ELEMENT_BYTES = 4
_CLASSES = {"gather": MessageClass.GATHER, "reduce": MessageClass.REDUCE}
_KINDS = tuple(_CLASSES)


class TierLinks:
    """One rank's collectives over one tier, on a separate lane. Every rank must construct it at the same point."""

    def __init__(
        self, cluster: Cluster, tier: int, rank: int, device: torch.device, timeout: timedelta, pacer: Pace
    ) -> None:
        name = cluster.tiers[tier].name
        # All other tiers hold pipeline ranks, so no data collective crosses them.
        alone = {each.name: {"pipeline": each.size} for each in cluster.tiers if each.name != name}
        plan = Plan(params=name, grads=name, optimizer=name, mapping=alone)
        self.name, self.degree, self._tier = name, cluster.tiers[tier].size, tier
        self._layout = Layout.of(cluster, plan)
        self._coordinates = self._layout.coordinates(rank)
        self._device, meter, self._ledger = device, Meter(), Ledger()
        self._plan = plan
        groups = TierGroups([self._transfer(kind, self.degree) for kind in _KINDS], rank, timeout)
        self._collectives = Collectives(groups, self._layout, plan, self._ledger, meter, device, pacer)
        self._origin = Origin("probe", device, meter)
        self._lane = make_lane(device)

    def call(self, kind: str, whole_bytes: int) -> Work:
        """A function that gathers or reduces `whole_bytes` of the group and waits for the result."""
        submit = self.start(kind, whole_bytes)
        return lambda: submit()()

    def start(self, kind: str, whole_bytes: int) -> Callable[[], Callable[[], None]]:
        """A function that submits the collective to the lane and returns its wait.

        The result of a reduction is added to the shard, as in a step.
        """
        full = torch.zeros(whole_bytes // _ELEMENT_BYTES, device=self._device)

        def piece(tier: int) -> Tensor:
            return full[self._layout.slice(tier, self._coordinates, full.numel())]

        shard = torch.zeros_like(piece(self._tier))
        transfer = self._transfer(kind, full.numel())

        def gather() -> None:
            self._collectives.gather(transfer, piece, self._origin)

        def reduce() -> None:
            shard.add_(self._collectives.reduce(transfer, full, self._origin))

        work = {"gather": gather, "reduce": reduce}[kind]
        return lambda: self._lane.submit(work).wait

    def _transfer(self, kind: str, numel: int) -> Transfer:
        return flat_transfer(_CLASSES[kind], self._tier, self._layout, self._plan, numel)

    def sent_bytes(self, whole_bytes: int) -> float:
        """Bytes that one rank sends of `whole_bytes`."""
        return whole_bytes * (self.degree - 1) / self.degree

    @property
    def counted_bytes(self) -> int:
        return sum(self._ledger.total().values())

    def close(self) -> None:
        """Stop the lane; the world keeps the groups."""
        self._lane.close()


def measure_tier(
    watch: Stopwatch, links: TierLinks, compute: Work, budget_s: float, overlap_budget_s: float, say: Say
) -> TierSamples:
    """Time gathers and reductions over growing sizes, a small gather between compute, and gathers during compute.

    Gathers during compute have a separate budget, `overlap_budget_s`; `say` is called before each part.
    """
    say(f"messages on tier {links.name}")
    each_s = budget_s / (len(_KINDS) * _NUM_SIZES + 4)
    first_s = watch.seconds(links.call("gather", aligned(FIRST_BYTES, links.degree)), each_s, agreed=True)
    largest = largest_bytes(links.degree, each_s / first_s, LARGEST_BYTES[watch.device.type])
    messages = []
    for size in message_sizes(largest, links.degree, _NUM_SIZES):
        # A rate-limited link passes a burst at once, so over a slow link small messages are repeated beyond it.
        number = max(1, _DRAINING * FIRST_BYTES // size) if first_s > each_s else 1
        for kind in _KINDS:
            seconds = watch.seconds(repeated(links.call(kind, size), number), each_s, agreed=True) / number
            messages.append(
                LinkSample(kind=kind, degree=links.degree, sent_bytes=links.sent_bytes(size), seconds=seconds)
            )
    skew_s = _skew_s(watch, links, compute, each_s)
    say(f"messages on tier {links.name} during computation")
    overlap = measure_overlap(watch, links, compute, overlap_budget_s)
    concurrent = measure_concurrent(watch, links, products(watch.device), overlap_budget_s / 5)
    return TierSamples(tier=links.name, messages=tuple(messages), skew_s=skew_s, overlap=overlap, concurrent=concurrent)


def repeated(work: Work, number: int) -> Work:
    """A function that calls `work` `number` times."""

    def several() -> None:
        for _ in range(number):
            work()

    return several


def largest_bytes(degree: int, calls: float, most: int) -> float:
    """Bytes held by a whole group in the largest message, if `calls` calls of the first size fit the budget of a size.

    The message can be repeated within its budget, but has at least 1 MiB a rank; on a link too slow for that, at least
    64 KiB a rank and 256 KiB in total.
    """
    repeats = FIRST_BYTES * calls / _CALLS_A_LOOP / 4
    least = min(degree << 20, max(FIRST_BYTES, degree << 16) * max(1.0, calls))
    return max(least, min(repeats, most))


def measure_overlap(watch: Stopwatch, links: TierLinks, compute: Work, budget_s: float) -> Overlap:
    """Time compute alone, messages alone that take about half as long, and both at once."""
    size = aligned(OVERLAP_BYTES[watch.device.type], links.degree)
    one = links.call("gather", size)
    each_s = budget_s / 5
    message_s, compute_s = watch.seconds(one, each_s, agreed=True), watch.seconds(compute, each_s, agreed=True)
    # Repeat the shorter one, so that the messages take half as long as the compute.
    num_messages = max(1, round(compute_s / message_s / 2))
    num_passes = max(1, round(2 * message_s / compute_s))
    start = links.start("gather", size)

    def messages() -> list[Callable[[], None]]:
        return [start() for _ in range(num_messages)]

    def only_messages() -> None:
        for wait in messages():
            wait()

    def only_compute() -> None:
        for _ in range(num_passes):
            compute()

    def both() -> None:
        waits = messages()
        only_compute()
        for wait in waits:
            wait()

    # Interleaved, so that a lasting disturbance affects all three.
    rounds = [
        [watch.seconds(work, each_s / _ROUNDS, agreed=True) for work in (only_compute, only_messages, both)]
        for _ in range(_ROUNDS)
    ]
    compute_s, message_s, together_s = (statistics.median(column) for column in zip(*rounds, strict=True))
    return Overlap(
        compute_s=compute_s, message_s=message_s, together_s=together_s, num_messages=num_messages, degree=links.degree
    )


def measure_concurrent(watch: Stopwatch, links: TierLinks, work: Work, budget_s: float) -> Concurrent:
    """Time `work` alone, and during all-reduces (a reduction, then a gather) that outlast it."""
    size = aligned(OVERLAP_BYTES[watch.device.type], links.degree)
    parts = [links.start(kind, size) for kind in ("reduce", "gather")]

    def all_reduce() -> None:
        for wait in [start() for start in parts]:
            wait()

    message_s, once_s = (watch.seconds(each, budget_s / 5, agreed=True) for each in (all_reduce, work))
    each_s = budget_s / 5 / (1 + _ROUNDS)
    num_calls = max(1, round(each_s / once_s))
    num_messages = max(1, math.ceil(_OUTLAST * num_calls * once_s / message_s))

    def none() -> list[Callable[[], None]]:
        return []

    def messages() -> list[Callable[[], None]]:
        return [start() for _ in range(num_messages) for start in parts]

    alone_s, concurrent_s = (watch.concurrent(work, num_calls, start) for start in (none, messages))
    return Concurrent(alone_s=alone_s, concurrent_s=concurrent_s)


def products(device: torch.device) -> Work:
    """A function that multiplies two square matrices, as layers do most of the time."""
    size, dtype = _PRODUCT[device.type], DTYPES[TRAINS_IN[device.type]]
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return partial(torch.mm, left, right)


def _skew_s(watch: Stopwatch, links: TierLinks, compute: Work, each_s: float) -> float:
    # A small gather between compute costs more than one back to back: ranks arrive at different moments.
    gather = links.call("gather", aligned(_SKEW_BYTES, links.degree))

    def alternating() -> None:
        compute()
        gather()

    apart_s = watch.seconds(gather, each_s, agreed=True) + watch.seconds(compute, each_s, agreed=True)
    together_s = watch.seconds(alternating, each_s, agreed=True)
    return max(0.0, together_s - apart_s) / (links.degree - 1)


def aligned(num_bytes: int, degree: int) -> int:
    unit = degree * 64
    return max(1, num_bytes // unit) * unit

"""Seconds of work that all ranks do at once.

Where ranks share cores, the scheduler decides how long a single call takes. So each figure is the mean of a loop, the
median of several loops, and then the mean over ranks, which start each loop together. A collective needs the same
number of calls on every member, so ranks agree on one, and takes as long as on the slowest. Compute does not: each rank
makes as many calls as the time allows, so that no rank is idle while others still measure.
"""

import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from terrace.accelerator import has_streams
from terrace.comm.process_group import barrier
from terrace.runtime.clock import timed_event, wait_for

Work = Callable[[], object]
Wait = Callable[[], object]

_REPEATS = 3
_MOST_CALLS = 2000


class Stopwatch:
    """Timer across all ranks of the world; every rank must make the same calls in the same order."""

    def __init__(self, world_size: int, device: torch.device) -> None:
        self.world_size = world_size
        self.device = device

    def seconds(self, work: Work, budget_s: float, *, agreed: bool = False) -> float:
        """Seconds of one call, measured in about `budget_s` including warm-up; the same value on every rank.

        `agreed`: every rank makes the same number of calls, as collectives require, and the slowest counts: ranks of a
        link are served unevenly, and a step waits for the last of them. Makes at least one call per loop, however long
        it takes; agreed calls that exceed the budget are made twice, and the second counts.
        """
        loop_s = budget_s / (_REPEATS + 1)
        once_s = self._once(work)
        if agreed and self.largest(once_s) > budget_s:  # a slow link, whose bytes take these seconds each time
            return self.largest(self._loop(work, loop_s, 1))
        once_s = self._once(work)
        # On a GPU the host only enqueues: the number of calls must be fixed before the loop.
        calls = None
        if agreed or has_streams(self.device):
            slowest_s = self.largest(once_s)
            calls = min(_MOST_CALLS, max(1, round(loop_s / slowest_s)))
        taken_s = statistics.median(self._loop(work, loop_s, calls) for _ in range(_REPEATS))
        return self.largest(taken_s) if agreed else self.mean(taken_s)

    def host_seconds(self, work: Work, num_calls: int = 20) -> float:
        """Seconds that one call keeps the host busy, without waiting for the device."""
        work()
        self._together()
        begin_s = time.perf_counter()
        for _ in range(num_calls):
            work()
        taken_s = time.perf_counter() - begin_s
        wait_for(self.device)
        return self.mean(taken_s / num_calls)

    def both_ways(self, forward: Callable[[], Tensor], budget_s: float) -> tuple[float, float]:
        """Seconds of `forward`, and of the backward of its result."""
        # Backward cannot run alone: it is timed with its forward, which is then subtracted.
        gradient = torch.ones_like(forward())

        def both() -> None:
            torch.autograd.backward(forward(), gradient)

        forward_s, both_s = self.seconds(forward, budget_s / 2), self.seconds(both, budget_s)
        return forward_s, max(both_s - forward_s, forward_s / 10)  # noise can hide a short backward, not make it vanish

    def host_loop_s(self, work: Work, num_calls: int) -> float:
        """Mean seconds of `num_calls` calls on this rank alone, by the host's clock."""
        begin_s = time.perf_counter()
        for _ in range(num_calls):
            work()
        wait_for(self.device)
        return (time.perf_counter() - begin_s) / num_calls

    def concurrent(self, work: Work, num_calls: int, start: Callable[[], Sequence[Wait]]) -> float:
        """Seconds of one of `num_calls` calls during the work submitted by `start`, which returns its waits.

        The waits do not count. Every rank must call this, and the slowest counts.
        """
        taken_s = []
        for _ in range(1 + _REPEATS):
            self._together()
            waits = start()
            taken_s.append(self._timed(work, num_calls))
            for wait in waits:
                wait()
            wait_for(self.device)
        return self.largest(statistics.median(taken_s[1:]))

    def largest(self, value: float) -> float:
        """Maximum over all ranks."""
        return self._over_ranks(value, dist.ReduceOp.MAX)

    def each(self, value: float) -> tuple[float, ...]:
        """The values of all ranks."""
        found = torch.zeros(self.world_size, dtype=torch.float64, device=self.device)
        own = torch.tensor([value], dtype=torch.float64, device=self.device)
        if self.world_size == 1:
            return (value,)
        dist.all_gather_into_tensor(found, own)
        return tuple(found.tolist())

    def mean(self, value: float) -> float:
        """Mean over all ranks."""
        return self._over_ranks(value, dist.ReduceOp.SUM) / self.world_size

    def _loop(self, work: Work, loop_s: float, calls: int | None) -> float:
        self._together()
        if calls is not None:
            return self._timed(work, calls)
        assert not has_streams(self.device), "on a device the calls are counted before"
        begin_s, done = time.perf_counter(), 0
        while done < 1 or time.perf_counter() - begin_s < loop_s:
            work()
            done += 1
        return (time.perf_counter() - begin_s) / done

    def _timed(self, work: Work, calls: int) -> float:
        if has_streams(self.device):
            return self._on_device(work, calls)
        begin_s = time.perf_counter()
        for _ in range(calls):
            work()
        return (time.perf_counter() - begin_s) / calls

    def _on_device(self, work: Work, calls: int) -> float:
        begin = timed_event(self.device)
        for _ in range(calls):
            work()
        end = timed_event(self.device)
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / calls

    def _once(self, work: Work) -> float:
        begin_s = time.perf_counter()
        work()
        wait_for(self.device)
        return time.perf_counter() - begin_s

    def _together(self) -> None:
        wait_for(self.device)
        if self.world_size > 1:
            barrier()
            wait_for(self.device)  # with nccl a barrier is work on the device

    def _over_ranks(self, value: float, op: dist.ReduceOp.RedOpType) -> float:
        if self.world_size == 1:
            return value
        tensor = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=op)
        return float(tensor.item())

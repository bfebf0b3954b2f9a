"""Bounds along the critical paths of orders, before ranks, context forms and divisions are chosen.

A chain of dependent tasks is a lower bound on a pipeline for any seconds of its tasks (terrace.simulate.timeline). So
one critical path of each orders, found with the first seconds queried, bounds all pipelines of these orders; with the
minimum seconds over many shapes, it bounds all of them at once. Closed forms (terrace.planner.spans) model split
backwards less precisely: they are up to a third lower.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from terrace.plan.stage import Pass
from terrace.planner.parts import BlockWorks, Runs, Split, Work, work_of_runs
from terrace.planner.stages import last_layers, pipeline, share_before
from terrace.program.schedules.seconds import TaskSeconds
from terrace.simulate.timeline import play

OrdersKey = tuple[str, int, int, int, int]  # schedule, stages, chunks, micro-batches, unit


class Path(NamedTuple):
    """Lower bound in seconds; `hiding`: number of layers whose forwards, or backwards, it counts, whichever is
    smaller.
    """

    span_s: float
    hiding: float


class _Chain(NamedTuple):
    # Tasks by pass and virtual stage, messages that follow them or are queued, and tasks that send one.
    tasks: tuple[tuple[Pass, int, int], ...]
    num_messages: int
    num_sends: int


class _Counts(NamedTuple):
    # Passes along a chain: of layers, of the first virtual stage's look-ups and of the last one's logits.
    layers: Work
    before: Work
    after: Work


class Paths:
    """The critical paths of one task's pipelines."""

    def __init__(self, split: Split) -> None:
        self.split, self.num_layers = split, len(split.inner)
        self._chains: dict[OrdersKey, _Chain] = {}
        self._counts: dict[tuple[OrdersKey, int], _Counts] = {}

    def least(
        self, key: OrdersKey, works: BlockWorks, dearest_layers: float | None, edge_s: float, send_s: float
    ) -> Path:
        """The bound for all splits up to that of logits of `dearest_layers`, as in `Spans.each`.

        Where shapes or forms differ, weight gradients count nothing: the minimum backward may have more of them than
        another. Raises `PlanError` for numbers that the schedule cannot run.
        """
        _, stages, chunks, _, _ = key
        num_virtual = stages * chunks
        if self.split.alike is None:
            if dearest_layers is not None:
                return Path(0.0, 0.0)
            contents = self.split.contents(self.split.counts(works.each, num_virtual))
            return Path(self._along_s(key, [work_of_runs(works.each, runs) for runs in contents], edge_s, send_s), 0.0)
        sizes, ends = (self.num_layers, num_virtual), self.split.ends
        first = last = last_layers(*sizes, works.logits_layers, ends)
        if dearest_layers is not None:
            last = last_layers(*sizes, dearest_layers, ends)
        found = [
            self._of_split(key, works.each, each, edge_s, send_s, dearest_layers is None)
            for each in range(first, last + 1)
        ]
        return Path(min(path.span_s for path in found), min(path.hiding for path in found))

    def _of_split(
        self, key: OrdersKey, works: Sequence[Work], last: int, edge_s: float, send_s: float, is_one: bool
    ) -> Path:
        counts = self._counts.get((key, last))
        if counts is None:
            contents = self.split.contents(share_before(self.num_layers, key[1] * key[2], last))
            chain = self._chain(key, [work_of_runs(works, runs) for runs in contents], edge_s, send_s)
            counts = self._counts[key, last] = self._counted(chain, contents)
        chain = self._chains[key]
        before, after = work_of_runs(works, self.split.before), work_of_runs(works, self.split.after)
        span_s = chain.num_messages * edge_s + chain.num_sends * send_s
        for own, times in ((works[self.split.layer], counts.layers), (before, counts.before), (after, counts.after)):
            span_s += times[0] * own[0] + times[1] * own[1]
            if is_one or times[2] < 0:
                span_s += times[2] * own[2]
        return Path(span_s, min(counts.layers[:2]))

    def _counted(self, chain: _Chain, contents: Sequence[Runs]) -> _Counts:
        inner = [self.split.num_inner(runs) for runs in contents]
        found = [[0.0] * 3 for _ in range(3)]  # layers, look-ups, logits: forwards, backwards, weight gradients
        for pass_, virtual, times in chain.tasks:
            each = ((0, inner[virtual]), (1, virtual == 0), (2, virtual == len(contents) - 1))
            for what, blocks in each:
                number = times * blocks
                if pass_ is Pass.FORWARD:
                    found[what][0] += number
                elif pass_ is Pass.BACKWARD_WEIGHT:
                    found[what][2] += number
                else:
                    found[what][1] += number
                    # The first half of a backward has no weight gradients.
                    found[what][2] -= number if pass_ is Pass.BACKWARD_INPUT else 0
        layers, before, after = ((each[0], each[1], each[2]) for each in found)
        return _Counts(layers, before, after)

    def _along_s(self, key: OrdersKey, virtual: Sequence[Work], edge_s: float, send_s: float) -> float:
        chain = self._chain(key, virtual, edge_s, send_s)
        span_s = chain.num_messages * edge_s + chain.num_sends * send_s
        for pass_, number, times in chain.tasks:
            forward_s, backward_s, weight_s = virtual[number]
            span_s += times * (forward_s, backward_s, backward_s - weight_s, weight_s)[pass_]
        return span_s

    def _chain(self, key: OrdersKey, virtual: Sequence[Work], edge_s: float, send_s: float) -> _Chain:
        found = self._chains.get(key)
        if found is None:
            schedule, stages, chunks, micros, unit = key
            orders, _ = pipeline(schedule, stages, chunks, micros, unit)
            holders, last = orders.holders(), len(virtual) - 1
            # Neighbouring chunks on one stage, as at the bottom of a V, exchange no message.
            sends = [number < last and holders[number][0] != holders[number + 1][0] for number in range(last + 1)]
            backs = [False, *sends[:-1]]
            forward_s, backward_s, weight_s = zip(*virtual, strict=True)
            send_back_s = [send_s * each for each in backs]
            seconds = TaskSeconds(
                forward_s=tuple(own + send_s * each for own, each in zip(forward_s, sends, strict=True)),
                backward_s=tuple(map(sum, zip(backward_s, send_back_s, strict=True))),
                input_s=tuple(work[1] - work[2] + more for work, more in zip(virtual, send_back_s, strict=True)),
                weight_s=weight_s,
                edge_s=(edge_s,) * last,
            )
            path = play(orders, seconds).critical_path()
            tasks = Counter((step.task.pass_, orders.placement[step.stage][step.task.chunk]) for step in path)
            found = self._chains[key] = _Chain(
                tuple((Pass(pass_), number, times) for (pass_, number), times in tasks.items()),
                sum(step.messages for step in path),
                sum(times * _sends(Pass(pass_), number, sends, backs) for (pass_, number), times in tasks.items()),
            )
        return found


def _sends(pass_: Pass, number: int, onward: Sequence[bool], back: Sequence[bool]) -> bool:
    if pass_ is Pass.BACKWARD_WEIGHT:
        return False
    return onward[number] if pass_ is Pass.FORWARD else back[number]

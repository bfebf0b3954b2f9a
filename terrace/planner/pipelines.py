"""Pipelines for ranking: blocks and order of each stage, and the seconds of its tasks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from terrace.plan.mesh import Mesh
from terrace.plan.recompute import WHOLE
from terrace.planner.operations import operations_s
from terrace.planner.parts import Needs, Part, Work, parts_of, work_of_runs
from terrace.planner.stages import Trait, has_halves, pipeline
from terrace.program.schedules.counts import Waiting, most_due
from terrace.program.schedules.orders import Orders
from terrace.program.schedules.seconds import TaskSeconds
from terrace.simulate.timeline import Timeline, play

if TYPE_CHECKING:
    from terrace.planner.estimate import Estimator


@dataclass(frozen=True)
class Pipeline:
    """Orders, blocks of each stage, `works[stage][chunk]` per micro-batch, and `edge_s` of a message between stages.

    `waiting[stage][chunk]`: peak micro-batches in flight. A task that sends to another stage is longer by `send_s`, the
    slow-down of compute by the message.
    """

    orders: Orders
    waiting: Waiting
    parts: tuple[Part, ...]
    works: tuple[tuple[Work, ...], ...]
    edge_s: float
    send_s: float = 0.0

    def seconds(self, stretch: Sequence[float]) -> TaskSeconds:
        """Seconds of each task, with stage r slowed by the factor `stretch[r]`."""
        found: list[Work] = [(0.0, 0.0, 0.0)] * self.orders.num_virtual
        for row, works, factor in zip(self.orders.placement, self.works, stretch, strict=True):
            for virtual, (forward_s, backward_s, weight_s) in zip(row, works, strict=True):
                found[virtual] = (factor * forward_s, factor * backward_s, factor * weight_s)
        onward, back = self.sends_s
        return TaskSeconds(
            forward_s=tuple(work[0] + send_s for work, send_s in zip(found, onward, strict=True)),
            backward_s=tuple(work[1] + send_s for work, send_s in zip(found, back, strict=True)),
            input_s=tuple(work[1] - work[2] + send_s for work, send_s in zip(found, back, strict=True)),
            weight_s=tuple(work[2] for work in found),
            edge_s=(self.edge_s,) * (self.orders.num_virtual - 1),
        )

    @cached_property
    def sends_s(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Seconds by which sending delays a forward and a backward, per virtual stage."""
        holders, num_virtual = self.orders.holders(), self.orders.num_virtual
        # Neighbouring chunks on one stage, as at the bottom of a V, exchange no message.
        between = [self.send_s * (holders[k][0] != holders[k + 1][0]) for k in range(num_virtual - 1)]
        return (*between, 0.0), (0.0, *between)

    @cached_property
    def timeline(self) -> Timeline:
        """The orders played with compute seconds only."""
        return play(self.orders, self.seconds([1.0] * self.orders.num_stages))

    @cached_property
    def span_s(self) -> float:
        """Makespan of the compute."""
        return self.timeline.makespan_s

    @cached_property
    def stages_s(self) -> tuple[float, ...]:
        """Compute seconds per stage and micro-batch."""
        return tuple(math.fsum(work[0] + work[1] for work in works) for works in self.works)

    @cached_property
    def neediest(self) -> tuple[Needs, ...]:
        """Candidates for the stage with the most memory."""
        return neediest(self.parts, self.waiting, most_due(self.orders))


def neediest(parts: Sequence[Part], waiting: Waiting, dues: Waiting) -> tuple[Needs, ...]:
    """Candidates for the stage with the most memory."""
    fullest: dict[tuple[Part, tuple[int, ...]], tuple[int, Needs]] = {}
    found: dict[Needs, None] = {}
    for part, waits, due in zip(parts, waiting, dues, strict=True):
        # Among stages with the same blocks, all of one kind, the one with the most activations dominates.
        if len(part.runs) == 1:
            kept = sum(count * each for runs, each in zip(part.chunks, waits, strict=True) for _, count in runs)
            if (part, due) not in fullest or kept > fullest[part, due][0]:
                fullest[part, due] = (kept, Needs(part, waits, due))
        else:
            found[Needs(part, waits, due)] = None
    return (*found, *(needs for _, needs in fullest.values()))


def build_pipeline(
    estimator: "Estimator",
    mesh: Mesh,
    micro_batch: int,
    recompute: int,
    schedule: str,
    chunks: int,
    num_micros: int,
    unit: int = 1,
) -> Pipeline:
    """The pipeline of a mesh and a schedule. Raises `PlanError` for numbers that the schedule cannot run."""
    orders, waiting = pipeline(schedule, mesh.total("pipeline"), chunks, num_micros, unit)
    accumulate, halves = estimator.accumulates(mesh, micro_batch), has_halves(schedule, mesh)
    alone = [
        block_work(estimator, kind, (mesh.inside,), micro_batch, recompute, accumulate, halves=halves)
        for kind in range(len(estimator.specs))
    ]
    split = estimator.split
    contents = split.contents(split.counts(alone, orders.num_virtual))
    # A deep pipeline has few distinct virtual stages; each is summed once.
    known = {content: work_of_runs(alone, content) for content in set(contents)}
    works = [tuple(known[contents[virtual]] for virtual in row) for row in orders.placement]
    return Pipeline(
        orders=orders,
        waiting=waiting,
        parts=parts_of(contents, orders.placement),
        works=tuple(works),
        edge_s=estimator.boundary_s(mesh, micro_batch),
        send_s=estimator.sending_s(mesh, micro_batch),
    )


def block_work(
    estimator: "Estimator",
    kind: int,
    forms: Sequence[Mesh],
    micro_batch: int,
    recompute: int,
    accumulate: bool,
    *,
    context: bool = True,
    exact: bool = True,
    halves: bool = False,
) -> Work:
    """Minimum seconds of a block on a micro-batch over `forms`; look-ups and logits are not recomputed.

    `context`, `exact` and `halves` as in `Estimator.least_block`.
    """
    block = estimator.least_block(kind, forms, micro_batch, accumulate, context=context, exact=exact, halves=halves)
    recompute_s = 0.0
    # `recompute` in a plan does not name look-ups and logits.
    if recompute and not estimator.specs[kind].at_an_end:
        parts = estimator.task.recomputations.values[recompute].parts
        if parts == WHOLE:
            recompute_s = block.recompute_s
        else:
            # Attention over several ranks is not recomputed by itself; other operations depend only on tokens.
            work = estimator.work(forms[0], micro_batch)
            recompute_s = operations_s(estimator.task.cluster.device, estimator.specs[kind], work, parts)
    return block.forward_s, block.backward_s + recompute_s, block.weight_s


def least_span_s(virtual: Sequence[Work], num_stages: int, num_micros: int, edge_s: float, trait: Trait) -> float:
    """Lower bound in seconds on a pipeline of virtual stages of any work (terrace.planner.bound)."""
    chunks = len(virtual) // num_stages
    # A split schedule may delay the weight gradient beyond the path to the previous stage.
    paths_s = [work[0] + work[1] - (work[2] if trait.split else 0.0) for work in virtual]
    forward_s, backward_s = (min(work[part] for work in virtual) for part in range(2))
    hop_s = forward_s + edge_s + (0.0 if trait.split else backward_s + edge_s)
    wholes_s = [num_micros * (work[0] + work[1]) for work in virtual]
    mean_s, busiest_s, last_s = sum(wholes_s) / num_stages, 0.0, chunks * min(wholes_s)
    # Only the looped placement determines here which virtual stages share a stage.
    if trait.looped:
        each_s = [sum(wholes_s[stage::num_stages]) for stage in range(num_stages)]
        last_s, busiest_s = each_s[-1], max(each_s)
    # A micro-batch passes all virtual stages and comes back; the last of them does so with each.
    hops = len(virtual) - 1 - (0 if trait.looped else chunks - 1)
    path_s = sum(paths_s[:-1]) + 2 * hops * edge_s + num_micros * paths_s[-1]
    # A stage sends one message at a time, and some stage sends at least the mean number.
    sent_s = 2 * num_micros * hops / num_stages * edge_s
    return max(mean_s + (num_stages - 1) / 2 * hop_s, last_s + (num_stages - 1) * hop_s, busiest_s, path_s, sent_s)

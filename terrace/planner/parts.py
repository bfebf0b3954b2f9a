"""Blocks of pipeline stages, as runs of equal blocks, and the split that produces them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, groupby, pairwise
from typing import NamedTuple

from terrace.plan.kinds import runs_of
from terrace.planner.stages import share_differing, share_layers
from terrace.planner.task import Task
from terrace.program.schedules.orders import Placement, Waiting

Runs = tuple[tuple[int, int], ...]  # (kind, number of blocks) of runs of equal blocks, in model order
Counts = tuple[tuple[int, float], ...]  # (kind, number of blocks), in model order
Work = tuple[float, float, float]  # seconds of a forward, of a backward, and of the part of it that can be put off
_UNIT_S = 1e-12  # in which differing blocks are shared, as in terrace.simulate.step


@dataclass(frozen=True)
class Part:
    """The blocks of one stage, by chunk in model order."""

    chunks: tuple[Runs, ...]

    @cached_property
    def runs(self) -> Runs:
        """The blocks of all chunks."""
        joined = groupby(chain(*self.chunks), key=lambda run: run[0])
        return tuple((kind, sum(count for _, count in runs)) for kind, runs in joined)

    @cached_property
    def kinds(self) -> list[int]:
        """Kind of each block, in model order."""
        return kinds_of(self.runs)


class Needs(NamedTuple):
    """A stage, with its micro-batches in flight and those between the halves of their backward, by chunk."""

    part: Part
    waiting: tuple[int, ...]
    due: tuple[int, ...] = ()


class Split:
    """Distribution of a model's blocks over virtual stages.

    Look-ups before all other blocks are on the first one, logits after all others on the last one.
    """

    def __init__(self, task: Task) -> None:
        order, inner = task.kinds.order, task.inner
        self.order, self.inner = order, inner
        self.before, self.after = runs_of(order[: inner.start]), runs_of(order[inner.stop :])
        between = set(order[inner.start : inner.stop])
        # Kind of the blocks between look-ups and logits, if they are equal.
        self.alike = next(iter(between)) if len(between) == 1 else None
        self.ends = task.ends  # virtual stages that may have look-ups or logits alone
        self.at_end = tuple(spec.at_an_end for spec in task.kinds.specs)

    @property
    def layer(self) -> int:
        """Kind of the equal blocks between look-ups and logits."""
        assert self.alike is not None, "only equal layers are told by their number"
        return self.alike

    def whole(self) -> Part:
        """All blocks on one stage."""
        return Part((runs_of(self.order),))

    def counts(self, works: Sequence[Work], num_virtual: int) -> tuple[int, ...]:
        """Blocks of each virtual stage between look-ups and logits, from the seconds of each kind.

        Raises `PlanError` if there are too few blocks.
        """
        if self.alike is not None:
            return share_layers(len(self.inner), num_virtual, self.logits_in_layers(works), self.ends)
        seconds = [work[0] + work[1] for work in works]
        costs = [seconds[self.order[index]] for index in self.inner]
        first, last = (sum(count * seconds[kind] for kind, count in runs) for runs in (self.before, self.after))
        costs_in_units = tuple(round(cost / _UNIT_S) for cost in (first, *costs, last))
        return share_differing(costs_in_units, num_virtual, self.ends)

    def logits_in_layers(self, works: Sequence[Work]) -> float:
        """Cost of the blocks after the equal ones, in units of one of these."""
        layer = works[self.layer]
        return sum(count * (works[kind][0] + works[kind][1]) for kind, count in self.after) / (layer[0] + layer[1])

    def contents(self, counts: Sequence[int]) -> tuple[Runs, ...]:
        """Blocks of each virtual stage, from its number of blocks between look-ups and logits."""
        if self.alike is None:
            sizes = list(counts)
            sizes[0] += self.inner.start
            sizes[-1] += len(self.order) - self.inner.stop
            return self.cut(sizes)
        last = len(counts) - 1
        return tuple(self.equal(count, virtual == 0, virtual == last) for virtual, count in enumerate(counts))

    def equal(self, count: int, is_first: bool, is_last: bool) -> Runs:
        """`count` equal blocks, with the look-ups on the first virtual stage and the logits on the last."""
        between = ((self.layer, count),) if count else ()
        return (*(self.before if is_first else ()), *between, *(self.after if is_last else ()))

    def cut(self, stages: Sequence[int]) -> tuple[Runs, ...]:
        """Blocks of each virtual stage, from the number of all its blocks, as in a plan."""
        bounds = pairwise(accumulate(stages, initial=0))
        return tuple(runs_of(self.order[start:stop]) for start, stop in bounds)

    def num_inner(self, runs: Runs) -> int:
        """Number of blocks without look-ups and logits."""
        return sum(count for kind, count in runs if not self.at_end[kind])


def parts_of(contents: Sequence[Runs], placement: Placement) -> tuple[Part, ...]:
    """Blocks of each stage, from those of each virtual stage."""
    # The inner stages of a deep pipeline are mostly equal.
    known: dict[tuple[Runs, ...], Part] = {}
    found = []
    for row in placement:
        chunks = tuple([contents[virtual] for virtual in row])
        if chunks not in known:
            known[chunks] = Part(chunks)
        found.append(known[chunks])
    return tuple(found)


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


def kinds_of(runs: Runs) -> list[int]:
    return [kind for kind, count in runs for _ in range(count)]


def work_of_runs(works: Sequence[Work], runs: Runs) -> Work:
    forward_s = backward_s = weight_s = 0.0
    for kind, count in runs:  # a search asks for every stage and schedule
        forward, backward, weight = works[kind]
        forward_s, backward_s, weight_s = (
            forward_s + count * forward,
            backward_s + count * backward,
            weight_s + count * weight,
        )
    return forward_s, backward_s, weight_s

"""Seconds that the messages of states expose at least, before a placement is chosen.

A price (terrace.planner.price) counts for every placement what each block waits. A search asks for the least over
placements many times, and most of it depends on few numbers: for the blocks of a stage and the ranks that share them,
the sums over its blocks are the same under every schedule. What computing can hide of these is known once there is a
schedule, and before that at most the whole step.
"""

import math
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

from terrace.plan.mesh import Mesh
from terrace.planner.estimate import Estimator
from terrace.planner.messages import Line, StateMessages
from terrace.planner.numels import groups_of
from terrace.planner.parts import Counts
from terrace.planner.task import Placement


class Exposed(NamedTuple):
    """Seconds of the messages of a stage with one placement, and the bytes of its states on a rank.

    Nothing hides `start_s` and `end_s`, of the first block. Computing hides the rest of `starts_s` and `ends_s`, of all
    blocks, but for `late_start_s` and `late_end_s` (the latter only with whole backwards). `further_s` is neither.
    """

    placement: Placement
    state_bytes: float
    start_s: float
    end_s: float
    starts_s: float
    ends_s: float
    late_start_s: float
    late_end_s: float
    further_s: float
    unhidden_s: float  # part of the messages that nothing hides

    def least_s(self, forward_s: float, backward_s: float, *, halves: bool) -> float:
        """What is exposed at least, if computing hides `forward_s` and `backward_s`."""
        starts_s = max(self.start_s, self.starts_s - forward_s, self.late_start_s)
        ends_s = max(self.end_s, self.ends_s - backward_s, 0.0 if halves else self.late_end_s)
        return starts_s + ends_s + self.further_s


def least_exposed_s(among: Sequence[Exposed], forward_s: float, backward_s: float, *, halves: bool) -> float:
    """The least of `Exposed.least_s`, of some that are in the order of `Floors.of`."""
    least_s = math.inf
    for each in among:
        if each.unhidden_s >= least_s:
            break
        exposed_s = each.least_s(forward_s, backward_s, halves=halves)
        if exposed_s < least_s:
            least_s = exposed_s
    return least_s


_Size = tuple[float, float]  # messages, and their elements in total


def _seconds(size: _Size, line: Line) -> float:
    return size[0] * line.base_s + size[1] * line.each_s


class _Sums(NamedTuple):
    """What the blocks of a stage send of one group of elements (terrace.planner.numels).

    `gathered` also has what a visit gathers beside trained elements; `behind` are blocks that follow a mixture.
    """

    degrees: tuple[int, ...]
    trained: _Size
    gathered: _Size
    behind: _Size
    first_trained: _Size
    first_gathered: _Size


class Floors:
    """The least exposed seconds of one task's stages, cached."""

    def __init__(self, estimator: Estimator, messages: StateMessages, first: int) -> None:
        self.estimator, self.messages, self._first = estimator, messages, first
        self._stacked = [spec.has_stacks for spec in estimator.specs]
        self._known: dict[tuple[object, ...], tuple[Exposed, ...]] = {}

    def of(self, mesh: Mesh, placements: Sequence[Placement], counts: Counts) -> tuple[Exposed, ...]:
        """For each placement, of a first stage with `counts` of blocks; in ascending order of what nothing hides."""
        degrees = groups_of(mesh)
        key = degrees, mesh.inside_degrees[:2], mesh.stack_degrees, mesh.stack_tiers, counts
        found = self._known.get(key)
        if found is None:
            elements = self.estimator.numels.elements(mesh)
            held = [_sum(sizes, counts)[1] for sizes in (*elements.trained, *elements.frozen)]
            sums = [
                self._sums(group, trained, beside, counts)
                for group, trained, beside in zip(degrees, elements.trained, elements.beside, strict=True)
                if any(trained) or any(beside)
            ]
            each = [self._of(mesh, placement, held, sums) for placement in placements]
            found = self._known[key] = tuple(sorted(each, key=attrgetter("unhidden_s")))
        return found

    def _sums(self, degrees: tuple[int, ...], trained: Sequence[int], beside: Sequence[int], counts: Counts) -> _Sums:
        # The blocks behind a mixture are all but one of a stage.
        behind = [(kind, max(0.0, count - 1)) for kind, count in counts if self._stacked[kind]]
        first = ((self._first, 1.0),)
        return _Sums(
            degrees,
            _sum(trained, counts),
            _sum(trained, counts, beside),
            _sum(trained, behind),
            _sum(trained, first),
            _sum(trained, first, beside),
        )

    def _of(self, mesh: Mesh, placement: Placement, held: Sequence[float], sums: Sequence[_Sums]) -> Exposed:
        lanes, estimator = mesh.stack_tiers, self.estimator
        refresh_s = ends_s = slowed_s = late_start_s = late_end_s = 0.0
        first_refresh_s = first_gather_s = first_end_s = 0.0
        for degrees, trained, gathered, behind, first, first_gathered in sums:
            refresh, gather, reduce, sync, _, backward = self.messages.lines(degrees, placement).each
            # `slowed_s` holds for a step of one unit. Most placements send only some of these messages.
            if refresh.each_s:
                refreshed_s = _seconds(trained, refresh)
                refresh_s += refreshed_s
                slowed_s += refreshed_s * refresh.penalty
                first_refresh_s += _seconds(first, refresh)
                late_start_s += refreshed_s * (refresh.lane in lanes)
            if gather.each_s:
                slowed_s += _seconds(gathered, gather) * gather.penalty
                first_gather_s += _seconds(first_gathered, gather)
            if backward.each_s:
                slowed_s += _seconds(gathered, backward) * backward.penalty
            if reduce.each_s:
                slowed_s += _seconds(trained, reduce) * reduce.penalty
                first_end_s += _seconds(first, reduce)
                late_end_s += _seconds(behind, reduce) * (reduce.lane in lanes)
            if sync.each_s:
                synced_s = _seconds(trained, sync)
                ends_s += synced_s
                slowed_s += synced_s * sync.penalty
                first_end_s += _seconds(first, sync)
                late_end_s += _seconds(behind, sync) * (sync.lane in lanes)
        update_s = estimator.update_s(mesh, placement, held[:3])
        each_bytes = estimator.group_bytes(mesh, placement)
        start_s = max(update_s, first_refresh_s) + first_gather_s
        further_s = slowed_s + self.messages.lines(mesh.state, placement).control_s
        return Exposed(
            placement=placement,
            state_bytes=sum([numel * each for numel, each in zip(held, each_bytes, strict=True)]),
            start_s=start_s,
            end_s=first_end_s,
            starts_s=max(update_s, refresh_s),
            ends_s=ends_s,
            late_start_s=late_start_s,
            late_end_s=late_end_s,
            further_s=further_s,
            unhidden_s=max(start_s, late_start_s) + first_end_s + further_s,
        )


def _sum(sizes: Sequence[int], counts: Sequence[tuple[int, float]], more: Sequence[int] = ()) -> _Size:
    # With `more` elements of each kind, in messages of their own.
    messages = elements = 0.0
    for kind, count in counts:
        for each in (sizes, more) if more else (sizes,):
            if each[kind]:
                messages += count
                elements += count * each[kind]
    return messages, elements

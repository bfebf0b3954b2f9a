"""Seconds that the messages of states expose at least, before a placement is chosen.

A price (terrace.planner.price) counts for every placement what each block waits. A search asks for the least over
placements many times, and most of it depends on few numbers: for the blocks of a stage and the ranks that share them,
the sums over its blocks are the same under every schedule. What computing can hide of these is known once there is a
schedule, and before that at most the whole step.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from terrace.plan.mesh import Mesh
from terrace.planner.estimate import Estimator
from terrace.planner.messages import Sent, StateMessages
from terrace.planner.task import Placement

Counts = tuple[tuple[int, float], ...]  # (kind, number of blocks), in model order


class Exposed(NamedTuple):
    """Seconds of the messages of a stage with one placement.

    Nothing hides `start_s` and `end_s`, of the first block. Computing hides the rest of `starts_s` and `ends_s`, of all
    blocks, but for `late_start_s` and `late_end_s` (the latter only with whole backwards). `further_s` is neither.
    """

    placement: Placement
    bytes_each: tuple[float, float]  # of an element on a rank: of its own states, and of stacks
    start_s: float
    end_s: float
    starts_s: float
    ends_s: float
    late_start_s: float
    late_end_s: float
    further_s: float

    def unhidden_s(self) -> float:
        """What nothing hides."""
        return max(self.start_s, self.late_start_s) + self.end_s + self.further_s

    def least_s(self, forward_s: float, backward_s: float, *, halves: bool) -> float:
        """What is exposed at least, if computing hides `forward_s` and `backward_s`."""
        starts_s = max(self.start_s, self.starts_s - forward_s, self.late_start_s)
        ends_s = max(self.end_s, self.ends_s - backward_s, 0.0 if halves else self.late_end_s)
        return starts_s + ends_s + self.further_s


def least_exposed_s(among: Sequence[Exposed], forward_s: float, backward_s: float, *, halves: bool) -> float:
    """The least of `Exposed.least_s`, of some that are in the order of `Floors.of`."""
    least_s = math.inf
    for each in among:
        if each.unhidden_s() >= least_s:
            break
        least_s = min(least_s, each.least_s(forward_s, backward_s, halves=halves))
    return least_s


class Floors:
    """The least exposed seconds of one task's stages, cached."""

    def __init__(self, estimator: Estimator, messages: StateMessages, first: int) -> None:
        self.estimator, self.messages, self._first = estimator, messages, first
        self._known: dict[tuple[object, ...], tuple[Exposed, ...]] = {}

    def of(self, mesh: Mesh, placements: Sequence[Placement], counts: Counts) -> tuple[Exposed, ...]:
        """For each placement, of a first stage with `counts` of blocks; in ascending order of what nothing hides."""
        key = mesh.state, mesh.stack_state, mesh.inside_degrees[:2], mesh.stack_degrees, mesh.stack_tiers, counts
        found = self._known.get(key)
        if found is None:
            found = tuple(sorted([self._of(mesh, each, counts) for each in placements], key=Exposed.unhidden_s))
            self._known[key] = found
        return found

    def _of(self, mesh: Mesh, placement: Placement, counts: Counts) -> Exposed:
        lines, numels, lanes = self.messages.of(mesh, placement), self.messages.numels(mesh), mesh.stack_tiers
        estimator = self.estimator
        refresh_s = ends_s = slowed_s = late_start_s = late_end_s = owned = 0.0
        for kind, count in counts:
            sent = lines.of(numels.own[kind], numels.stacks[kind])
            refresh, _, reduce, sync = sent[:4]
            refresh_s += count * refresh.seconds
            ends_s += count * sync.seconds
            slowed_s += count * _slowed_s(sent)
            owned += count * numels.own[kind]
            if mesh.divides_stacks:
                late_start_s += count * refresh.seconds * (refresh.lane in lanes)
                # The blocks behind a mixture are all but one of a stage.
                behind = max(0.0, count - 1) * estimator.specs[kind].has_stacks
                late_end_s += behind * reduce.seconds * (reduce.lane in lanes)
                late_end_s += behind * sync.seconds * (sync.lane in lanes)
        refresh, gather, reduce, sync = lines.of(numels.own[self._first], numels.stacks[self._first])[:4]
        update_s = estimator.update_s(mesh.state, placement, round(owned))
        each = estimator.state_bytes(mesh.state, placement), estimator.state_bytes(mesh.stack_state, placement)
        return Exposed(
            placement=placement,
            bytes_each=each,
            start_s=max(update_s, refresh.seconds) + gather.seconds,
            end_s=reduce.seconds + sync.seconds,
            starts_s=max(update_s, refresh_s),
            ends_s=ends_s,
            late_start_s=late_start_s,
            late_end_s=late_end_s,
            further_s=slowed_s + lines.control_s,
        )


def _slowed_s(sent: Sequence[Sent]) -> float:
    # Of a step that is one unit.
    return sum([sent[number].slowed_s for number in (0, 1, 3)]) + (sent[2].slowed_s + sent[5].slowed_s)

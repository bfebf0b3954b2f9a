"""Seconds for which routed messages in a pipeline wait behind state messages on their lanes.

A stage that is priced alone (terrace.planner.evaluate) waits for routed messages as if their lanes were free. In a step
they are busy at two moments that no other stage's compute hides:

- the backwards of the last micro-batch. Gradients of a block are sent after its last backward, and the next dispatch on
  the same lane, that of the previous block, waits for REDUCE and SYNC. With V virtual stages of L layers this sums over
  the L - V pairs of neighbours on virtual stages, all of which the micro-batch passes (more pairs where an end has
  only look-ups or logits), or over the blocks of one stage, whose next pass begins with a dispatch too, if these are
  more. Split backwards send gradients after their last dispatch, so nothing waits. Where gradients are reduced after
  every micro-batch, REDUCE delays the next dispatch of a stage in every backward;
- the first forward of the first stage, or of the second one if the first virtual stage has only look-ups, whose time is
  negligible. The table of its first mixture waits for the REFRESH of all blocks of the stage, which are issued
  before it, not only for its own block's. Later stages get their first input later.

Under tensor rows a stage is priced with its routed messages on their lanes, so its price includes its own delays.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from terrace.plan.mesh import Mesh
from terrace.planner.parts import Part, Runs, kinds_of, parts_of
from terrace.planner.stages import possible_last, share_before, traits
from terrace.planner.task import Placement
from terrace.program.schedules.orders import looped, v_shaped

if TYPE_CHECKING:
    from terrace.planner.estimate import Estimator
    from terrace.planner.messages import MessagePrices

Kinds = tuple[tuple[int, int], ...]  # kinds of blocks, and how many of each


class Neighbours(NamedTuple):
    """Blocks after a mixture, whose gradients delay its last dispatch, on all virtual stages and on each stage.

    Also all blocks of the first stage that waits.
    """

    on_way: Kinds
    on_stages: tuple[Kinds, ...]
    first: Kinds


class LanePrices(NamedTuple):
    """Seconds by kind of block of REFRESH, the last gradients and other REDUCEs on a routed message's lane; else 0."""

    refresh_s: tuple[float, ...]
    last_s: tuple[float, ...]
    reduce_s: tuple[float, ...]


class Delay(NamedTuple):
    """Seconds added to a step: once, and in every pass but the last.

    `hides`: the waits in every pass may already be covered by reductions that an excess counts.
    """

    once_s: float
    each_s: float
    hides: bool

    def added_s(self, excess_s: float, num_micros: int) -> float:
        """An excess (terrace.planner.chains) plus the delay."""
        each_s = (num_micros - 1) * self.each_s
        return self.once_s + (max(excess_s, each_s) if self.hides else excess_s + each_s)


class Delays:
    """The delays of one task's candidates; blocks are identified by kind."""

    def __init__(self, estimator: "Estimator", prices: "MessagePrices") -> None:
        self._optimizer_s = estimator.task.cluster.device.kernels.optimizer_s
        self._prices, self._split = prices, estimator.split
        self._has_stacks = [spec.has_stacks for spec in estimator.specs]
        self._neighbours: dict[tuple[Part, ...], Neighbours] = {}
        self._least: dict[tuple[int, int, bool], list[Neighbours]] = {}
        self._priced: dict[tuple[Mesh, Placement], LanePrices] = {}

    def of(
        self, mesh: Mesh, schedule: str, prices: LanePrices, parts: tuple[Part, ...], *, of_stages: bool = False
    ) -> Delay:
        """The delay of a step whose stages hold `parts`.

        `of_stages`: include the delay of a single stage, for prices that include it. `mesh` divides stacks, and
        `prices` are
        for it.
        """
        return self._of(mesh, schedule, prices, self._found(parts), of_stages)

    def at_least(self, mesh: Mesh, schedule: str, chunks: int, prices: LanePrices, *, of_stages: bool = False) -> Delay:
        """Minimum of `of` over all splits of equal blocks and costs of the logits; requires `tells`."""
        key = mesh.total("pipeline"), chunks, traits()[schedule].folded
        found = self._least.get(key)
        if found is None:
            found = self._least[key] = self._least_of(*key)
        each = [self._of(mesh, schedule, prices, neighbours, of_stages) for neighbours in found]
        return Delay(min(one.once_s for one in each), min(one.each_s for one in each), each[0].hides)

    @property
    def tells(self) -> bool:
        """Whether a bound exists before the split: not if the blocks between look-ups and logits differ."""
        return self._split.alike is not None and self._has_stacks[self._split.alike]

    def prices(self, mesh: Mesh, placement: Placement) -> LanePrices:
        """Prices of the messages that routed messages may wait for, on a mesh that divides stacks."""
        found = self._priced.get((mesh, placement))
        if found is None:
            messages, lanes = self._prices.of_shape(mesh, placement), mesh.stack_tiers
            refresh, reduce, sync = (
                [each[kind] for kind in range(len(self._has_stacks))]
                for each in (messages.refresh, messages.reduce, messages.sync)
            )
            waits = [messages.refresh.lane in lanes, messages.reduce.lane in lanes, messages.sync.lane in lanes]
            # Seconds up to the last message that is on a lane of routed messages.
            last = [
                (one + other) if other and waits[2] else one * waits[1] for one, other in zip(reduce, sync, strict=True)
            ]
            found = self._priced[mesh, placement] = LanePrices(
                tuple([each * waits[0] for each in refresh]), tuple(last), tuple([each * waits[1] for each in reduce])
            )
        return found

    def _of(self, mesh: Mesh, schedule: str, prices: LanePrices, found: Neighbours, of_stages: bool) -> Delay:
        tensor, halves = mesh.total("tensor") > 1, traits()[schedule].split
        stage_s = max([_sum(kinds, prices.last_s) for kinds in found.on_stages])
        back_s = 0.0 if halves else _sum(found.on_way, prices.last_s)
        if tensor and not of_stages:
            return Delay(max(0.0, back_s - stage_s), 0.0, False)
        # The optimizer's constant is charged to the last block, while the earlier ones are refreshed.
        first_s = max(0.0, _sum(found.first, prices.refresh_s) - self._optimizer_s)
        # Under tensor rows a stage priced alone has whole backwards.
        if halves and not tensor:
            return Delay(first_s, 0.0, False)
        each_s = max([_sum(kinds, prices.reduce_s) for kinds in found.on_stages])
        return Delay(first_s + max(back_s, stage_s), each_s, tensor)

    def _least_of(self, stages: int, chunks: int, folded: bool) -> list[Neighbours]:
        split, num_layers, num_virtual = self._split, len(self._split.inner), stages * chunks
        placement = v_shaped(stages) if folded else looped(stages, chunks)
        return [
            self._found(parts_of(split.contents(share_before(num_layers, num_virtual, last)), placement))
            for last in possible_last(num_layers, num_virtual, split.ends)
        ]

    def _found(self, parts: tuple[Part, ...]) -> Neighbours:
        found = self._neighbours.get(parts)
        if found is None:
            on_way = Counter[int]()
            for part in parts:
                for runs in part.chunks:
                    on_way.update(self._behind(runs))
            on_stages = {tuple(sorted(Counter(self._behind(part.runs)).items())) for part in parts}
            first = Counter(parts[0 if self._has_inner(parts[0].chunks[0]) else 1].kinds)
            found = Neighbours(tuple(on_way.items()), tuple(on_stages), tuple(first.items()))
            self._neighbours[parts] = found
        return found

    def _has_inner(self, runs: Runs) -> bool:
        return self._split.num_inner(runs) > 0

    def _behind(self, runs: Runs) -> list[int]:
        return [behind for kind, behind in pairwise(kinds_of(runs)) if self._has_stacks[kind]]


def _sum(kinds: Kinds, each_s: Sequence[float]) -> float:
    total_s = 0.0
    for kind, times in kinds:
        total_s += times * each_s[kind]
    return total_s

"""Seconds of a block's data-parallel messages, by class and kind of block.

Prices are cached by the placements a message depends on: a reduction does not depend on the optimizer's tier.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from typing import NamedTuple

from terrace.model.spec import BlockSpec
from terrace.plan.layout import DEVICE
from terrace.plan.mesh import EXPERT_AXES, Mesh
from terrace.plan.slices import slice_blocks
from terrace.plan.stage import Stage, whole_stage
from terrace.planner.estimate import Estimator, data_cluster, flat_params
from terrace.planner.task import Placement
from terrace.program.instruction import Instruction, Op
from terrace.program.program import Program
from terrace.simulate.cost import Costs

Numels = tuple[int, ...]  # elements of a block of each kind on a rank


class LanePrice:
    """The lane of a message, and its seconds for a block of each kind; each is priced once it is asked for."""

    def __init__(self, instruction: Instruction, costs: Callable[[], Costs]) -> None:
        self._instruction, self._costs = instruction, costs
        self._seconds: dict[int, float] = {}

    @cached_property
    def lane(self) -> int:
        return self._costs().program.message(self._instruction).lane

    def __getitem__(self, kind: int) -> float:
        found = self._seconds.get(kind)
        if found is None:
            found = self._seconds[kind] = self._costs().collective_s(self._instruction._replace(block=kind))
        return found


class Holders(NamedTuple):
    """Ranks that hold the same slice of a block, elements of a block of each kind, and the same of its experts.

    `experts` factors the ranks for experts that they divide.
    """

    degrees: tuple[int, ...]
    numels: Numels
    stacks: Numels = ()
    experts: Mesh | None = None


class Messages(NamedTuple):
    """Data-parallel messages of a plan; `further` is the forward gather of every unit after the first."""

    refresh: LanePrice
    gather: LanePrice
    reduce: LanePrice
    sync: LanePrice
    further: LanePrice
    backward: LanePrice
    control: LanePrice


class MessagePrices:
    """Data-parallel messages of one task, cached."""

    def __init__(self, estimator: Estimator) -> None:
        self.estimator = estimator
        self._messages: dict[tuple[tuple[int, ...], Numels, Placement], Messages] = {}
        self._holders: dict[Mesh, Holders] = {}
        self._divided: dict[tuple[Holders, Placement], Messages] = {}
        self._lanes: dict[tuple[object, ...], LanePrice] = {}
        self._costs: dict[tuple[object, ...], Costs] = {}

    def messages(self, degrees: tuple[int, ...], numels: Numels, placement: Placement) -> Messages:
        """Messages among `degrees` data ranks, with `numels` elements in a block of each kind."""
        key = (degrees, numels, placement)
        found = self._messages.get(key)
        if found is None:
            found = self._messages[key] = self._found(Holders(degrees, numels), placement)
        return found

    def of_shape(self, mesh: Mesh, placement: Placement) -> Messages:
        """Messages of the blocks of a mesh (`Estimator.own_numels`), with the experts that its ranks divide."""
        numels = self.estimator.own_numels(mesh)
        if mesh.experts is None:
            return self.messages(mesh.state, numels, placement)
        holders = self._holders.get(mesh)
        if holders is None:
            experts = Mesh.build(len(mesh.degrees), **{axis: mesh.experts.group(axis) for axis in EXPERT_AXES})
            stacks = self.estimator.stack_numels(mesh)
            holders = self._holders[mesh] = Holders(mesh.state, numels, stacks, Mesh(experts.degrees, experts))
        key = (holders, placement)
        found = self._divided.get(key)
        if found is None:
            found = self._divided[key] = self._found(holders, placement)
        return found

    def _found(self, holders: Holders, placement: Placement) -> Messages:
        params, grads, optimizer, backward = placement

        def lane(instruction: Instruction, *places: int) -> LanePrice:
            key = (holders, instruction, places)
            found = self._lanes.get(key)
            if found is None:
                found = self._lanes[key] = LanePrice(instruction, partial(self._priced, holders, placement))
            return found

        # Only the placements passed to `lane` enter its key, so placements that share them share a price.
        second = backward > DEVICE
        return Messages(
            gather=lane(Instruction(Op.GATHER), params),
            further=lane(Instruction(Op.GATHER, secondary=second), params, backward),
            backward=lane(Instruction(Op.GATHER, backward=True, secondary=second), params, backward),
            reduce=lane(Instruction(Op.REDUCE), grads),
            sync=lane(Instruction(Op.SYNC), grads, optimizer),
            refresh=lane(Instruction(Op.REFRESH), params, optimizer),
            control=lane(Instruction(Op.CLIP), params, grads, optimizer, backward),
        )

    def _priced(self, holders: Holders, placement: Placement) -> Costs:
        # Of a program that has a block of each kind and no instructions.
        key = (holders, placement)
        if key not in self._costs:
            layout, plan = self.estimator.layout(holders.degrees, placement)
            cluster = data_cluster(self.estimator.task.cluster, holders.degrees)
            if holders.experts is not None:
                names = [tier.name for tier in cluster.tiers]
                plan = replace(plan, experts=holders.experts.expert_table(names))
            expert_degrees = (1, 1) if holders.experts is None else holders.experts.expert_degrees
            blocks = tuple(
                BlockSpec(name=f"kind {kind}", params=flat_params(*each, expert_degrees))
                for kind, each in enumerate(
                    zip(holders.numels, holders.stacks or (0,) * len(holders.numels), strict=True)
                )
            )
            program = Program(
                cluster=cluster,
                plan=plan,
                layout=layout,
                blocks=slice_blocks(blocks, Mesh.of(cluster, plan)),
                stage=_stage(len(blocks)),
                instructions=(),
            )
            self._costs[key] = Costs(forward_s=(), backward_s=(), update_s=(), program=program)
        return self._costs[key]


@lru_cache(maxsize=64)
def _stage(num_kinds: int) -> Stage:
    return whole_stage(num_kinds, 1, 1)

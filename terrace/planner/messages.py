"""Seconds of a block's data-parallel messages, by class and kind of block.

Prices are cached by the placements a message depends on: a reduction does not depend on the optimizer's tier.
"""

from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache, partial
from typing import NamedTuple, Protocol

from terrace.model.params import ParamSpec
from terrace.model.spec import BlockSpec
from terrace.plan.layout import DEVICE
from terrace.plan.mesh import Mesh
from terrace.plan.stage import Stage, whole_stage
from terrace.planner.estimate import Estimator
from terrace.planner.stage_specs import data_cluster
from terrace.planner.task import Placement
from terrace.program.instruction import Instruction, Op
from terrace.program.program import Program
from terrace.program.sharded_model import ShardedModel
from terrace.simulate.cost import Costs

Numels = tuple[int, ...]  # elements of a block of each kind on a rank


class Price(Protocol):
    """Lane of a message, and its seconds for a block of each kind."""

    @property
    def lane(self) -> int: ...

    def __getitem__(self, kind: int) -> float: ...


class LanePrice:
    """Price of a message among ranks that hold the same slice, computed lazily."""

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


class JoinedPrice:
    """Price of a message that carries the buffers of two messages in sequence, for blocks that have both."""

    def __init__(self, own: Price, stacks: Price, has_stacks: Sequence[bool]) -> None:
        self._own, self._stacks, self._has_stacks = own, stacks, has_stacks
        self._seconds: dict[int, float] = {}

    @cached_property
    def lane(self) -> int:
        return max(self._own.lane, self._stacks.lane)

    def __getitem__(self, kind: int) -> float:
        found = self._seconds.get(kind)
        if found is None:
            more_s = self._stacks[kind] if self._has_stacks[kind] else 0.0
            found = self._seconds[kind] = self._own[kind] + more_s
        return found


class Messages(NamedTuple):
    """Data-parallel messages of a plan; `further` is the forward gather of every unit after the first."""

    refresh: Price
    gather: Price
    reduce: Price
    sync: Price
    further: Price
    backward: Price
    control: Price


class MessagePrices:
    """Data-parallel messages of one task, cached."""

    def __init__(self, estimator: Estimator) -> None:
        self.estimator = estimator
        self._messages: dict[tuple[tuple[int, ...], Numels, Placement], Messages] = {}
        self._joined: dict[tuple[object, ...], Messages] = {}
        self._lanes: dict[tuple[object, ...], LanePrice] = {}
        self._costs: dict[tuple[object, ...], Costs] = {}

    def messages(self, degrees: tuple[int, ...], numels: Numels, placement: Placement) -> Messages:
        """Messages among `degrees` data ranks, with `numels` elements in a block of each kind."""
        key = (degrees, numels, placement)
        found = self._messages.get(key)
        if found is None:
            found = self._messages[key] = self._found(degrees, numels, placement)
        return found

    def of_shape(self, mesh: Mesh, placement: Placement) -> Messages:
        """Messages of the blocks of a mesh (`Numels.own`), plus their stacks if other ranks hold these."""
        numels, stacks = self.estimator.numels.own(mesh), self.estimator.numels.stacks(mesh)
        if not any(stacks):
            return self.messages(mesh.state, numels, placement)
        key = (mesh.state, numels, mesh.stack_state, stacks, placement)
        found = self._joined.get(key)
        if found is None:
            own, more = self.messages(mesh.state, numels, placement), self.messages(mesh.stack_state, stacks, placement)
            has = [numel > 0 for numel in stacks]
            joined = [JoinedPrice(*each, has) for each in zip(own, more, strict=True)]
            found = self._joined[key] = Messages(*joined)._replace(control=own.control)
        return found

    def _found(self, degrees: tuple[int, ...], numels: Numels, placement: Placement) -> Messages:
        params, grads, optimizer, backward = placement

        def lane(instruction: Instruction, *places: int) -> LanePrice:
            key = (degrees, numels, instruction, places)
            found = self._lanes.get(key)
            if found is None:
                found = self._lanes[key] = LanePrice(instruction, partial(self._priced, degrees, numels, placement))
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

    def _priced(self, degrees: tuple[int, ...], numels: Numels, placement: Placement) -> Costs:
        # From a program with a block of each kind and no instructions.
        key = (degrees, numels, placement)
        if key not in self._costs:
            layout, plan = self.estimator.layout(degrees, placement)
            cluster = data_cluster(self.estimator.task.cluster, degrees)
            blocks = tuple(
                BlockSpec(name=f"kind {kind}", params=(ParamSpec(name="all", shape=(numel,)),))
                for kind, numel in enumerate(numels)
            )
            model = ShardedModel(cluster=cluster, plan=plan, layout=layout, blocks=blocks)
            program = Program(model=model, stage=_stage(len(blocks)))
            self._costs[key] = Costs(forward_s=(), backward_s=(), update_s=(), program=program)
        return self._costs[key]


@lru_cache(maxsize=64)
def _stage(num_kinds: int) -> Stage:
    return whole_stage(num_kinds, 1, 1)

"""Parameters of a block of each kind on a rank, for one task; each is found once."""

import math
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from terrace.plan.mesh import TENSOR, Mesh
from terrace.planner.task import Task

_Numels = tuple[int, ...]  # by kind


class _Flat(NamedTuple):
    """Elements of flat buffers that the same ranks share, padded for the tensor ranks among these."""

    numels: _Numels
    trainable: bool
    stacked: bool  # of stacks of experts whose ranks are factored on their own
    is_moved: bool  # by counts
    shared: bool  # by tensor ranks


class Numels:
    """Parameters of the blocks of one task."""

    def __init__(self, task: Task) -> None:
        self.task = task
        stacks = (
            [param.numel for param in spec.params if param.is_stack and param.trainable] for spec in task.kinds.specs
        )
        self._all_stacks: _Numels = tuple(map(sum, stacks))
        self._none = (0,) * len(self._all_stacks)
        self._flats: dict[tuple[object, ...], tuple[_Flat, ...]] = {}
        self._found: dict[tuple[object, ...], tuple[_Numels, _Numels]] = {}

    def all(self, mesh: Mesh) -> _Numels:
        """Parameters on a tensor rank, where borrowers and lenders are together."""
        return self._sum(self._flats_of(mesh))

    def trained(self, mesh: Mesh) -> _Numels:
        """Those of `all` that train."""
        return self._sum(flat for flat in self._flats_of(mesh) if flat.trainable)

    def own(self, mesh: Mesh) -> _Numels:
        """As `trained`, without parameters that tensor ranks share, experts among them, since their states are sharded
        over these ranks, and without experts that ranks divide; for bounds.
        """
        return self._of(mesh)[0]

    def stacks(self, mesh: Mesh) -> _Numels:
        """Elements of the experts of a rank that train; 0 where they are among `own`."""
        return self._of(mesh)[1]

    def least(self, mesh: Mesh) -> _Numels:
        """`own` without any experts, however ranks divide them."""
        if mesh.total("tensor") > 1:
            return self.own(mesh)
        return tuple(numel - stack for numel, stack in zip(self.own(mesh), self._all_stacks, strict=True))

    def by_holders(self, mesh: Mesh, kinds: tuple[int, ...]) -> dict[tuple[bool, bool], int]:
        """Elements of blocks of `kinds` together, by whether they are stacks of experts and whether they train.

        Parameters that counts move are left out: they are whole on every rank.
        """
        found = Counter[tuple[bool, bool]]()
        for flat in self._flats_of(mesh):
            if not flat.is_moved:
                found[flat.stacked, flat.trainable] += sum(flat.numels[kind] for kind in kinds)
        return found

    def _of(self, mesh: Mesh) -> tuple[_Numels, _Numels]:
        key = (*mesh.inside_degrees[:2], mesh.expert_degrees)
        found = self._found.get(key)
        if found is None:
            trained = [flat for flat in self._flats_of(mesh) if flat.trainable]
            stacks = self._all_stacks if mesh.total("tensor") > 1 else self._none
            if mesh.experts is not None:
                stacks = self._sum(flat for flat in trained if flat.stacked)
            own = self._sum(flat for flat in trained if not (flat.stacked or flat.shared))
            found = self._found[key] = own, stacks
        return found

    def _sum(self, flats: Iterable[_Flat]) -> _Numels:
        return tuple(map(sum, zip(self._none, *(flat.numels for flat in flats), strict=True)))

    def _flats_of(self, mesh: Mesh) -> tuple[_Flat, ...]:
        key = (*mesh.inside_degrees[:2], mesh.expert_degrees)
        found = self._flats.get(key)
        if found is None:
            found = self._flats[key] = self._grouped(mesh)
        return found

    def _grouped(self, mesh: Mesh) -> tuple[_Flat, ...]:
        degrees, num_tensor = {axis: mesh.total(axis) for axis in TENSOR}, mesh.total("tensor")
        specs = self.task.kinds.sliced(degrees, mesh.expert_degrees)
        groups: dict[tuple[bool, bool, bool, tuple[str, ...]], list[int]] = {}
        for kind, spec in enumerate(specs):
            for param in spec.params:
                stacked = mesh.experts is not None and param.is_stack
                axes = () if stacked else tuple(filter(param.is_replicated_over, TENSOR))
                group = groups.setdefault((param.trainable, stacked, param.is_moved, axes), [0] * len(specs))
                group[kind] += param.numel
        found = []
        for (trainable, stacked, is_moved, axes), numels in groups.items():
            parts = math.prod(degrees[axis] for axis in axes)
            if stacked:
                parts = max(1, num_tensor // math.prod(mesh.expert_degrees))
            padded = tuple(-(-numel // parts) * parts for numel in numels)
            found.append(_Flat(padded, trainable, stacked, is_moved, bool(axes)))
        return tuple(found)

"""Cached parameter counts of a block of each kind on a rank, for one model."""

import math
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from terrace.plan.kinds import Kinds
from terrace.plan.mesh import TENSOR, Mesh

_Numels = tuple[int, ...]  # by kind


class _Flat(NamedTuple):
    """Elements of flat buffers shared by the same ranks, padded for the tensor ranks among them."""

    numels: _Numels
    trainable: bool
    stacked: bool  # of stacks of experts whose ranks are factored on their own
    is_expert_bias: bool  # by counts
    shared: bool  # by tensor ranks


class _Found(NamedTuple):
    flats: tuple[_Flat, ...]
    own: _Numels
    stacks: _Numels


class Numels:
    """Parameters of the blocks of one model."""

    def __init__(self, kinds: Kinds) -> None:
        self.kinds, self._found = kinds, dict[tuple[object, ...], _Found]()
        each = ([param.numel for param in spec.params if param.is_stack and param.trainable] for spec in kinds.specs)
        self._all_stacks: _Numels = tuple(map(sum, each))

    def all(self, mesh: Mesh) -> _Numels:
        """Parameters on a tensor rank, where users and owners are on one stage."""
        return self._sum(self._of(mesh).flats)

    def trained(self, mesh: Mesh) -> _Numels:
        """Trainable parameters of `all`."""
        return self._sum(flat for flat in self._of(mesh).flats if flat.trainable)

    def own(self, mesh: Mesh) -> _Numels:
        """`trained` without parameters that tensor ranks share or stacks that ranks divide; for bounds.

        Parameters that tensor ranks share, possibly stacks, have their states sharded over these ranks.
        """
        return self._of(mesh).own

    def stacks(self, mesh: Mesh) -> _Numels:
        """Trainable elements of a rank's experts; 0 where they are part of `own`."""
        return self._of(mesh).stacks

    def least(self, mesh: Mesh) -> _Numels:
        """`own` without any stacks, for any division of them."""
        if mesh.total("tensor") > 1:
            return self.own(mesh)
        return tuple(numel - stack for numel, stack in zip(self.own(mesh), self._all_stacks, strict=True))

    def by_holders(self, mesh: Mesh, kinds: tuple[int, ...]) -> dict[tuple[bool, bool], int]:
        """Elements of blocks of `kinds` by (stack of experts, trainable).

        Parameters that are moved by counts are excluded: they are whole on every rank.
        """
        found = Counter[tuple[bool, bool]]()
        for flat in self._of(mesh).flats:
            if not flat.is_expert_bias:
                found[flat.stacked, flat.trainable] += sum(flat.numels[kind] for kind in kinds)
        return found

    def _sum(self, flats: Iterable[_Flat]) -> _Numels:
        none = (0,) * len(self._all_stacks)
        return tuple(map(sum, zip(none, *(flat.numels for flat in flats), strict=True)))

    def _of(self, mesh: Mesh) -> _Found:
        key = (*mesh.inside_degrees[:2], mesh.stack_degrees)
        found = self._found.get(key)
        if found is None:
            flats = self._grouped(mesh)
            own = self._sum(flat for flat in flats if flat.trainable and not (flat.stacked or flat.shared))
            stacks = self._sum(flat for flat in flats if flat.trainable and flat.stacked)
            if not mesh.divides_stacks and mesh.total("tensor") > 1:  # then every tensor rank has all of them
                stacks = self._all_stacks
            found = self._found[key] = _Found(flats, own, stacks)
        return found

    def _grouped(self, mesh: Mesh) -> tuple[_Flat, ...]:
        degrees, num_tensor = {axis: mesh.total(axis) for axis in TENSOR}, mesh.total("tensor")
        specs = self.kinds.sliced(degrees, mesh.stack_degrees)
        groups: dict[tuple[bool, bool, bool, tuple[str, ...]], list[int]] = {}
        for kind, spec in enumerate(specs):
            for param in spec.params:
                stacked = mesh.divides_stacks and param.is_stack
                axes = () if stacked else tuple(filter(param.is_replicated_over, TENSOR))
                group = groups.setdefault((param.trainable, stacked, param.is_expert_bias, axes), [0] * len(specs))
                group[kind] += param.numel
        found = []
        for (trainable, stacked, is_expert_bias, axes), numels in groups.items():
            parts = math.prod(degrees[axis] for axis in axes)
            if stacked:
                parts = max(1, num_tensor // math.prod(mesh.stack_degrees))
            padded = tuple(-(-numel // parts) * parts for numel in numels)
            found.append(_Flat(padded, trainable, stacked, is_expert_bias, bool(axes)))
        return tuple(found)

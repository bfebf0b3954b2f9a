"""Cached parameter counts of a block of each kind on a rank, for one model."""

import math
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from terrace.model.base_formats import BASE_FORMATS
from terrace.plan.kinds import Kinds
from terrace.plan.mesh import STAGE, TENSOR, Mesh

_Numels = tuple[int, ...]  # by kind
_Groups = tuple[_Numels, _Numels, _Numels]  # by the ranks that share their states, as in `Elements`


class _Flat(NamedTuple):
    """Elements of flat buffers shared by the same ranks, padded for the tensor ranks among them."""

    numels: _Numels
    trainable: bool
    stacked: bool  # of stacks of experts whose ranks are factored on their own
    is_expert_bias: bool  # by counts
    code: str  # format of frozen matrices (terrace.model.base_formats); "": the compute dtype
    shared: bool  # by tensor ranks


class Elements(NamedTuple):
    """Elements of a block of each kind on a rank, in groups: those whose states data ranks share, stacks of
    experts that ranks divide, and what every tensor rank has whole, whose states all ranks of a stage share.

    `beside` are those that a visit gathers beside `trained`: the frozen ones, and all of the blocks that it is tied to.
    Frozen matrices held in codes count as elements of the compute dtype with as many bytes.
    """

    trained: _Groups
    frozen: _Groups
    beside: _Groups


class _Found(NamedTuple):
    flats: tuple[_Flat, ...]
    elements: Elements


def groups_of(mesh: Mesh) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Ranks by tier that share the states of each group of `Elements`."""
    return mesh.state, mesh.stack_state, mesh.group(*STAGE)


class Numels:
    def __init__(self, kinds: Kinds, element_bytes: int) -> None:
        self.kinds, self._found = kinds, dict[tuple[object, ...], _Found]()
        self._element_bytes = element_bytes  # of the compute dtype

    def all(self, mesh: Mesh) -> _Numels:
        """Parameters on a tensor rank, where users and owners are on one stage."""
        return self._sum(self._of(mesh).flats)

    def trained(self, mesh: Mesh) -> _Numels:
        return self._sum(flat for flat in self._of(mesh).flats if flat.trainable)

    def coded(self, mesh: Mesh) -> _Numels:
        """Elements of frozen matrices that are held in codes and decoded by every gather."""
        return self._sum(flat for flat in self._of(mesh).flats if flat.code)

    def elements(self, mesh: Mesh) -> Elements:
        """Elements by the ranks that share them and by what is done with them."""
        return self._of(mesh).elements

    def by_holders(self, mesh: Mesh, kinds: tuple[int, ...]) -> dict[tuple[bool, bool, str], int]:
        """Elements of blocks of `kinds` by (stack of experts, trainable, code).

        Parameters that are moved by counts are excluded: they are whole on every rank.
        """
        found = Counter[tuple[bool, bool, str]]()
        for flat in self._of(mesh).flats:
            if not flat.is_expert_bias:
                found[flat.stacked, flat.trainable, flat.code] += sum(flat.numels[kind] for kind in kinds)
        return found

    def _sum(self, flats: Iterable[_Flat]) -> _Numels:
        none = (0,) * len(self.kinds.specs)
        return tuple(map(sum, zip(none, *(flat.numels for flat in flats), strict=True)))

    def _of(self, mesh: Mesh) -> _Found:
        key = (*mesh.inside_degrees[:2], mesh.stack_degrees)
        found = self._found.get(key)
        if found is None:
            flats = self._grouped(mesh)
            trained, frozen = (self._in_groups(flats, trainable) for trainable in (True, False))
            beside = []
            for one, other in zip(trained, frozen, strict=True):
                beside.append(self._with_ties(one, other))
            found = self._found[key] = _Found(flats, Elements(trained, frozen, (beside[0], beside[1], beside[2])))
        return found

    def _in_groups(self, flats: Iterable[_Flat], trainable: bool) -> _Groups:
        # Biases that are moved by counts are whole on every rank.
        here = [self._in_bytes(flat) for flat in flats if flat.trainable is trainable and not flat.is_expert_bias]
        return (
            self._sum(flat for flat in here if not (flat.stacked or flat.shared)),
            self._sum(flat for flat in here if flat.stacked),
            self._sum(flat for flat in here if flat.shared and not flat.stacked),
        )

    def _in_bytes(self, flat: _Flat) -> _Flat:
        if not flat.code:
            return flat
        coded, item = BASE_FORMATS[flat.code].coded_bytes, self._element_bytes
        return flat._replace(numels=tuple(-(-coded(numel) // item) for numel in flat.numels))

    def _with_ties(self, trained: _Numels, frozen: _Numels) -> _Numels:
        order, found = self.kinds.order, list(frozen)
        for kind, spec in enumerate(self.kinds.specs):
            found[kind] += sum(trained[order[owner]] + frozen[order[owner]] for owner in spec.tied_to)
        return tuple(found)

    def _grouped(self, mesh: Mesh) -> tuple[_Flat, ...]:
        degrees, num_tensor = {axis: mesh.total(axis) for axis in TENSOR}, mesh.total("tensor")
        specs = self.kinds.sliced(degrees, mesh.stack_degrees)
        groups: dict[tuple[bool, bool, bool, str, tuple[str, ...]], list[int]] = {}
        for kind, spec in enumerate(specs):
            for param in spec.params:
                stacked = mesh.divides_stacks and param.is_stack
                axes = () if stacked else tuple(filter(param.is_replicated_over, TENSOR))
                key = param.trainable, stacked, param.is_expert_bias, param.code, axes
                groups.setdefault(key, [0] * len(specs))[kind] += param.numel
        found = []
        for (trainable, stacked, is_expert_bias, code, axes), numels in groups.items():
            parts = math.prod(degrees[axis] for axis in axes)
            if stacked:
                parts = max(1, num_tensor // math.prod(mesh.stack_degrees))
            padded = tuple(-(-numel // parts) * parts for numel in numels)
            found.append(_Flat(padded, trainable, stacked, is_expert_bias, code, bool(axes)))
        return tuple(found)

"""The slices of one flat buffer that a rank holds: pure arithmetic on a layout and the rank's coordinates."""

from collections.abc import Iterator
from typing import NamedTuple

from terrace.plan.flats import FlatParamSpec
from terrace.plan.mesh import PARTS
from terrace.plan.slices import rank_slices
from terrace.plan.update import Shape


class MatrixPart(NamedTuple):
    """A tensor rank's part of a matrix: where it begins in what ORTHOGONALISE gathers, and its place in the matrix."""

    start: int
    place: tuple[slice, ...]  # without padding


class Matrix(NamedTuple):
    """A matrix of `shape` that is updated whole. This rank's part has the shape `held`, padding included.

    `start` and `stop` are those of this rank's part in its flat buffer. `parts` are those of all ranks that cut the
    matrix, `own` the place of this rank's.
    """

    name: str
    shape: Shape
    held: Shape
    start: int
    stop: int
    parts: tuple[MatrixPart, ...]
    own: tuple[slice, ...]


class RankSlices:
    """Where a rank's slices of a flat buffer lie. `is_copy` says that another stage owns the block."""

    def __init__(self, spec: FlatParamSpec, rank: int, *, is_copy: bool = False) -> None:
        self.spec, self.is_copy, self._rank = spec, is_copy, rank
        self.layout, self.padded = spec.layout, spec.padded
        self.coordinates = self.layout.coordinates(rank)
        self.expert_rank = self.layout.ranks.group_rank(rank, PARTS)  # among ranks with different experts

    def part(self, tier: int) -> slice:
        """This rank's slice of the buffer for a state placed on `tier`."""
        return self.layout.slice(tier, self.coordinates, self.padded)

    def part_within(self, tier: int, base: int, numel: int | None = None) -> slice:
        """The same slice, relative to the slice of an inner tier `base`; of a buffer of `numel` elements, if given."""
        # A slice on an outer tier lies inside the slice on an inner one.
        inner, outer = (self.layout.slice(each, self.coordinates, numel or self.padded) for each in (base, tier))
        return slice(outer.start - inner.start, outer.stop - inner.start)

    def is_first(self, tier: int) -> bool:
        """Whether this rank is the first of its island's ranks that hold the same slice of a state on `tier`."""
        return not self.is_copy and not any(self.coordinates[tier + 1 : self.layout.island + 1])

    def gathered_part(self, tier: int) -> slice:
        """Of the buffer in which ORTHOGONALISE gathers matrices: what a rank has before tiers to `tier` are crossed."""
        across = self.layout.across
        return across.slice(tier, across.coordinates(self._rank), self.spec.gathered_numel)

    def matrices(self) -> Iterator[Matrix]:
        """The matrices that the optimizer updates whole; `PARAMETER%NUMBER`, numbered within the whole stack."""
        if not self.spec.num_orthogonal:
            return
        across = self.layout.across
        members = across.ranks.members(self._rank, across.axes)
        begins = [
            across.slice(across.outermost, across.coordinates(member), self.padded * across.degree).start
            for member in members
        ]
        for param, first, _ in self.spec.extents:
            if first >= self.spec.num_orthogonal:
                return
            size, dims = param.numel // param.num_parts, len(param.part_shape)
            places = [rank_slices(param, self.layout.ranks, member)[-dims:] for member in members]
            for number in range(param.num_parts):
                start = first + number * size
                yield Matrix(
                    name=f"{param.name}%{self.expert_rank * param.num_parts + number}",
                    shape=param.whole_part_shape,
                    held=param.part_shape,
                    start=start,
                    stop=start + size,
                    parts=tuple(MatrixPart(begin + start, place) for begin, place in zip(begins, places, strict=True)),
                    own=places[members.index(self._rank)],
                )

"""The slices of one flat buffer that a rank holds: pure arithmetic on a layout and the rank's coordinates."""

from terrace.plan.flats import FlatParamSpec
from terrace.plan.mesh import PARTS


class RankSlices:
    """Where a rank's slices of a flat buffer lie. `is_copy` says that another stage owns the block."""

    def __init__(self, spec: FlatParamSpec, rank: int, *, is_copy: bool = False) -> None:
        self.spec, self.is_copy = spec, is_copy
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

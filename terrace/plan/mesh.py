"""The mesh: the degree of every axis on every tier, and the place each rank has in it.

On a tier, the axes divide the members in a fixed order, the first one fastest: columns and rows of the tensor axis,
Ulysses and ring of the context axis, expert, data, pipeline. So ranks that talk most are neighbours.

The ranks of a stage are factored a second time for experts (`Plan.experts`): into rows, expert and data. The pipeline
is slowest on a tier in both factorings, so a rank has the same stage in both.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from terrace.base.errors import PlanError

if TYPE_CHECKING:
    from terrace.cluster.cluster import Cluster
    from terrace.plan.plan import Plan

ORDER = ("columns", "rows", "ulysses", "ring", "expert", "data", "pipeline")
TENSOR = ("columns", "rows")
CONTEXT = ("ulysses", "ring")
PIPELINE = ("pipeline",)
HOLDERS = (*CONTEXT, "data")  # their ranks hold the same slice of a block that only the tensor axis cuts
STACK_AXES = ("rows", "expert")  # of `Plan.experts`
SHARING = ("rows", *CONTEXT)  # their ranks have tokens of the same sequences, unless documents are dealt out by cost
PARTS = ("expert",)  # only where stacks have a factoring: its ranks hold different parts of them
STAGE = (*TENSOR, *CONTEXT, *PARTS, "data")  # their ranks work on the same blocks
_FACTORED = {"tensor": TENSOR, "context": CONTEXT}
_UNFACTORED = {"tensor": "rows", "context": "ring"}  # a number alone in a mapping
_Table = Mapping[str, int | Mapping[str, int]]  # a tier's row of `Plan.mapping`


@dataclass(frozen=True)
class Mesh:
    """The degree of every axis on every tier, innermost tier first, axes as in `ORDER`.

    Wherever axes are asked for, "tensor" is columns and rows together, "context" Ulysses and ring. Meshes sort by the
    degrees of data, tensor, context and pipeline of the innermost tier, then by its columns and Ulysses ranks.
    `apart` factors the same ranks once more, for stacks of experts; None: `stacks` are as all other parameters.
    """

    degrees: tuple[tuple[int, ...], ...]
    apart: "Mesh | None" = None

    @staticmethod
    def of(cluster: "Cluster", plan: "Plan") -> "Mesh":
        """The mesh of a plan; a tier without a row in the mapping belongs to the data axis."""
        found = []
        for tier in cluster.tiers:
            degrees = tier_degrees(plan.mapping.get(tier.name, {"data": tier.size}))
            found.append(tuple(degrees.get(axis, 1) for axis in ORDER))
        mesh = _interned(tuple(found))
        if not plan.experts:
            return mesh
        of_experts = []
        for tier, members, pipeline in zip(cluster.tiers, mesh.group(*STAGE), mesh.group(*PIPELINE), strict=True):
            row = plan.experts.get(tier.name, {})
            # The ranks left over hold the same experts.
            own = {**row, "data": members // math.prod(row.values()), "pipeline": pipeline}
            of_experts.append(tuple(own.get(axis, 1) for axis in ORDER))
        return _interned(mesh.degrees, _interned(tuple(of_experts)))

    @staticmethod
    def build(num_tiers: int, **degrees: Sequence[int]) -> "Mesh":
        """The mesh of named axes, each with a degree per tier; the other axes have degree 1."""
        alone = (1,) * num_tiers
        return Mesh(tuple(zip(*(tuple(degrees.get(axis, alone)) for axis in ORDER), strict=True)))

    @cached_property
    def _hash(self) -> int:
        return hash(self.degrees) if self.apart is None else hash((self.degrees, self.apart.degrees))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _sorts_as(self) -> tuple[tuple[int, ...], ...]:
        # Rows and ring follow from these, since tensor = rows x columns and context = ulysses x ring.
        axes = ("data", "tensor", "context", "pipeline", "columns", "ulysses")
        found = tuple(zip(*map(self.group, axes), strict=True))
        return found if self.apart is None else (*found, *zip(*map(self.apart.group, STACK_AXES), strict=True))

    def __lt__(self, other: "Mesh") -> bool:
        return self._sorts_as < other._sorts_as

    @cached_property
    def _groups(self) -> dict[tuple[str, ...], tuple[int, ...]]:
        return {}

    @cached_property
    def _parts(self) -> dict[tuple[str, ...], "Mesh"]:
        return {}

    @property
    def stacks(self) -> "Mesh":
        """The factoring of stacks, which is that of all other parameters where they have none of their own."""
        return self if self.apart is None else self.apart

    @property
    def divides_stacks(self) -> bool:
        """Whether stacks have a factoring of their own."""
        return self.apart is not None

    def of_stacks(self, stacked: bool) -> "Mesh":
        """The factoring of stacks of experts, or of all other parameters."""
        return self.stacks if stacked else self

    def group(self, *axes: str) -> tuple[int, ...]:
        """The product of the degrees of `axes`, per tier: the shape of a group of ranks that differ only on them."""
        found = self._groups.get(axes)
        if found is None:
            positions = _positions(axes)
            found = tuple([math.prod([row[position] for position in positions]) for row in self.degrees])
            self._groups[axes] = found
        return found

    @cached_property
    def _totals(self) -> dict[str, int]:
        return {}

    def total(self, axis: str) -> int:
        """The degree of an axis over all tiers."""
        found = self._totals.get(axis)
        if found is None:
            found = self._totals[axis] = math.prod(self.group(axis))
        return found

    @cached_property
    def inside_degrees(self) -> tuple[int, int, int, int]:
        """Ranks that share a block on a micro-batch: of the tensor axis, of these columns, Ulysses, and the ring."""
        return self.total("tensor"), self.total("columns"), self.total("ulysses"), self.total("ring")

    def tiers(self, axis: str) -> tuple[int, ...]:
        """The tiers on which the axis has more than one rank."""
        return tuple(tier for tier, degree in enumerate(self.group(axis)) if degree > 1)

    @cached_property
    def state(self) -> tuple[int, ...]:
        """Ranks per tier that hold the same slice of a block and shard its states."""
        return self.group(*HOLDERS)

    @cached_property
    def stack_state(self) -> tuple[int, ...]:
        """Ranks per tier that hold the same experts and shard their states; tensor rows do not cut them."""
        return self.group(*STAGE) if self.apart is None else self.apart.state

    @cached_property
    def inside(self) -> "Mesh":
        """Only the axes whose ranks send messages inside a block: tensor, context, and those of experts."""
        found = self.only("tensor", "context")
        return found if self.apart is None else _interned(found.degrees, self.apart.only(*STACK_AXES))

    @cached_property
    def stack_tiers(self) -> tuple[int, ...]:
        """The tiers whose ranks divide stacks."""
        lines = () if self.apart is None else self.apart.group(*STACK_AXES)
        return tuple(tier for tier, degree in enumerate(lines) if degree > 1)

    @cached_property
    def stack_degrees(self) -> tuple[int, int]:
        """Ranks that hold different parts of a stack, and ranks that every part is cut over."""
        return (1, 1) if self.apart is None else (self.apart.total("expert"), self.apart.total("rows"))

    def with_stacks(self, expert: Sequence[int], rows: Sequence[int]) -> "Mesh":
        """The mesh with these degrees per tier for stacks of experts; without any, stacks are as all else."""
        of_experts = _of_experts(self.group(*STAGE), self.group("pipeline"), tuple(expert), tuple(rows))
        return self if of_experts is None else _interned(self.degrees, of_experts)

    def with_stacks_of(self, other: "Mesh") -> "Mesh":
        """The mesh with the stacks of another, whatever its ranks of a stage: to price the inside of a block."""
        return self if self.apart is other.apart else _interned(self.degrees, other.apart)

    def stack_table(self, tiers: Sequence[str]) -> dict[str, dict[str, int]]:
        """The degrees for experts as `Plan.experts` on the named tiers."""
        if self.apart is None:
            return {}
        found = {}
        for name, *degrees in zip(tiers, *map(self.apart.group, STACK_AXES), strict=True):
            row = {axis: degree for axis, degree in zip(STACK_AXES, degrees, strict=True) if degree > 1}
            if row:
                found[name] = row
        return found

    def stack_keys(self, tiers: Sequence[str]) -> dict[str, Any]:
        """The keys of a plan that say how stacks are factored on the named tiers; none where they are as all else."""
        table = self.stack_table(tiers)
        return {"experts": table} if table else {}

    def only(self, *axes: str) -> "Mesh":
        """The mesh with every axis but `axes` at degree 1."""
        found = self._parts.get(axes)
        if found is None:
            kept = _positions(axes)
            found = _interned(tuple(tuple(d if i in kept else 1 for i, d in enumerate(row)) for row in self.degrees))
            self._parts[axes] = found
        return found

    def with_ulysses(self, degrees: Sequence[int]) -> "Mesh":
        """The mesh with `degrees` of the context ranks per tier in Ulysses form, the rest of them in a ring."""
        found = []
        for (columns, rows, own, ring, *others), ulysses in zip(self.degrees, degrees, strict=True):
            found.append((columns, rows, ulysses, own * ring // ulysses, *others))
        return _interned(tuple(found), self.apart)

    def mapping(self, tiers: Sequence[str]) -> dict[str, dict[str, int | dict[str, int]]]:
        """The mesh as `Plan.mapping` on the named tiers, a row for each: the way back from `Mesh.of`."""
        found = {}
        for name, degrees in zip(tiers, self.degrees, strict=True):
            columns, rows, ulysses, ring, _, data, pipeline = degrees
            forms = {"ulysses": ulysses, "ring": ring}
            row: dict[str, int | dict[str, int]] = {}
            # Axes of degree 1 are left out, as a person would write it.
            if data > 1:
                row["data"] = data
            if rows * columns > 1:
                row["tensor"] = rows if columns == 1 else {"rows": rows, "columns": columns}
            if ulysses * ring > 1:
                row["context"] = {form: degree for form, degree in forms.items() if degree > 1}
            if pipeline > 1:
                row["pipeline"] = pipeline
            found[name] = row
        return found

    def coordinates(self, rank: int, axes: Collection[str]) -> tuple[int, ...]:
        """Place of `rank` among the ranks that differ only on `axes`, per tier."""
        places, kept = [], _positions(tuple(axes))
        for row in self.degrees:
            # `member` is the rank's number within the tier; its digits in mixed radix are the places on the axes.
            rank, member = divmod(rank, math.prod(row))
            place, stride = 0, 1
            for position, degree in enumerate(row):
                member, digit = divmod(member, degree)
                if position in kept:
                    place += digit * stride
                    stride *= degree
            places.append(place)
        return tuple(places)

    def place(self, rank: int, axes: Collection[str]) -> int:
        """Index of `rank` among the ranks that differ only on `axes`, the innermost tier fastest."""
        index = 0
        degrees = self.group(*axes)
        for degree, here in reversed(list(zip(degrees, self.coordinates(rank, axes), strict=True))):
            index = index * degree + here
        return index

    def part(self, rank: int, axis: str) -> int:
        """Index of `rank`'s part of a dim cut by `axis`, where tiers divide the dim in turn, innermost first."""
        return position(self.group(axis), self.coordinates(rank, (axis,)))

    def along(self, axis: str) -> tuple[int, ...]:
        """The degrees of an axis by tier, in the factoring that it belongs to."""
        return self.of_stacks(axis in PARTS).group(axis)

    def members(self, rank: int, axes: Collection[str]) -> tuple[int, ...]:
        """Ranks that differ from `rank` only on `axes`, itself included, in the order of their places."""
        found: tuple[int, ...] = (rank,)
        for tier, degree in enumerate(self.group(*axes)):
            peers = [self.peers(other, tier, axes) for other in found]
            # Places of outer tiers count slowest.
            found = tuple(ranks[place] for place in range(degree) for ranks in peers)
        return found

    def peers(self, rank: int, tier: int, axes: Collection[str]) -> tuple[int, ...]:
        """Ranks that differ from `rank` only on `tier` and `axes`, itself included, in order."""
        # Ranks of one unit of the tiers inside: the stride between neighbours on this tier.
        inside = math.prod(math.prod(row) for row in self.degrees[:tier])
        row, kept = self.degrees[tier], _positions(tuple(axes))
        member = rank // inside % math.prod(row)
        members, stride = [member], 1
        for position, degree in enumerate(row):
            if position in kept:
                digit = member // stride % degree
                # Vary this axis' digit and keep the others.
                members = [other + (place - digit) * stride for place in range(degree) for other in members]
            stride *= degree
        return tuple(rank + (other - member) * inside for other in members)

    def stage(self, rank: int) -> int:
        """The pipeline stage of a rank: stages are numbered over the tiers, the innermost one fastest."""
        return self.place(rank, PIPELINE)

    def edge_tier(self, stage: int, other: int) -> int:
        """The index of the outermost tier that a message between two stages crosses."""
        crossed = 0
        # The outermost tier on which the two stages differ.
        for tier, degree in enumerate(self.group(*PIPELINE)):
            (stage, here), (other, there) = divmod(stage, degree), divmod(other, degree)
            crossed = tier if here != there else crossed
        return crossed

    def at_stage(self, rank: int, stage: int) -> int:
        """The rank of `stage` that has the same place as `rank` on every other axis."""
        return _at_stage(self, rank, stage)


@lru_cache(maxsize=4096)
def _at_stage(mesh: Mesh, rank: int, stage: int) -> int:
    # Move along the pipeline axis only, tier by tier.
    for tier, degree in enumerate(mesh.group(*PIPELINE)):
        stage, place = divmod(stage, degree)
        rank = mesh.peers(rank, tier, PIPELINE)[place]
    return rank


@lru_cache(maxsize=65536)
def _interned(degrees: tuple[tuple[int, ...], ...], apart: Mesh | None = None) -> Mesh:
    # The planner asks for the same few meshes many times, and a mesh remembers what was asked of it.
    return Mesh(degrees, apart)


@lru_cache(maxsize=4096)
def _of_experts(
    members: tuple[int, ...], pipeline: tuple[int, ...], expert: tuple[int, ...], rows: tuple[int, ...]
) -> Mesh | None:
    if math.prod(expert) * math.prod(rows) == 1:
        return None
    data = [size // (own * cut) for size, own, cut in zip(members, expert, rows, strict=True)]
    return _interned(Mesh.build(len(data), expert=expert, rows=rows, data=data, pipeline=pipeline).degrees)


@lru_cache(maxsize=256)
def _positions(axes: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(ORDER.index(part) for axis in axes for part in _FACTORED.get(axis, (axis,)))


def no_sequence(axis: str) -> PlanError:
    """The error for programs of a plan with `axis` where sequences have no length."""
    return PlanError(f"a plan with a {axis} axis needs the length of a sequence: its messages are activations")


def tier_degrees(row: _Table) -> dict[str, int]:
    """The degrees of one tier by unfactored axis, from its row of a plan's mapping."""
    found: dict[str, int] = {}
    for axis, entry in row.items():
        found.update(entry if isinstance(entry, Mapping) else {_UNFACTORED.get(axis, axis): entry})
    # Depth shards weights and splits the batch as the data axis does, so it counts there.
    found["data"] = found.get("data", 1) * found.pop("depth", 1)
    return found


def position(degrees: Sequence[int], coordinates: Sequence[int]) -> int:
    """Index of a rank's equal part when tiers divide a whole in turn, innermost first."""
    index = 0
    for degree, here in zip(degrees, coordinates, strict=True):
        index = index * degree + here
    return index

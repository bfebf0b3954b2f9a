"""The mesh: the degree of every axis on every tier, and each rank's coordinates.

On a tier, the axes divide the members in a fixed order, the first varying fastest: columns and rows of the tensor axis,
Ulysses and ring of the context axis, expert, data, pipeline. So the ranks that communicate most are neighbours.

For experts, the ranks of a stage are factored a second time (`Plan.experts`), into rows, expert and data; for tables
once more (`Plan.vocabulary`), into expert, whose ranks hold different rows of a table, and data. The pipeline varies
slowest in all factorings, so a rank has the same stage in each.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from terrace.base.errors import PlanError

if TYPE_CHECKING:
    from terrace.cluster.cluster import Cluster
    from terrace.model.params import ParamSpec
    from terrace.plan.plan import Plan

ORDER = ("columns", "rows", "ulysses", "ring", "expert", "data", "pipeline")
TENSOR = ("columns", "rows")
CONTEXT = ("ulysses", "ring")
PIPELINE = ("pipeline",)
HOLDERS = (*CONTEXT, "data")  # their ranks hold the same slice of a block that only the tensor axis cuts
STACK_AXES = ("rows", "expert")  # of `Plan.experts`
SHARING = ("rows", *CONTEXT)  # their ranks have tokens of the same sequences, unless `balance = "cost"`
PARTS = ("expert",)  # only in a factoring of their own: ranks with different experts, or different rows of a table
STAGE = (*TENSOR, *CONTEXT, *PARTS, "data")  # axes of the ranks that work on the same blocks
_FACTORED = {"tensor": TENSOR, "context": CONTEXT}
_UNFACTORED = {"tensor": "rows", "context": "ring"}  # what a plain number in a mapping stands for
_Table = Mapping[str, int | Mapping[str, int]]  # one tier's row of `Plan.mapping`


@dataclass(frozen=True)
class Mesh:
    """The degree of every axis on every tier, innermost tier first, axes as in `ORDER`.

    In axis arguments, "tensor" means columns and rows together, "context" Ulysses and ring. Meshes sort by the degrees
    of data, tensor, context and pipeline on the innermost tier, then by its columns and Ulysses ranks. `apart` is the
    second factoring of the same ranks, for expert stacks; None: stacks are sharded like other parameters. `tables` is
    the factoring for tables whose rows are spread; None: tables are sharded like other parameters. `order` is
    `Plan.order`; it moves whole stages between members.
    """

    degrees: tuple[tuple[int, ...], ...]
    apart: "Mesh | None" = None
    tables: "Mesh | None" = None
    order: tuple[int, ...] = ()

    @staticmethod
    def of(cluster: "Cluster", plan: "Plan") -> "Mesh":
        """The mesh of a plan. A tier without a row in the mapping belongs to the data axis."""
        found = []
        for tier in cluster.tiers:
            degrees = tier_degrees(plan.mapping.get(tier.name, {"data": tier.size}))
            found.append(tuple([degrees.get(axis, 1) for axis in ORDER]))
        mesh = _interned(tuple(found), None, None, plan.order)
        if not plan.experts and not plan.vocabulary:
            return mesh
        tiers = [tier.name for tier in cluster.tiers]
        apart = mesh.factored([plan.experts.get(name, {}) for name in tiers]) if plan.experts else None
        rows = [{"expert": plan.vocabulary.get(name, 1)} for name in tiers]
        return _interned(mesh.degrees, apart, mesh.factored(rows) if plan.vocabulary else None, plan.order)

    def factored(self, rows: "Sequence[Mapping[str, int]]") -> "Mesh":
        """Factor the ranks of a stage by `rows`, degrees of axes by tier; the data axis takes the remaining ranks."""
        found = []
        for row, members, pipeline in zip(rows, self.group(*STAGE), self.group(*PIPELINE), strict=True):
            own = {**row, "data": members // math.prod(row.values()), "pipeline": pipeline}
            found.append(tuple(own.get(axis, 1) for axis in ORDER))
        return _interned(tuple(found))

    @staticmethod
    def build(num_tiers: int, **degrees: Sequence[int]) -> "Mesh":
        """A mesh from degrees per tier for the named axes; the other axes have degree 1."""
        alone = (1,) * num_tiers
        return Mesh(tuple(zip(*(tuple(degrees.get(axis, alone)) for axis in ORDER), strict=True)))

    @cached_property
    def _hash(self) -> int:
        return hash((self.degrees, *(each.degrees for each in (self.apart, self.tables) if each is not None)))

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
        """The factoring for expert stacks: `apart`, or this mesh if there is none."""
        return self if self.apart is None else self.apart

    @property
    def divides_stacks(self) -> bool:
        return self.apart is not None

    def of_stacks(self, stacked: bool) -> "Mesh":
        """The factoring for expert stacks if `stacked`, else for other parameters."""
        return self.stacks if stacked else self

    def of_param(self, param: "ParamSpec") -> "Mesh":
        """The factoring that a parameter belongs to."""
        if param.is_spread:
            assert self.tables is not None, f"{param.name} is spread by a plan with a vocabulary"
            return self.tables
        return self.of_stacks(param.is_stack)

    def group(self, *axes: str) -> tuple[int, ...]:
        """Product of the degrees of `axes` per tier: the shape of a group of ranks that differ only on these axes."""
        found = self._groups.get(axes)
        if found is None:
            positions = _positions(axes)
            if len(positions) == 1:
                found = tuple([row[positions[0]] for row in self.degrees])
            else:
                found = tuple([math.prod([row[position] for position in positions]) for row in self.degrees])
            self._groups[axes] = found
        return found

    @cached_property
    def _totals(self) -> dict[str, int]:
        # All at once: a search asks for most of them.
        found = dict(zip(ORDER, map(math.prod, zip(*self.degrees, strict=True)), strict=True))
        return found | {axis: math.prod([found[part] for part in parts]) for axis, parts in _FACTORED.items()}

    def total(self, axis: str) -> int:
        return self._totals[axis]

    @cached_property
    def inside_degrees(self) -> tuple[int, int, int, int]:
        """(tensor, columns, ulysses, ring) total degrees: the ranks that share a block's work on a micro-batch."""
        return self.total("tensor"), self.total("columns"), self.total("ulysses"), self.total("ring")

    def tiers(self, axis: str) -> tuple[int, ...]:
        return tuple(tier for tier, degree in enumerate(self.group(axis)) if degree > 1)

    @cached_property
    def state(self) -> tuple[int, ...]:
        """Per tier, the number of ranks that hold the same slice of a block and shard its states."""
        return self.group(*HOLDERS)

    @cached_property
    def stack_state(self) -> tuple[int, ...]:
        """Per tier, the number of ranks that hold the same experts and shard their states."""
        return self.group(*STAGE) if self.apart is None else self.apart.state

    @cached_property
    def inside(self) -> "Mesh":
        """The mesh of only the axes with messages inside blocks: tensor, context, and those of `apart`."""
        found = self.only("tensor", "context")
        return found if self.apart is None else _interned(found.degrees, self.apart.only(*STACK_AXES))

    @cached_property
    def stack_tiers(self) -> tuple[int, ...]:
        """Tiers over which expert stacks are split."""
        lines = () if self.apart is None else self.apart.group(*STACK_AXES)
        return tuple(tier for tier, degree in enumerate(lines) if degree > 1)

    @cached_property
    def routed_tiers(self) -> tuple[int, ...]:
        """Tiers that routed messages cross: those over which stacks or tables are split."""
        of_tables = () if self.tables is None else self.tables.tiers("expert")
        return tuple(sorted({*self.stack_tiers, *of_tables}))

    @cached_property
    def stack_degrees(self) -> tuple[int, int]:
        """(Number of ranks with different experts, number of ranks that every expert is cut over)."""
        return (1, 1) if self.apart is None else (self.apart.total("expert"), self.apart.total("rows"))

    def with_stacks(self, expert: Sequence[int], rows: Sequence[int]) -> "Mesh":
        """The mesh with these degrees per tier for expert stacks; unchanged if all are 1."""
        of_experts = _of_experts(self.group(*STAGE), self.group("pipeline"), tuple(expert), tuple(rows))
        return self if of_experts is None else _interned(self.degrees, of_experts)

    def with_stacks_of(self, other: "Mesh") -> "Mesh":
        """The mesh with the expert factoring of `other`, even if stage sizes differ (to price a block's inside)."""
        return self if self.apart is other.apart else _interned(self.degrees, other.apart)

    def stack_table(self, tiers: Sequence[str]) -> dict[str, dict[str, int]]:
        """The expert degrees as a `Plan.experts` table for the named tiers."""
        if self.apart is None:
            return {}
        found = {}
        for name, *degrees in zip(tiers, *map(self.apart.group, STACK_AXES), strict=True):
            row = {axis: degree for axis, degree in zip(STACK_AXES, degrees, strict=True) if degree > 1}
            if row:
                found[name] = row
        return found

    def stack_keys(self, tiers: Sequence[str]) -> dict[str, Any]:
        """The plan keys for the factoring of expert stacks on the named tiers; empty without one."""
        table = self.stack_table(tiers)
        return {"experts": table} if table else {}

    def only(self, *axes: str) -> "Mesh":
        """The mesh with all axes except `axes` at degree 1."""
        found = self._parts.get(axes)
        if found is None:
            kept = _positions(axes)
            found = _interned(
                tuple([tuple([d if i in kept else 1 for i, d in enumerate(row)]) for row in self.degrees])
            )
            self._parts[axes] = found
        return found

    def with_ulysses(self, degrees: Sequence[int]) -> "Mesh":
        """The mesh with Ulysses `degrees` per tier; the remaining context ranks form the ring."""
        found = []
        for (columns, rows, own, ring, *others), ulysses in zip(self.degrees, degrees, strict=True):
            found.append((columns, rows, ulysses, own * ring // ulysses, *others))
        return _interned(tuple(found), self.apart)

    def mapping(self, tiers: Sequence[str]) -> dict[str, dict[str, int | dict[str, int]]]:
        """The mesh as a `Plan.mapping` table for the named tiers: the inverse of `Mesh.of`."""
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
        """Position of `rank` per tier among the ranks that differ only on `axes`."""
        places, kept = [], _positions(tuple(axes))
        for row in self.degrees:
            # `member` is the rank's index within the tier; its mixed-radix digits are the positions on the axes.
            rank, member = divmod(rank, math.prod(row))
            place, stride = 0, 1
            for position, degree in enumerate(row):
                member, digit = divmod(member, degree)
                if position in kept:
                    place += digit * stride
                    stride *= degree
            places.append(place)
        return tuple(places)

    def group_rank(self, rank: int, axes: Collection[str]) -> int:
        """Index of `rank` among the ranks that differ only on `axes`; the innermost tier varies fastest."""
        index = 0
        degrees = self.group(*axes)
        for degree, here in reversed(list(zip(degrees, self.coordinates(rank, axes), strict=True))):
            index = index * degree + here
        return index

    def part(self, rank: int, axis: str) -> int:
        """Index of `rank`'s part of a dim that `axis` cuts; tiers cut it in turn, innermost first."""
        return position(self.group(axis), self.coordinates(rank, (axis,)))

    def along(self, axis: str) -> tuple[int, ...]:
        """Degrees of an axis by tier, in the factoring that it belongs to."""
        return self.of_stacks(axis in PARTS).group(axis)

    def members(self, rank: int, axes: Collection[str]) -> tuple[int, ...]:
        """Ranks that differ from `rank` only on `axes`, itself included, ordered by `group_rank`."""
        found: tuple[int, ...] = (rank,)
        for tier, degree in enumerate(self.group(*axes)):
            peers = [self.peers(other, tier, axes) for other in found]
            # Outer tiers vary slowest.
            found = tuple(ranks[place] for place in range(degree) for ranks in peers)
        return found

    def peers(self, rank: int, tier: int, axes: Collection[str]) -> tuple[int, ...]:
        """Ranks that differ from `rank` only on `tier` and `axes`, itself included, in order."""
        # Ranks per unit of the inner tiers: the stride between neighbours on this tier.
        inside = math.prod(math.prod(row) for row in self.degrees[:tier])
        row, kept = self.degrees[tier], _positions(tuple(axes))
        member = rank // inside % math.prod(row)
        members, stride = [member], 1
        for position, degree in enumerate(row):
            if position in kept:
                digit = member // stride % degree
                # Vary this axis's digit and keep the others.
                members = [other + (place - digit) * stride for place in range(degree) for other in members]
            stride *= degree
        return tuple(rank + (other - member) * inside for other in members)

    def stage(self, rank: int) -> int:
        """Pipeline stage of a rank; stages are numbered with the innermost tier varying fastest."""
        place = self.group_rank(rank, PIPELINE)
        if not self.order:
            return place
        member, inside = divmod(place, self.stages_inside)
        return self.order.index(member) * self.stages_inside + inside

    @cached_property
    def stages_inside(self) -> int:
        """Pipeline stages of a member of the outermost tier."""
        return self.total("pipeline") // self.group("pipeline")[-1]

    def boundary(self, stage: int, other: int) -> int | None:
        """Index of the boundary between two neighbouring members of a pipeline across the outermost tier.

        None for stages of one member. The last member's with the first is numbered after all others.
        """
        one, two = sorted([stage // self.stages_inside, other // self.stages_inside])
        if one == two:
            return None
        return one if two == one + 1 else self.group("pipeline")[-1] - 1

    def edge_tier(self, stage: int, other: int) -> int:
        """Index of the outermost tier that a message between two stages crosses."""
        crossed = 0
        # The outermost tier on which the two stages differ.
        for tier, degree in enumerate(self.group(*PIPELINE)):
            (stage, here), (other, there) = divmod(stage, degree), divmod(other, degree)
            crossed = tier if here != there else crossed
        return crossed

    def at_stage(self, rank: int, stage: int) -> int:
        """The rank of `stage` with the same position as `rank` on every other axis."""
        return _at_stage(self, rank, stage)


@lru_cache(maxsize=4096)
def _at_stage(mesh: Mesh, rank: int, stage: int) -> int:
    # Move along the pipeline axis only, tier by tier.
    if mesh.order:
        group, inside = divmod(stage, mesh.stages_inside)
        stage = mesh.order[group] * mesh.stages_inside + inside
    for tier, degree in enumerate(mesh.group(*PIPELINE)):
        stage, place = divmod(stage, degree)
        rank = mesh.peers(rank, tier, PIPELINE)[place]
    return rank


@lru_cache(maxsize=65536)
def _interned(degrees: tuple[tuple[int, ...], ...], *more: Any) -> Mesh:
    # The planner requests the same few meshes many times, and a mesh caches its derived values.
    return Mesh(degrees, *more)


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
    """The error if a plan with `axis` is built into programs without a sequence length."""
    return PlanError(f"a plan with a {axis} axis needs the length of a sequence: its messages are activations")


def tier_degrees(row: _Table) -> dict[str, int]:
    """Degrees of one tier by `ORDER` axis, from its row of a plan's mapping."""
    found: dict[str, int] = {}
    for axis, entry in row.items():
        found.update(entry if isinstance(entry, Mapping) else {_UNFACTORED.get(axis, axis): entry})
    # Depth shards weights and splits the batch as the data axis does, so it counts there.
    found["data"] = found.get("data", 1) * found.pop("depth", 1)
    return found


def position(degrees: Sequence[int], coordinates: Sequence[int]) -> int:
    """Index of a rank's part if the tiers divide a whole evenly in turn, innermost first."""
    index = 0
    for degree, here in zip(degrees, coordinates, strict=True):
        index = index * degree + here
    return index

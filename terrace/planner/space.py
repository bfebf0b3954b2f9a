"""Search space: degrees, placements and schedule numbers for a task.

Degrees are chosen tier by tier, so every choice is a mapping table. Rules that exclude choices that never pay off:

- tensor is innermost, and fills a tier before it extends to the next: it divides the innermost tier, or the innermost
  tier divides it;
- the innermost tensor ranks are columns, a power of two: one unless a pin allows more. Depth is not a choice of its
  own: it equals data ranks with parameters sharded over their tier;
- context follows tensor in the same way, as Ulysses, as a ring, or as both on any tier, with Ulysses inside the ring;
  degrees that would pad sequences are excluded. Pipeline and data share the rest in any order;
- ranks that cut every part of a stack are on the innermost tier where a stage has ranks; ranks that hold different
  parts follow them, and together they fill a tier before stacks extend to the next (terrace.planner.divisions);
- of placements that shard over the same ranks, because a tier between them has no data ranks, one is kept.

`unit` is a choice only if a gather or a reduction is made per unit, or if a pipeline's schedule passes its chunks in
units; chunks are a choice only in a pipeline.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import product
from typing import NamedTuple

from terrace.cluster.software import Software
from terrace.plan.as_software import axes_of, sharing
from terrace.plan.context import CHUNKS_PER_RING_RANK, Heads
from terrace.plan.context_rules import why_no_scan, why_whole
from terrace.plan.dims import cut_sizes
from terrace.plan.layout import DEVICE
from terrace.plan.mesh import Mesh
from terrace.plan.plan import AXES, CONTEXT_AXES
from terrace.plan.validate import LONGEST_ROUNDED_UNIT
from terrace.planner.divisions import divisors, stack_forms
from terrace.planner.pins import MOST, Pins
from terrace.planner.task import Placement, Task


class OpenMesh(NamedTuple):
    """A mesh of the space.

    If open, its context forms are still to be chosen, and `mesh` has all context ranks in a ring. If it `divides`, so
    is its division of stacks, and `mesh` has none.
    """

    mesh: Mesh
    is_open: bool = False
    divides: bool = False


class Group(NamedTuple):
    """Shapes with the same tensor ranks and stages, and micro-batches that give a rank the same number of tokens.

    They differ in how the other ranks are split between the context and the data axis; their steps have the same number
    of micro-batches. `shape` and `micro_batch` have the least compute of all (`least_of`), and the group's division of
    stacks.
    """

    shape: OpenMesh
    micro_batch: int
    recompute: int
    num_micros: int
    alike: tuple[tuple[OpenMesh, int], ...]  # with their micro-batches, before stacks are divided

    @property
    def members(self) -> list[tuple[OpenMesh, int]]:
        return [(self._divided(shape), micro_batch) for shape, micro_batch in self.alike]

    @property
    def member(self) -> OpenMesh:
        """Some member, to read values that all share."""
        return self._divided(self.alike[0][0])

    def _divided(self, shape: OpenMesh) -> OpenMesh:
        return OpenMesh(shape.mesh.with_stacks_of(self.shape.mesh), shape.is_open, self.shape.divides)

    @property
    def key(self) -> tuple[int, str, int, int, OpenMesh, int]:
        """Tie break between entries of equal bound."""
        return self.recompute, "", 1, self.micro_batch, self.shape, 0


@dataclass(frozen=True, kw_only=True)
class Space:
    """Allowed choices: axes that may exceed degree 1, pins, and placements if given."""

    task: Task
    axes: tuple[str, ...] = AXES
    pins: Pins = field(default_factory=Pins)
    placements: tuple[Placement, ...] | None = None

    @cached_property
    def form_ranges(self) -> tuple[tuple[int, int], ...]:
        """The fewest and the most context ranks of each form."""
        ranges = (self.pins.ranges.get(form, (1, MOST)) for form in CONTEXT_AXES)
        if self.task.runs_all:
            return tuple(ranges)
        known = self.task.cluster.device.software.plans.axes
        return tuple(
            (low, high if form in known else 1) for form, (low, high) in zip(CONTEXT_AXES, ranges, strict=True)
        )


def closed(space: Space, shape: OpenMesh) -> list[Mesh]:
    """All meshes of a shape, fewest Ulysses ranks first."""
    if not shape.divides:
        return context_forms(space, shape)
    return [each for divided in divided_shapes(space, shape) for each in context_forms(space, divided)]


def context_forms(space: Space, shape: OpenMesh) -> list[Mesh]:
    """The context forms of a shape, fewest Ulysses ranks first."""
    mesh = shape.mesh
    return [mesh.with_ulysses(degrees) for degrees in forms_of(space, mesh)] if shape.is_open else [mesh]


def divided_shapes(space: Space, shape: OpenMesh) -> list[OpenMesh]:
    """A shape with every division of stacks, fewest ranks first."""
    return [
        OpenMesh(shape.mesh.with_stacks(*degrees), shape.is_open)
        for degrees in stack_forms(space.task, space.pins, shape.mesh)
    ]


def divided_groups(space: Space, group: Group) -> list[Group]:
    """A group with every division of stacks, fewest ranks first; all its shapes have the same ranks per stage."""
    shape, mesh = group.shape, group.member.mesh
    divided = [mesh.with_stacks(*degrees) for degrees in stack_forms(space.task, space.pins, mesh)]
    return [group._replace(shape=OpenMesh(shape.mesh.with_stacks_of(each), shape.is_open)) for each in divided]


def forms_of(space: Space, mesh: Mesh) -> tuple[tuple[int, ...], ...]:
    """Possible Ulysses degrees per tier; the remaining context ranks form a ring.

    The Ulysses degree divides the heads of a tensor rank, and divides or is a multiple of its key-value heads. Linear
    layers pass their states on a ring alone.
    """
    task, degrees = space.task, mesh.group("context")
    found = _forms(degrees, task.sequence, task.heads(mesh.total("rows")), space.form_ranges)
    total, has_scan = math.prod(degrees), any(spec.operations.delta.heads for spec in task.kinds.specs)
    if not has_scan:
        return found
    return tuple(
        forms
        for forms in found
        if not why_no_scan(task.kinds.specs, task.sequence, total // math.prod(forms), math.prod(forms))
    )


@lru_cache(maxsize=4096)
def _forms(
    degrees: tuple[int, ...], sequence: int, heads: tuple[Heads, ...], ranges: tuple[tuple[int, int], ...]
) -> tuple[tuple[int, ...], ...]:
    total, found = math.prod(degrees), []
    for forms in product(*map(divisors, degrees)):
        ulysses = math.prod(forms)
        ring = total // ulysses
        # A ring distributes chunks of the sequence to balance causal attention, so chunks must divide evenly.
        chunks = 1 if ring == 1 else CHUNKS_PER_RING_RANK * ring
        if not all(low <= degree <= high for degree, (low, high) in zip((ulysses, ring), ranges, strict=True)):
            continue
        if all(each.can_split(ulysses) for each in heads) and sequence % math.lcm(chunks, ring * ulysses) == 0:
            found.append(forms)
    return tuple(sorted(found, key=lambda forms: (math.prod(forms), forms)))


def groups(space: Space, *, by_tokens: bool) -> Iterator[Group]:
    """All (mesh with open context forms, micro-batch) pairs in groups, without recomputation.

    If a rank's compute does not depend only on its tokens (not `by_tokens`), each pair is its own group.
    """
    alike: dict[Mesh, list[OpenMesh]] = {}
    for shape in open_meshes(space):
        alike.setdefault(shape.mesh.only("tensor", "pipeline") if by_tokens else shape.mesh, []).append(shape)
    for shapes in alike.values():
        members: dict[int, list[tuple[OpenMesh, int]]] = {}
        for shape in shapes:
            data = shape.mesh.total("data")
            for micro_batch in micro_batches(space, data):
                members.setdefault(space.task.batch // (data * micro_batch), []).append((shape, micro_batch))
        for num_micros, found in members.items():
            shape, micro_batch = least_of(space, *found[0]) if by_tokens else found[0]
            yield Group(shape, micro_batch, 0, num_micros, tuple(found))


def least_of(space: Space, shape: OpenMesh, micro_batch: int) -> tuple[OpenMesh, int]:
    """The shape and micro-batch with the same tokens and the fewest context ranks, most of them Ulysses.

    Let a/b be the sequences per context rank in lowest terms. Any shape with the same number has a multiple of b
    context ranks, and its Ulysses degree divides the heads h, so its ring is a multiple of b / gcd(b, h). With k b
    context ranks it has k a sequences: the same tokens, and the same products, in at least as many rounds.
    """
    mesh, context = shape.mesh.only("tensor", "pipeline"), shape.mesh.total("context")
    common = math.gcd(micro_batch, context)
    queries = tuple(heads.queries for heads in space.task.heads(mesh.total("rows")))
    least = _least_mesh(mesh, context // common, queries).with_stacks_of(shape.mesh)
    return OpenMesh(least, divides=shape.divides), micro_batch // common


@lru_cache(maxsize=65536)
def _least_mesh(mesh: Mesh, context: int, queries: tuple[int, ...]) -> Mesh:
    if context == 1:
        return mesh
    ulysses = math.gcd(context, *queries)
    # No message is priced on these ranks, so they may be on any tier.
    columns, rows, _, _, _, _, pipeline = mesh.degrees[0]
    return Mesh(((columns, rows, ulysses, context // ulysses, 1, 1, pipeline), *mesh.degrees[1:]))


def open_meshes(space: Space) -> Iterator[OpenMesh]:
    """All meshes, with their context forms left open."""
    task, pins = space.task, space.pins
    axes = axes_of(task.cluster.device.software, space.axes)
    sizes = [tier.size for tier in task.cluster.tiers]
    # Only parameters with declared dims can be cut, and a token must be whole where a router reads it; only blocks
    # with heads bring tokens of several ranks together.
    params = [param for block in task.kinds.specs for param in block.params if param.shape]
    can_cut, mixes = all(param.dims for param in params), any(param.is_stack for param in params)
    attends = any(block.attends for block in task.kinds.specs) and not why_whole(task.kinds.specs, task.sequence)
    most = task.most_stages
    cut_by_rows, cut_by_columns = cut_sizes(task.kinds.specs, "rows"), cut_sizes(task.kinds.specs, "columns")
    most_columns = pins.ranges.get("columns", (1, 1))[1]

    def possible(columns: int, rows: int, context: int, data: int, pipeline: int) -> bool:
        # Degrees only grow from tier to tier, and divisors of a valid degree are valid, so a failure ends the branch.
        return (
            (columns * rows == 1 or can_cut)
            and (columns == 1 or not mixes)
            and (context == 1 or attends)
            and task.batch % data == 0
            and all(size % rows == 0 for size in cut_by_rows)
            and all(size % columns == 0 for size in cut_by_columns)
            and columns <= most_columns
            and task.sequence % context == 0
            and pipeline <= most
        )

    def extend(tiers: tuple[_Degrees, ...], totals: _Degrees) -> Iterator[OpenMesh]:
        if len(tiers) == len(sizes):
            columns, rows, context, data, pipeline = totals
            named = {"data": data, "tensor": columns * rows, "context": context, "pipeline": pipeline}
            if all(pins.allows(axis, degree) for axis, degree in (*named.items(), ("columns", columns))):
                mesh = _mesh(tiers)
                if not stack_forms(space.task, space.pins, mesh):
                    return
                if context == 1:
                    if all(pins.allows(form, 1) for form in CONTEXT_AXES):
                        yield OpenMesh(mesh, divides=task.divides_stacks)
                # Without any form the context ranks cannot divide heads and sequence.
                elif forms_of(space, mesh):
                    yield OpenMesh(mesh, is_open=True, divides=task.divides_stacks)
            return
        for outer in _tier_degrees(sizes[len(tiers)], axes, most_columns):
            # Tensor and context extend to an outer tier only if they fill the inner one.
            if tiers and not _follows(tiers[-1], outer, sizes[len(tiers) - 1]):
                continue
            grown = (
                totals[0] * outer[0],
                totals[1] * outer[1],
                totals[2] * outer[2],
                totals[3] * outer[3],
                totals[4] * outer[4],
            )
            if possible(*grown):
                yield from extend((*tiers, outer), grown)

    yield from extend((), (1, 1, 1, 1, 1))


_Degrees = tuple[int, int, int, int, int]  # columns, rows, context, data, pipeline


@lru_cache(maxsize=65536)
def _mesh(tiers: tuple[_Degrees, ...]) -> Mesh:
    return Mesh(tuple((columns, rows, 1, context, 1, *rest) for columns, rows, context, *rest in tiers))


def _follows(inner: _Degrees, outer: _Degrees, inner_size: int) -> bool:
    tensor = inner[0] * inner[1]
    if outer[0] * outer[1] > 1 and tensor != inner_size:
        return False
    if outer[0] > 1 and inner[0] != tensor:
        return False
    return outer[2] == 1 or tensor * inner[2] == inner_size


@lru_cache(maxsize=4096)
def _tier_degrees(size: int, axes: tuple[str, ...], most_columns: int = 1) -> tuple[_Degrees, ...]:
    degrees = divisors(size)
    tensors, contexts, pipelines = (degrees if axis in axes else (1,) for axis in ("tensor", "context", "pipeline"))
    plain = [
        (1, tensor, context, size // (tensor * context * pipeline), pipeline)
        for tensor in tensors
        for context in contexts
        if size % (tensor * context) == 0
        for pipeline in pipelines
        if size % (tensor * context * pipeline) == 0
    ]
    # Kept apart from the plain degrees: without a pin on columns this list is empty.
    powers = [1 << power for power in range(1, min(most_columns, size).bit_length())]
    factored = [
        (columns, tensor // columns, context, data, pipeline)
        for _, tensor, context, data, pipeline in plain
        for columns in powers
        if tensor % columns == 0
    ]
    return (*plain, *factored)


def placements(space: Space, mesh: Mesh) -> tuple[Placement, ...]:
    if space.placements is not None:
        return space.placements
    ranges = {name: span for name, span in space.pins.ranges.items() if name in (*_STATES, "params_backward")}
    found = _placements(mesh.state, tuple(sorted(ranges.items())))
    return found if space.task.runs_all else _run_by(space.task.cluster.device.software, mesh.state, found)


@lru_cache(maxsize=4096)
def _run_by(software: Software, degrees: tuple[int, ...], found: tuple[Placement, ...]) -> tuple[Placement, ...]:
    return tuple(
        each
        for each in found
        if sharing(degrees, each.params, each.grads, each.optimizer, each.backward) in software.plans.states
    )


_STATES = ("params", "grads", "optimizer")


@lru_cache(maxsize=4096)
def _placements(degrees: tuple[int, ...], ranges: tuple[tuple[str, tuple[int, int]], ...]) -> tuple[Placement, ...]:
    pins = Pins(dict(ranges))
    open_places = [DEVICE, *(tier for tier, degree in enumerate(degrees) if degree > 1)]
    places = {
        # A pinned state may name any tier: a tier without data ranks shards as the next inner one does.
        state: [
            place
            for place in (range(DEVICE, len(degrees)) if state in pins.ranges else open_places)
            if pins.allows(state, place)
        ]
        for state in _STATES
    }
    found = []
    for params in places["params"]:
        # A secondary copy pays off only on a tier inside the parameters' own.
        inside = [DEVICE, *(place for place in open_places if DEVICE < place < params)]
        for backward in inside:
            if not pins.allows("params_backward", backward):
                continue
            found += [
                Placement(params, grads, optimizer, backward)
                for grads in places["grads"]
                if grads >= params
                for optimizer in places["optimizer"]
                if optimizer >= grads
            ]
    return tuple(found)


def units(space: Space, num_micros: int, placement: Placement, pipelined: bool) -> tuple[int, ...]:
    """Possible units: divisors of `num_micros`."""
    if space.task.keep.grads_below:  # other units are refused (terrace.plan.validate.check_units)
        return tuple(unit for unit in passing_units(space, num_micros) if unit == num_micros)
    # Only parameters that are sharded or below the device are gathered, and only sharded gradients reduced, per unit.
    repeats = placement.params > DEVICE or placement.grads > DEVICE or space.task.keep.params_below
    # A longer unit saves nothing unless a gather or a reduction is repeated per unit.
    if repeats and not pipelined:
        return passing_units(space, num_micros)
    return (1,) if space.pins.allows("unit", 1) else ()


def passing_units(space: Space, num_micros: int) -> tuple[int, ...]:
    options = divisors(num_micros)
    longest = LONGEST_ROUNDED_UNIT if space.task.runs_all else 1
    return tuple(unit for unit in options if unit <= longest and space.pins.allows("unit", unit))


def micro_batches(space: Space, data_degree: int) -> tuple[int, ...]:
    """Micro-batch sizes that divide a data rank's share of the batch."""
    share = space.task.batch // data_degree
    return tuple(size for size in divisors(share) if space.pins.allows("micro_batch", size))


def recomputations(space: Space, mesh: Mesh) -> list[int]:
    """Values of `recompute` on a mesh, within the pins; each recomputes at least what the previous ones do."""
    task, pins = space.task, space.pins
    tensor, context, pipeline = (mesh.total(axis) > 1 for axis in ("tensor", "context", "pipeline"))
    chain = task.recomputations.chain(tensor=tensor, context=context, partly=not pipeline)
    if "recompute" not in pins.ranges:
        return chain
    return [value for value in dict.fromkeys((chain[0], chain[-1])) if pins.allows("recompute", int(value > 0))]

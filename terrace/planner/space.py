"""The space that is searched: which degrees, placements and schedule numbers there are for a task.

Degrees are chosen tier by tier, so that every choice is a mapping table. Three rules keep out what never pays:

- tensor is innermost, and takes whole tiers before it goes on to the next: it divides the innermost tier, or
  the innermost tier divides it;
- of the tensor ranks the innermost are columns, a power of two of them: one, but where a pin allows more. Depth is no
  choice of its own: it is data ranks with parameters sharded over their tier;
- context follows tensor in the same way, as Ulysses, as a ring, or both on any tier, Ulysses inside the ring where a
  tier has both; no degrees are taken that would pad sequences. Pipeline and data share what is left in any order;
- of placements that shard over the same ranks, because a tier between them has no data ranks, one is kept.

`unit` counts only where a gather or a reduction is made per unit, or where a pipeline's schedule passes its chunks in
units; chunks count only where there is a pipeline.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from terrace.plan import AXES
from terrace.plan.context import CHUNKS_PER_RING_RANK, Heads
from terrace.plan.layout import DEVICE
from terrace.plan.plan import CONTEXT_AXES
from terrace.plan.validate import LONGEST_ROUNDED_UNIT
from terrace.planner.pins import MOST, Pins
from terrace.planner.task import CONTEXT, DATA, PIPELINE, TENSOR, Placement, Row, Task, columns_of, row_of, ulysses_of

Rows = tuple[Row, ...]


class Shape(NamedTuple):
    """A mapping table with what follows from it: total degrees, and per tier those that states are sharded over.

    An *open* one leaves the forms of its context ranks to be chosen (`closed`); its rows say nothing of Ulysses.
    """

    rows: Rows
    data: int
    tensor: int
    context: int
    pipeline: int
    columns: int  # of the tensor ranks
    state: tuple[int, ...]
    inner: Rows  # the tensor and context degrees alone: what the seconds of a block depend on
    crossed: tuple[int, ...]  # the tiers that some boundary between pipeline stages crosses
    ulysses: int  # of the context ranks
    is_open: bool = False


@lru_cache(maxsize=65536)
def shape_of(rows: Rows) -> Shape:
    """Return the shape of a mapping table."""
    data, tensor, context, pipeline = (math.prod(row[axis] for row in rows) for axis in range(len(AXES)))
    inner = tuple(row_of(1, row[TENSOR], row[CONTEXT], 1, columns_of(row), ulysses_of(row)) for row in rows)
    state = tuple(row[DATA] * row[CONTEXT] for row in rows)
    crossed = tuple(tier for tier, row in enumerate(rows) if row[PIPELINE] > 1)
    columns = math.prod(columns_of(row) for row in rows)
    ulysses = math.prod(ulysses_of(row) for row in rows)
    return Shape(rows, data, tensor, context, pipeline, columns, state, inner, crossed, ulysses)


@dataclass(frozen=True, kw_only=True)
class Space:
    """What may be chosen: axes above degree 1, pins, and placements where they are given beforehand."""

    task: Task
    axes: tuple[str, ...] = AXES
    pins: Pins = field(default_factory=Pins)
    placements: tuple[Placement, ...] | None = None


def shapes(space: Space) -> Iterator[Shape]:
    """Yield every mapping table that the model, the batch and the pins allow."""
    for shape in open_shapes(space):
        yield from closed(space, shape) if shape.is_open else (shape,)


def closed(space: Space, shape: Shape) -> list[Shape]:
    """Return an open shape in every form that its context ranks can have, those with fewest Ulysses ranks first."""
    found = []
    for forms in forms_of(space, shape.inner):
        rows = (row_of(*row[:4], columns_of(row), ulysses) for row, ulysses in zip(shape.rows, forms, strict=True))
        found.append(shape_of(tuple(rows)))
    return found


def forms_of(space: Space, inner: Rows) -> tuple[tuple[int, ...], ...]:
    """Return the Ulysses degrees of every tier that context ranks can have; the rest of them is a ring.

    Heads are dealt out whole: Ulysses divides those of a tensor rank, and of its key-value heads it divides the
    number or is a multiple.
    """
    shape = shape_of(inner)
    return _forms(
        tuple(row[CONTEXT] for row in inner),
        space.task.sequence,
        space.task.heads(shape.tensor // shape.columns),
        tuple(space.pins.ranges.get(form, (1, MOST)) for form in CONTEXT_AXES),
    )


@lru_cache(maxsize=4096)
def _forms(
    degrees: tuple[int, ...], sequence: int, heads: Heads, ranges: tuple[tuple[int, int], ...]
) -> tuple[tuple[int, ...], ...]:
    total, found = math.prod(degrees), []
    for forms in product(*map(divisors, degrees)):
        ulysses = math.prod(forms)
        ring = total // ulysses
        chunks = 1 if ring == 1 else CHUNKS_PER_RING_RANK * ring
        if not all(low <= degree <= high for degree, (low, high) in zip((ulysses, ring), ranges, strict=True)):
            continue
        if heads.can_split(ulysses) and sequence % math.lcm(chunks, ring * ulysses) == 0:
            found.append(forms)
    return tuple(sorted(found, key=lambda forms: (math.prod(forms), forms)))


def open_shapes(space: Space) -> Iterator[Shape]:
    """Yield every mapping table, those with context ranks in no form yet."""
    task, pins = space.task, space.pins
    model, sizes = task.model, [tier.size for tier in task.cluster.tiers]

    most_columns = pins.ranges.get("columns", (1, 1))[1]

    def possible(data: int, tensor: int, context: int, pipeline: int, columns: int) -> bool:
        """Degrees so far; they only grow, and what a degree divides is divided by its divisors too."""
        cut_by_rows = (model.num_heads, model.num_kv_heads, model.intermediate_size)
        return (
            task.batch % data == 0
            and all(size % (tensor // columns) == 0 for size in cut_by_rows)
            and model.hidden_size % columns == 0
            and columns <= most_columns
            and task.sequence % context == 0
            and pipeline <= model.num_layers
        )

    def extend(rows: Rows, degrees: tuple[int, int, int, int, int]) -> Iterator[Shape]:
        tier = len(rows)
        if tier == len(sizes):
            if all(pins.allows(axis, degree) for axis, degree in zip((*AXES, "columns"), degrees, strict=True)):
                shape = shape_of(rows)
                if shape.context == 1:
                    if all(pins.allows(form, 1) for form in CONTEXT_AXES):
                        yield shape
                elif forms_of(space, shape.inner):
                    yield shape._replace(is_open=True)
            return
        inner = rows[-1] if rows else None
        for row in _rows(sizes[tier], space.axes, most_columns):
            if inner is not None and row[TENSOR] > 1 and inner[TENSOR] != sizes[tier - 1]:
                continue
            if inner is not None and columns_of(row) > 1 and columns_of(inner) != inner[TENSOR]:
                continue
            if inner is not None and row[CONTEXT] > 1 and inner[TENSOR] * inner[CONTEXT] != sizes[tier - 1]:
                continue
            grown = (
                degrees[DATA] * row[DATA],
                degrees[TENSOR] * row[TENSOR],
                degrees[CONTEXT] * row[CONTEXT],
                degrees[PIPELINE] * row[PIPELINE],
                degrees[4] * columns_of(row),
            )
            if possible(*grown):
                yield from extend((*rows, row), grown)

    yield from extend((), (1, 1, 1, 1, 1))


@lru_cache(maxsize=4096)
def _rows(size: int, axes: tuple[str, ...], most_columns: int = 1) -> tuple[Row, ...]:
    """Return every way to share a tier of `size` among the axes, with at most so many columns of the tensor ranks."""
    degrees = divisors(size)
    tensors = degrees if "tensor" in axes else (1,)
    contexts = degrees if "context" in axes else (1,)
    pipelines = degrees if "pipeline" in axes else (1,)
    plain: list[Row] = [
        (size // (tensor * context * pipeline), tensor, context, pipeline)
        for tensor in tensors
        for context in contexts
        if size % (tensor * context) == 0
        for pipeline in pipelines
        if size % (tensor * context * pipeline) == 0
    ]
    powers = [1 << power for power in range(1, min(most_columns, size).bit_length())]
    factored: list[Row] = [
        (row[DATA], row[TENSOR], row[CONTEXT], row[PIPELINE], columns)
        for row in plain
        for columns in powers
        if row[TENSOR] % columns == 0
    ]
    return (*plain, *factored)


@lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a number in ascending order."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


def placements(space: Space, shape: Shape) -> tuple[Placement, ...]:
    """Return the placements for a mapping table, innermost first."""
    if space.placements is not None:
        return space.placements
    ranges = {name: span for name, span in space.pins.ranges.items() if name in (*_STATES, "params_backward")}
    return _placements(shape.state, tuple(sorted(ranges.items())))


_STATES = ("params", "grads", "optimizer")


@lru_cache(maxsize=4096)
def _placements(degrees: tuple[int, ...], ranges: tuple[tuple[str, tuple[int, int]], ...]) -> tuple[Placement, ...]:
    pins = Pins(dict(ranges))
    open_places = [DEVICE, *(tier for tier, degree in enumerate(degrees) if degree > 1)]
    places = {
        # A pinned state may name any tier: where no data ranks are, the tier shards as the one inside it does.
        state: [
            place
            for place in (range(DEVICE, len(degrees)) if state in pins.ranges else open_places)
            if pins.allows(state, place)
        ]
        for state in _STATES
    }
    found = []
    for params in places["params"]:
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
    """Return how many micro-batches may pass a block together; a divisor of their number."""
    repeats = placement.params > DEVICE or placement.grads > DEVICE
    if repeats and not pipelined:
        return passing_units(space, num_micros)
    return (1,) if space.pins.allows("unit", 1) else ()


def passing_units(space: Space, num_micros: int) -> tuple[int, ...]:
    """Return the units that divide so many micro-batches and that the pins allow."""
    options = divisors(num_micros)
    return tuple(unit for unit in options if unit <= LONGEST_ROUNDED_UNIT and space.pins.allows("unit", unit))


def micro_batches(space: Space, data_degree: int) -> tuple[int, ...]:
    """Return the micro-batches that divide what a data rank gets of the batch."""
    share = space.task.batch // data_degree
    return tuple(size for size in divisors(share) if space.pins.allows("micro_batch", size))

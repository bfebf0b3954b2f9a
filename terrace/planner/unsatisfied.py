"""Why no plan satisfies the pins: the rule that a pinned number breaks, and the possible numbers."""

import math
from collections.abc import Iterator
from dataclasses import replace

from terrace.plan.dims import cut_sizes
from terrace.plan.plan import AXES, CONTEXT_AXES
from terrace.planner.divisions import broken_placement, broken_rule, multiples, stack_forms
from terrace.planner.pins import STACK_PINS, Pins
from terrace.planner.space import OpenMesh, Space, context_forms, micro_batches, open_meshes
from terrace.planner.task import Task

_COUNTED = (*STACK_PINS, *AXES, *CONTEXT_AXES, "columns", "micro_batch")  # numbers that follow from a mapping table
_MOST_TOLD = 8
_MOST_COLUMNS = 64  # that are looked at where a pin on columns is the question


def unsatisfied(space: Space) -> str:
    """Error text on the first pin that no plan satisfies, alone or with the others, with the possible numbers.

    "" if no numeric pin is to blame.
    """
    pinned = [name for name in _COUNTED if name in space.pins.ranges]
    for name in pinned:
        columns = {each: space.pins.ranges[each] for each in ("columns",) if each in pinned and each != name}
        possible = _values(replace(space, pins=Pins(columns)), name)
        if possible and not any(space.pins.allows(name, value) for value in possible):
            value = _pinned(space.pins, name, possible)
            return f"{_broken(space.task, name, value)}; {name} can be {_told(possible, value)}"
    for name in pinned:
        others = {each: span for each, span in space.pins.ranges.items() if each != name}
        possible = _values(replace(space, pins=Pins(others, space.pins.schedule)), name)
        if possible and not any(space.pins.allows(name, value) for value in possible):
            return f"beside the other pins {name} can be {_told(possible, _pinned(space.pins, name, possible))}"
    return ""


def _values(space: Space, name: str) -> list[int]:
    if name == "columns":
        space = replace(space, pins=Pins(space.pins.ranges | {name: (1, _MOST_COLUMNS)}, space.pins.schedule))
    return sorted({value for mesh in open_meshes(space) for value in _of_shape(space, mesh, name)})


def _of_shape(space: Space, shape: OpenMesh, name: str) -> Iterator[int]:
    if name in STACK_PINS:
        at = STACK_PINS.index(name)
        yield from (math.prod(form[at]) for form in stack_forms(space.task, space.pins, shape.mesh))
    elif name in CONTEXT_AXES:
        yield from (mesh.total(name) for mesh in context_forms(space, shape))
    elif name == "micro_batch":
        yield from micro_batches(space, shape.mesh.total("data"))
    else:
        yield shape.mesh.total(name)


def _pinned(pins: Pins, name: str, possible: list[int]) -> int:
    # The end of a range that is nearer to the possible values.
    low, high = pins.ranges[name]
    return low if low > possible[0] else high


def _told(possible: list[int], value: int) -> str:
    near = sorted(sorted(possible, key=lambda each: (abs(math.log(each / value)), each))[:_MOST_TOLD])
    words = " or ".join(filter(None, (", ".join(map(str, near[:-1])), str(near[-1]))))
    return words if len(near) == len(possible) else f"{words}, among others"


def _broken(task: Task, name: str, value: int) -> str:
    ranks = task.cluster.world_size
    where = "the cluster" if task.islands.num == 1 else "an island"
    for number, of_what in _multiples(task, name):
        if number % value:
            return f"{name} = {value} does not divide {of_what}"
    if broken := broken_rule(task, name, value):
        return broken
    if value > ranks:
        return f"{name} = {value} is more than the {ranks} ranks of {where}"
    most = task.most_stages
    if name == "pipeline" and value > most:
        ends = ", embedding and head" if most > len(task.inner) else ""
        return f"pipeline = {value} stages are more than the {len(task.inner)} layers{ends}"
    if broken := broken_placement(name, value):
        return broken
    filled = (*STACK_PINS, "tensor", "context", *CONTEXT_AXES, "columns")
    rule = "fills a tier before it extends to the next" if name in filled else "is what other axes leave of the ranks"
    return f"{name} = {value}: {name} divides the ranks of a tier, and {rule}"


def _multiples(task: Task, name: str) -> Iterator[tuple[int, str]]:
    # Values that a number must divide in every plan.
    yield from multiples(task, name)
    if name in ("data", "micro_batch"):
        step = "a step" if task.islands.num == 1 else "an island's step"
        yield task.batch, f"the {task.batch} sequences of {step}"
    if name in ("context", *CONTEXT_AXES):
        yield task.sequence, f"the {task.sequence} tokens of a sequence"
    if name in ("tensor", "columns"):
        axis = "rows" if name == "tensor" else "columns"
        yield from ((size, f"{size}, which tensor {axis} cut") for size in cut_sizes(task.kinds.specs, axis))

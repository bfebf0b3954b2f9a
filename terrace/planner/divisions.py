"""Divisions of a model's experts among the ranks of a stage, and their pins.

A division has two degrees per tier: ranks that hold different experts, and ranks that cut every expert. A model
without experts has one division, in which every degree is 1.
"""

import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

from terrace.plan.mesh import STAGE, Mesh
from terrace.planner.pins import MOST, STACK_PINS, Pins

if TYPE_CHECKING:
    from terrace.planner.task import Task

StackForm = tuple[tuple[int, ...], tuple[int, ...]]  # ranks per tier that hold different experts, and that cut them


@lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


def stack_forms(task: "Task", pins: Pins, mesh: Mesh) -> tuple[StackForm, ...]:
    """Divisions of experts among the ranks of a stage, fewest ranks first."""
    allowed_degrees = tuple(pins.ranges.get(name, (1, MOST)) for name in STACK_PINS)
    if not task.runs_all and "experts" not in task.cluster.device.software.plans.axes:
        allowed_degrees = tuple((low, 1) for low, _ in allowed_degrees)
    return _forms(mesh.group(*STAGE), *task.stack_sizes, allowed_degrees)


@lru_cache(maxsize=4096)
def _forms(
    members: tuple[int, ...], num_experts: int, inner: int, ranges: tuple[tuple[int, int], ...]
) -> tuple[StackForm, ...]:
    found: list[StackForm] = []

    def extend(expert: tuple[int, ...], rows: tuple[int, ...]) -> None:
        tier = len(expert)
        if tier == len(members):
            totals = math.prod(expert), math.prod(rows)
            if all(low <= total <= high for total, (low, high) in zip(totals, ranges, strict=True)):
                found.append((expert, rows))
            return
        is_innermost = math.prod(members[:tier]) == 1
        fills = all(own * cut == size for own, cut, size in zip(expert, rows, members, strict=False))
        for cut in divisors(members[tier]) if is_innermost else (1,):
            for own in divisors(members[tier] // cut) if fills else (1,):
                if num_experts % (math.prod(expert) * own) == 0 and inner % (math.prod(rows) * cut) == 0:
                    extend((*expert, own), (*rows, cut))

    extend((), ())
    return tuple(sorted(found, key=lambda form: (math.prod(form[0]) * math.prod(form[1]), form)))


def neighbours(task: "Task", pins: Pins, mesh: Mesh) -> list[tuple[str, Mesh]]:
    """Meshes with a neighbouring division of experts, each with a description.

    Among fewer or more ranks, in more or fewer slices, on the ranks of the next tier, or undivided.
    """
    if not task.divides_stacks:
        return []
    whole, names = Mesh(mesh.degrees), [tier.name for tier in task.cluster.tiers]
    expert, rows = mesh.stack_degrees
    found = {whole} if mesh.divides_stacks else set[Mesh]()
    divided = [whole.with_stacks(*degrees) for degrees in stack_forms(task, pins, whole)]
    for same, axis in ((rows, 0), (expert, 1)):
        alike = [each for each in divided if each.stack_degrees[1 - axis] == same]
        alike.sort(key=lambda each: each.stack_degrees[axis])
        at = alike.index(mesh) if mesh in alike else 0
        found.update(alike[max(0, at - 1) : at + 2])
    further = one_tier_out(mesh)
    found.update(() if further is None else [further])
    return [(f"experts = {table_words(each.stack_table(names))}", each) for each in sorted(found - {mesh})]


def one_tier_out(mesh: Mesh) -> Mesh | None:
    """The mesh with the experts of the innermost dividing tier moved to as many free ranks of the next tier as
    possible.

    None if the next tier has no free rank, or no tier divides experts.
    """
    if not mesh.divides_stacks:
        return None
    expert, rows = (list(mesh.stacks.group(axis)) for axis in ("expert", "rows"))
    inner = next((tier for tier, degree in enumerate(expert[:-1]) if degree > 1), None)
    if inner is None:
        return None
    free = mesh.group(*STAGE)[inner + 1] // (expert[inner + 1] * rows[inner + 1])
    moved = math.gcd(expert[inner], free)
    if moved == 1:
        return None
    expert[inner], expert[inner + 1] = expert[inner] // moved, expert[inner + 1] * moved
    return Mesh(mesh.degrees).with_stacks(expert, rows)


def table_words(table: Mapping[str, Mapping[str, int]]) -> str:
    tiers = (f"{tier} {' x '.join(f'{axis} {degree}' for axis, degree in row.items())}" for tier, row in table.items())
    return ", ".join(tiers) or "none"


def division_notes(mesh: Mesh, tiers: list[str]) -> list[str]:
    """Note on the division of a mesh; empty if it divides no experts."""
    return [f"experts {table_words(mesh.stack_table(tiers))}"] if mesh.divides_stacks else []


def broken_rule(task: "Task", name: str, value: int) -> str:
    """Error text if a pin of experts cannot hold on any cluster; "" if it can."""
    if name in STACK_PINS and not task.divides_stacks:
        return f"{name} = {value}: no layer of this model has experts"
    if name == "columns" and any(block.has_stacks for block in task.blocks):
        return f"columns = {value}: a token must be whole where its experts are chosen"
    return ""


def broken_placement(name: str, value: int) -> str:
    """Error text if a pin breaks a rule on the tiers that divide experts; "" if not."""
    return (
        f"{name} = {value}: ranks that cut an expert are on the innermost tier alone" if name == STACK_PINS[1] else ""
    )


def multiples(task: "Task", name: str) -> Iterator[tuple[int, str]]:
    """(Number, description) of what a pin of experts must divide; nothing for other pins."""
    num_experts, inner = task.stack_sizes
    if task.divides_stacks and name in STACK_PINS:
        words = f"the {num_experts} experts of a layer", f"the inner size of an expert, {inner}"
        at = STACK_PINS.index(name)
        yield (num_experts, inner)[at], words[at]

"""Tensor messages in parts, or fused with products, that a user allows (`--allow tensor_chunks=fused`).

Unless other values are allowed, a search sends whole messages: fused products run only on CUDA devices with peer
memory access, which a description of a cluster does not prove. The search is repeated for each allowed value, on plans
that can have it. The value with the shortest step is used if its step is shorter than the others' by more than a tie.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from terrace.base.errors import PlanError
from terrace.plan.chunk_rules import why_not_fused
from terrace.plan.mesh import Mesh
from terrace.plan.plan import FUSED, Plan
from terrace.planner.ranking import TIE
from terrace.planner.space import Space
from terrace.planner.task import Task

if TYPE_CHECKING:
    from terrace.planner.products import ProductsFound

Chunks = int | Literal["fused"]
_OPTION = "tensor_chunks"
_MOST = 64  # parts: beyond them, each is shorter than the start of its message


@dataclass(frozen=True)
class ChunksFound:
    """A search with the allowed values, and the best step of each; None if no plan was found."""

    products: "ProductsFound"
    step_s: dict[Chunks, float | None]  # in the order asked for, whole messages (1) first

    @property
    def value(self) -> Chunks:
        """The value of the task that was searched."""
        return self.products.searched.space.task.tensor_chunks


def take_chunks(texts: Sequence[str], task: Task) -> tuple[list[Chunks], list[str]]:
    """Split `--allow` texts into values of `tensor_chunks` and the rest.

    Raises `PlanError` for a value that no plan of the task can have.
    """
    asked = [text.partition("=")[2].strip() for text in texts if text.partition("=")[0].strip() == _OPTION]
    rest = [text for text in texts if text.partition("=")[0].strip() != _OPTION]
    return list(dict.fromkeys(_parsed(each, task) for each in asked)), rest


def _parsed(text: str, task: Task) -> Chunks:
    said = f"--allow {_OPTION}={text}"
    tier = next((tier for tier in task.cluster.tiers if tier.size > 1), None)
    if tier is None:
        raise PlanError(f"{said} has no effect: cluster {task.cluster.name!r} is one device; leave it out")
    if text == FUSED:
        mapping = {tier.name: {"tensor": tier.size}}
        plan = Plan(
            params="device",
            grads="device",
            optimizer="device",
            mapping=mapping,
            compute=task.compute,
            master=task.master,
            wire=task.wire,
        )
        if why := why_not_fused(task.cluster, Mesh.of(task.cluster, plan), plan):
            raise PlanError(f"{said}: {why}")
        return FUSED
    if not text.isdecimal() or not 2 <= int(text) <= _MOST:
        raise PlanError(f"{said}: give a number of parts from 2 to {_MOST}, or {FUSED!r}")
    return int(text)


def find_cut(values: Sequence[Chunks], space: Space, search: Callable[[Space], "ProductsFound"]) -> ChunksFound:
    """A search of `space` with the value of `tensor_chunks` among `values` that shortens the step most, if any."""
    found: dict[Chunks, ProductsFound] = {1: search(space)}
    best: Chunks = 1
    step_s: dict[Chunks, float | None] = {1: _step_s(found[1])}
    for value in values:
        cut_space = replace(space, task=replace(space.task, tensor_chunks=value))
        found[value] = search(cut_space)
        step_s[value] = _step_s(found[value])
        # If two values tie, the earlier one is kept: whole messages, or the value that was named first.
        if (step_s[value] or math.inf) < (1 - TIE) * (step_s[best] or math.inf):
            best = value
    return ChunksFound(found[best], step_s)


def _step_s(found: "ProductsFound") -> float | None:
    best = found.searched.found.best
    return best[0].step_s if best else None

"""Narrow states that a user allows, and the search that uses them where they make the step shorter.

A search takes the storage of its task's states as given, since rounding changes the training itself. With `--allow
optimizer_states=int8` or `--allow master=bf16` it is repeated for each allowed storage, widest first, and a narrower
one is taken if it makes the step shorter or if nothing fits without it: less memory may permit less recomputation,
larger micro-batches or fewer ranks that share a state.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple, get_args

from terrace.base.errors import PlanError
from terrace.plan.state_formats import element_bytes
from terrace.planner.formats import Allowed, Searched, find_allowed
from terrace.planner.ranking import TIE
from terrace.planner.space import Space
from terrace.planner.task import Task

Master = Literal["bf16", "fp32", "fp64"]
States = Literal["bf16", "int8"]
_NAMES = {"optimizer_states": get_args(States), "master": ("bf16",)}


class Way(NamedTuple):
    """Storage of parameters and optimizer states, as in a plan."""

    master: Master
    optimizer_states: States | None

    def task(self, task: Task) -> Task:
        return replace(task, master=self.master, optimizer_states=self.optimizer_states)

    @property
    def element_bytes(self) -> float:
        """Bytes of a parameter and its two moments."""
        states = self.optimizer_states or ("fp32" if self.master == "bf16" else self.master)
        return element_bytes(self.master) + 2 * element_bytes(states)


def parse_ways(texts: Iterable[str], task: Task) -> tuple[list[Way], list[str]]:
    """Storages that `--allow optimizer_states=FORMAT` and `--allow master=bf16` add, widest first; and the other texts.

    Raises `PlanError` for an impossible value, and for one that the task has already.
    """
    asked: dict[str, list[str | None]] = {"master": [task.master], "optimizer_states": [task.optimizer_states]}
    rest = list[str]()
    for text in texts:
        name, _, value = (part.strip() for part in text.partition("="))
        if (owner := name.partition(".")[0]) in _NAMES and owner != name:
            raise PlanError(f"--allow {text}: {owner} belongs to no tier; write {owner}={_NAMES[owner][-1]}")
        if name not in _NAMES:
            rest.append(text)
            continue
        if value not in _NAMES[name]:
            known = " or ".join(_NAMES[name])
            raise PlanError(f"--allow {text}: {name} can be stored in {known}; write {name}={_NAMES[name][-1]}")
        if value in asked[name][:1]:
            raise PlanError(f"--allow {text} has no effect: {name} is stored in {value} anyway")
        if name == "master" and task.compute != "bf16":
            raise PlanError(
                f"--allow {text}: parameters that are computed with in {task.compute} would lose bits in bf16; compute "
                "in bf16, or leave it out"
            )
        asked[name].append(value)
    pairs = dict.fromkeys((master, states) for master in asked["master"] for states in asked["optimizer_states"])
    ways = [Way(*pair) for pair in list(pairs)[1:]]  # type: ignore[arg-type]  # the first is the task's own
    return sorted(ways, key=lambda way: -way.element_bytes), rest


def find_stored(space: Space, allowed: Allowed, ways: Sequence[Way], count: int, limit: int) -> tuple[Searched, float]:
    """`find_allowed` with states stored in one of `ways` where that shortens the step; also the step without."""
    found = find_allowed(space, allowed, count, limit)
    plain_s = _step_s(found)
    for way in ways:
        other = find_allowed(replace(space, task=way.task(space.task)), allowed, count, limit)
        if _step_s(other) < (1 - TIE) * _step_s(found):
            found = other
    return found, plain_s


def _step_s(searched: Searched) -> float:
    return searched.found.best[0].step_s if searched.found.best else math.inf

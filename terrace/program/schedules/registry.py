"""Schedules by name. Adding one is adding a file to this folder with a function under `@schedule("its name")`.

A schedule is a pure function from numbers to `Orders`. It names the numbers it takes as its parameters:
`num_stages` and `num_micros` always, `num_chunks`, `unit` or others where it has them.
"""

import inspect
import pkgutil
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any, TypeVar

from terrace.base.errors import PlanError, did_you_mean
from terrace.program.schedules.orders import Orders

_Builder = TypeVar("_Builder", bound=Callable[..., Orders])

_found: dict[str, Callable[..., Orders]] = {}
_rounds: set[str] = set()


def schedule(name: str, *, rounds: bool = False) -> Callable[[_Builder], _Builder]:
    """Register the decorated function as the schedule `name`.

    With `rounds`, its order repeats every `num_stages` micro-batches; otherwise every micro-batch.
    """

    def register(builder: _Builder) -> _Builder:
        assert name not in _found, f"two schedules are called {name!r}"
        _found[name] = builder
        if rounds:
            _rounds.add(name)
        return builder

    return register


@cache
def _schedules() -> dict[str, Callable[..., Orders]]:
    folder = import_module(__package__)
    # Importing a module registers its schedules.
    for module in pkgutil.iter_modules(folder.__path__, f"{__package__}."):
        import_module(module.name)
    return dict(sorted(_found.items()))


def schedule_names() -> list[str]:
    return list(_schedules())


@cache
def takes(name: str) -> frozenset[str]:
    """The parameter names of a schedule. Raises `PlanError` for an unknown schedule."""
    builder = _schedules().get(name)
    if builder is None:
        raise PlanError(f"no schedule {name!r}{did_you_mean(name, schedule_names())}")
    return frozenset(inspect.signature(builder).parameters)


def in_rounds(name: str) -> bool:
    """Whether the order of a schedule repeats every `num_stages` micro-batches."""
    _schedules()
    return name in _rounds


@cache
def takes_unit(name: str) -> bool:
    """Whether the schedule `name` has a parameter `unit`; False for an unknown name."""
    builder = _schedules().get(name)
    return builder is not None and "unit" in inspect.signature(builder).parameters


@cache
def _parameters(builder: Callable[..., Orders]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(builder).parameters


def orders_for(name: str, **numbers: Any) -> Orders:
    """The orders of the schedule `name` for its parameters `numbers`.

    A schedule without chunks accepts `num_chunks = 1`. Raises `PlanError` for an unknown name, a missing or unknown
    parameter, and values that the schedule does not support.
    """
    takes(name)
    builder = _schedules()[name]
    known = _parameters(builder)
    # Every schedule has at least one chunk, so giving 1 is harmless.
    if "num_chunks" not in known and numbers.get("num_chunks") == 1:
        del numbers["num_chunks"]
    for number, value in numbers.items():
        if number not in known:
            raise PlanError(f"{number} = {value}: schedule {name!r} takes {', '.join(known)}; leave {number} out")
    missing = [key for key, value in known.items() if value.default is value.empty and key not in numbers]
    if missing:
        raise PlanError(f"schedule {name!r} needs {', '.join(missing)}: give a value")
    return builder(**numbers)

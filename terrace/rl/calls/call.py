"""Role calls: how a method's rows are split over the ranks of its role, and from which ranks its result is collected.

A role is a plain class. Its constructor takes `(world, **settings)`; `world` is None for a single rank. Every rank of a
role receives every call, since its ranks may communicate. A method receives its share of the rows, and values as
keyword arguments:

    class Reward:
        def __init__(self, world: World | None, scale: float) -> None:
            self.scale = scale

        @call(split="data", take="data")
        def reward(self, rows: Rows) -> Rows:
            return Rows({"rewards": self.scale * rows.ragged("responses").lengths})

The arguments of `@call` for the protocols of HybridFlow (2409.19256, table 3): ONE_TO_ALL is `split=None`; 3D_PROTO and
DP_PROTO are `split="data", take="data"`; 3D_ALL_MICRO_DP is `split="replica", take="replica"`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

from terrace.base.errors import ConfigError, did_you_mean

Balance = Literal["tokens", "rows"]
Split = Literal["data", "replica"] | None
Take = Literal["data", "replica", "first", "all", "mean"]

_Method = TypeVar("_Method", bound=Callable[..., Any])
_MARK = "__terrace_call__"
_SPLITS = ("data", "replica", None)


@dataclass(frozen=True)
class Call:
    """A method that a controller may call.

    `split`: rows are split over the data ranks of the role's plan ("data"), over generation replicas ("replica"), or
    every rank gets all rows (None).
    `take`: "data" and "replica" concatenate the rows of each data rank or replica, "first" is the value of the first
    rank, "all" a list of all ranks' values, and "mean" averages a mapping of numbers over the shares of `split` (over
    data ranks without one), weighted by rows.
    `balance`: shares are balanced by tokens, or by rows for methods that pad rows to one length.
    `reads`: the columns that the method reads; only these are sent. Empty: all columns.
    `keeps_groups`: consecutive rows with the same value in the column `groups` go to the same share.
    """

    method: str
    split: Split
    take: Take
    balance: Balance = "tokens"
    reads: tuple[str, ...] = ()
    keeps_groups: bool = False

    @property
    def axis(self) -> str:
        """The axis over which numbers are averaged, or from whose ranks rows are taken."""
        return self.take if self.take in ("data", "replica") else self.split or "data"


def call(
    *,
    split: Split = None,
    take: Take = "first",
    balance: Balance = "tokens",
    reads: tuple[str, ...] = (),
    keeps_groups: bool = False,
) -> Callable[[_Method], _Method]:
    """Mark a method as callable by a controller; for the arguments see `Call`.

    Raises `ConfigError` for an unknown `split`, `take` or `balance`, and for rows that are split over one axis and
    collected over the other, which would lose or duplicate rows.
    """
    if split not in _SPLITS:
        raise ConfigError(f"split = {split!r}: must be one of {', '.join(map(repr, _SPLITS))}")
    if take not in get_args(Take):
        raise ConfigError(f"take = {take!r}{did_you_mean(str(take), get_args(Take))}")
    if balance not in get_args(Balance):
        raise ConfigError(f"balance = {balance!r}{did_you_mean(str(balance), get_args(Balance))}")
    if split is not None and take in ("data", "replica") and take != split:
        raise ConfigError(f"split = {split!r} with take = {take!r}: take rows over the axis that they were split over")

    def mark(method: _Method) -> _Method:
        setattr(method, _MARK, Call(method.__name__, split, take, balance, reads, keeps_groups))
        return method

    return mark


def calls_of(worker: type) -> dict[str, Call]:
    """The calls of a class by name, inherited ones included."""
    found = (getattr(getattr(worker, name, None), _MARK, None) for name in dir(worker))
    return {each.method: each for each in found if isinstance(each, Call)}


def call_of(worker: type, method: str, role: str) -> Call:
    """The `Call` of a method; raises `ConfigError` if `worker` has no such method, or has it without `@call`."""
    calls = calls_of(worker)
    if method in calls:
        return calls[method]
    if callable(getattr(worker, method, None)):
        raise ConfigError(f"{role}.{method}: {worker.__name__}.{method} is no call; write @call(...) above it")
    raise ConfigError(f"{role}.{method}: {worker.__name__} has no such call{did_you_mean(method, calls)}")

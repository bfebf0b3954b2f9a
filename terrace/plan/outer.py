"""The outer loop of a plan: a tier that is synchronised every so many steps (docs/slow-networks.md).

Ranks that differ on `Outer.tier`, or on a tier outside it, are on different islands. Inside an island every step is
synchronous; islands exchange their changes of the parameters. Blocks take turns: block b belongs to fragment b mod
`fragments`, and each fragment has one exchange in a cycle of `every` steps (local SGD 1805.09767, DiLoCo 2311.08105,
Streaming DiLoCo 2501.18512, CO2 2401.16265).
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from terrace.cluster.cluster import Cluster

_RATES = {"nesterov": 0.7, "momentum": 1.0, "average": 1.0}
_MOMENTA = {"nesterov": 0.9, "momentum": 0.2, "average": 0.0}


class Exchange(NamedTuple):
    """The exchanges of islands at the end of a step, by fragment.

    `arrives` were started some steps before and are applied now, `starts` are sent. `waits` says that those that start
    are also applied at this end. Without a fragment the step ends without an exchange.
    """

    arrives: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    waits: bool = False

    @property
    def applies(self) -> tuple[int, ...]:
        """Fragments that are applied."""
        return (*self.arrives, *(self.starts if self.waits else ()))


NO_EXCHANGE = Exchange()


@dataclass(frozen=True, kw_only=True)
class Outer:
    """How islands exchange; the equations are in terrace.runtime.outer_state.

    `every` is the steps of a cycle, `delay` those that an exchange may take while training goes on, 0 where it is
    waited for. `keep` is the part of an island's changes meanwhile that it keeps. `lr` and `momentum` default to those
    of the optimizer's paper. `ONE_ISLAND` has no tier and no fragment, so that it never exchanges and keeps no state.
    """

    tier: str  # the links between islands
    every: int  # steps of a cycle
    fragments: int = 1  # parts of the model that are exchanged in turn
    delay: int = 0  # steps that an exchange may take; 0: waited for
    optimizer: Literal["nesterov", "momentum", "average"] = "nesterov"  # of the outer step
    lr: float | None = None  # of the outer step; none: of the optimizer's paper
    momentum: float | None = None  # of the outer step; none: of the optimizer's paper
    keep: float = 1.0  # part of an island's changes during an exchange that it keeps
    penalty: bool = False  # the staleness gap penalty of CO2
    clip: float = 0.0  # largest magnitude of a momentum; 0: as large as it is

    @property
    def rate(self) -> float:
        """Learning rate of the outer step."""
        return _RATES[self.optimizer] if self.lr is None else self.lr

    @property
    def beta(self) -> float:
        """Momentum of the outer step."""
        return _MOMENTA[self.optimizer] if self.momentum is None else self.momentum

    @property
    def has_islands(self) -> bool:
        """Whether there are several."""
        return self is not ONE_ISLAND and self != ONE_ISLAND  # every layout asks, and nearly all have one

    def tier_between(self, cluster: "Cluster") -> int:
        """Index of the tier between islands; raises `ClusterError` for an unknown one. One island has all tiers."""
        return cluster.index(self.tier) if self.has_islands else len(cluster.tiers)

    @property
    def num_slices(self) -> int:
        """Slices in `plan.sums` that a rank keeps, each as large as its optimizer's.

        The anchor; momentum; where an exchange is under way over steps, the parameters at its start and its message.
        """
        return (self.fragments > 0) + (self.optimizer != "average") + 2 * (self.delay > 0)

    @property
    def turn(self) -> int:
        """Steps between the exchanges of one fragment and the next."""
        return self.every // max(1, self.fragments)

    @property
    def sends_last(self) -> bool:
        """Whether the next exchange of a fragment starts where the last one is applied."""
        return self.delay == self.every

    def fragment(self, block: int) -> int:
        """The fragment of a block."""
        return block % max(1, self.fragments)

    def exchange(self, step: int, under_way: Collection[int]) -> Exchange:
        """The exchange at the end of step number `step` of the run; `under_way` are fragments."""
        starts = self._starting(step)
        arrives = tuple(f for f in self._starting(step - self.delay) if f in under_way) if self.delay else ()
        return Exchange(arrives, starts, bool(starts) and not self.delay)

    def _starting(self, step: int) -> tuple[int, ...]:
        turn, left = divmod(step % self.every + 1, self.turn)
        return () if left or turn > self.fragments else (turn - 1,)


ONE_ISLAND = Outer(tier="", every=1, fragments=0, optimizer="average")


def closing(under_way: Collection[int], changed: Collection[int]) -> list[Exchange]:
    """The exchanges that end a run: those under way, then one of all fragments changed since their last, waited for."""
    found = [Exchange(arrives=tuple(sorted(under_way)))] if under_way else []
    return found + ([Exchange(starts=tuple(sorted(changed)), waits=True)] if changed else [])


def local_sgd(tier: str) -> Outer:
    """Local SGD (arXiv 1805.09767): parameters are averaged."""
    return Outer(tier=tier, every=8, optimizer="average")


def diloco(tier: str) -> Outer:
    """DiLoCo (arXiv 2311.08105): Nesterov momentum over changes."""
    return Outer(tier=tier, every=100)


def streaming_diloco(tier: str) -> Outer:
    """Streaming DiLoCo (arXiv 2501.18512): fragments in turn, each with some steps to arrive."""
    return Outer(tier=tier, every=100, fragments=5, delay=5)


def co2(tier: str) -> Outer:
    """CO2 (arXiv 2401.16265): an exchange may take a whole cycle, its penalty and clipping make up for the delay."""
    return Outer(tier=tier, every=12, delay=12, optimizer="momentum", keep=0.0, penalty=True, clip=1.0)


OUTERS: dict[str, Callable[[str], Outer]] = {
    "local-sgd": local_sgd,
    "diloco": diloco,
    "streaming-diloco": streaming_diloco,
    "co2": co2,
}

"""The outer loop of a plan: a tier that is not synchronised every step (docs/slow-networks.md).

Ranks that differ on `Outer.tier`, or on a tier outside it, are on different islands. Inside an island every step is
synchronous; between islands, parameter changes are exchanged. Block b belongs to fragment b mod `fragments`, and each
fragment has one exchange per cycle of `every` steps (local SGD 1805.09767, DiLoCo 2311.08105, Streaming DiLoCo
2501.18512, CO2 2401.16265).
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from terrace.cluster.cluster import Cluster

_RATES = {"nesterov": 0.7, "momentum": 1.0, "average": 1.0}
_MOMENTA = {"nesterov": 0.9, "momentum": 0.2, "average": 0.0}


class Exchange(NamedTuple):
    """The exchanges between islands at the end of a step, as fragment indexes.

    `arrives` were started in earlier steps and are applied now; `starts` are sent now. If `waits`, `starts` are also
    applied now. Both are empty if the step ends without an exchange.
    """

    arrives: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    waits: bool = False

    @property
    def applies(self) -> tuple[int, ...]:
        return (*self.arrives, *(self.starts if self.waits else ()))


NO_EXCHANGE = Exchange()


@dataclass(frozen=True, kw_only=True)
class Outer:
    """How islands exchange; the equations are in terrace.runtime.outer_state.

    `lr` and `momentum` default to those of the optimizer's paper. `ONE_ISLAND` has no tier and no fragment, so it never
    exchanges and keeps no state.
    """

    tier: str  # the innermost tier between islands
    every: int  # steps per cycle
    fragments: int = 1  # parts of the model, exchanged one after the other
    delay: int = 0  # steps that an exchange may take while training continues; 0: the step waits for it
    optimizer: Literal["nesterov", "momentum", "average"] = "nesterov"  # of the outer step
    lr: float | None = None  # of the outer step; None: as in the optimizer's paper
    momentum: float | None = None  # of the outer step; None: as in the optimizer's paper
    keep: float = 1.0  # fraction of its own changes during an exchange that an island keeps
    penalty: bool = False  # the staleness gap penalty of CO2
    clip: float = 0.0  # largest magnitude of a momentum element; 0: no clipping

    @property
    def rate(self) -> float:
        return _RATES[self.optimizer] if self.lr is None else self.lr

    @property
    def beta(self) -> float:
        return _MOMENTA[self.optimizer] if self.momentum is None else self.momentum

    @property
    def has_islands(self) -> bool:
        return self is not ONE_ISLAND and self != ONE_ISLAND  # fast path: nearly all have one

    def tier_between(self, cluster: "Cluster") -> int:
        """Index of the innermost tier between islands; the number of tiers if there is one island.

        Raises `ClusterError` for an unknown tier.
        """
        return cluster.index(self.tier) if self.has_islands else len(cluster.tiers)

    @property
    def num_slices(self) -> int:
        """Number of state slices in `plan.sums` that a rank keeps, each as large as its optimizer slice.

        The anchor; the momentum; with a delay, the parameters at the start of the exchange and its message.
        """
        return (self.fragments > 0) + (self.optimizer != "average") + 2 * (self.delay > 0)

    @property
    def interval(self) -> int:
        """Steps between the exchanges of consecutive fragments."""
        return self.every // max(1, self.fragments)

    @property
    def sends_last(self) -> bool:
        """Whether a fragment's next exchange starts at the step in which the last one is applied."""
        return self.delay == self.every

    def fragment(self, block: int) -> int:
        return block % max(1, self.fragments)

    def exchange(self, step: int, under_way: Collection[int]) -> Exchange:
        """The exchange at the end of step `step` of the run; `under_way` are the fragments in flight."""
        starts = self._starting(step)
        arrives = tuple(f for f in self._starting(step - self.delay) if f in under_way) if self.delay else ()
        return Exchange(arrives, starts, bool(starts) and not self.delay)

    def _starting(self, step: int) -> tuple[int, ...]:
        number, left = divmod(step % self.every + 1, self.interval)
        return () if left or number > self.fragments else (number - 1,)


ONE_ISLAND = Outer(tier="", every=1, fragments=0, optimizer="average")


def closing(under_way: Collection[int], changed: Collection[int]) -> list[Exchange]:
    """The exchanges that end a run: first those in flight, then a blocking one of all `changed` fragments."""
    found = [Exchange(arrives=tuple(sorted(under_way)))] if under_way else []
    return found + ([Exchange(starts=tuple(sorted(changed)), waits=True)] if changed else [])


def local_sgd(tier: str) -> Outer:
    """Local SGD (arXiv 1805.09767): average the parameters."""
    return Outer(tier=tier, every=8, optimizer="average")


def diloco(tier: str) -> Outer:
    """DiLoCo (arXiv 2311.08105): Nesterov momentum over changes."""
    return Outer(tier=tier, every=100)


def streaming_diloco(tier: str) -> Outer:
    """Streaming DiLoCo (arXiv 2501.18512): fragments are exchanged in turn, overlapped with a few steps."""
    return Outer(tier=tier, every=100, fragments=5, delay=5)


def co2(tier: str) -> Outer:
    """CO2 (arXiv 2401.16265): an exchange may take a whole cycle; penalty and clipping compensate for staleness."""
    return Outer(tier=tier, every=12, delay=12, optimizer="momentum", keep=0.0, penalty=True, clip=1.0)


OUTERS: dict[str, Callable[[str], Outer]] = {
    "local-sgd": local_sgd,
    "diloco": diloco,
    "streaming-diloco": streaming_diloco,
    "co2": co2,
}

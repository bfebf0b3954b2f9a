"""What training costs on machines that can be rented: a row for each offer and size, and which rows to choose from.

A row has the best plan of its cluster, as `terrace plan` finds it. Its days are those of all steps over the goodput of
checkpoints on disk, if the cluster says how often its parts fail; spares are paid, too.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from terrace.base.errors import ConfigError
from terrace.simulate.bands import tie_share

_MOST_OFFERS, _MOST_SIZES, _MOST = 100, 50, 1e12


@dataclass(frozen=True, kw_only=True)
class Offer:
    """Machines on offer, an item of `[[offers]]`.

    `nodes` are the sizes of the cluster's outermost tier on offer. `days` is a limit of this offer alone; a row
    beyond it is shown and never recommended.
    """

    cluster: str  # preset or TOML file
    price: float  # of one device for one hour
    name: str = ""  # "": the cluster's
    nodes: tuple[int, ...] = ()  # none: as the cluster's file says
    days: float = math.inf  # for how many the machines are on offer
    keys: Mapping[str, Any] = field(default_factory=dict)  # figures of the cluster that differ, as --cluster.key


@dataclass(frozen=True, kw_only=True)
class Offers:
    """A file of offers. Raises `ConfigError` for a price, a size or a limit out of range."""

    offers: tuple[Offer, ...]
    currency: str = ""
    days: float = math.inf  # limit of the training's days
    money: float = math.inf  # limit of its cost, in `currency`

    def __post_init__(self) -> None:
        if not 1 <= len(self.offers) <= _MOST_OFFERS:
            raise ConfigError(f"offers has {len(self.offers)} items: give 1 to {_MOST_OFFERS}, each as [[offers]]")
        for name in ("days", "money"):
            _check_limit(name, getattr(self, name))
        for number, offer in enumerate(self.offers, start=1):
            where = f"offers, item {number}"
            if not 0 < offer.price <= _MOST:
                raise ConfigError(
                    f"{where}: price = {offer.price:g} must be positive and at most {_MOST:g}: give "
                    "that of one device-hour"
                )
            _check_limit(f"{where}: days", offer.days)
            if len(offer.nodes) > _MOST_SIZES or len(set(offer.nodes)) < len(offer.nodes):
                raise ConfigError(
                    f"{where}: nodes has {len(offer.nodes)} items: give at most {_MOST_SIZES}, and each size once"
                )
            if any(size < 1 for size in offer.nodes):
                raise ConfigError(f"{where}: nodes = {list(offer.nodes)}: each size must be at least 1")


def _check_limit(name: str, value: float) -> None:
    if not value > 0:
        raise ConfigError(f"{name} = {value:g} must be positive: leave it out where nothing limits it")


@dataclass(frozen=True, kw_only=True)
class Rented:
    """An offer at one size, and what the training costs there with its best plan; infinite where `reason` says why not.

    `share` is the relative error of all predicted figures, the band of the plan.
    """

    offer: Offer
    name: str
    num_nodes: int
    num_devices: int
    reason: str = ""
    plan: str = ""  # in words
    step_s: float = math.inf
    memory_bytes: int = 0  # of the fullest device
    share: float = 0.0
    goodput: float = 1.0
    days: float = math.inf
    cost: float = math.inf
    energy_kwh: float = 0.0  # at the maximum power of the devices; 0: unknown


def priced(row: Rented, *, num_steps: int, num_spares: int, power_watts: float) -> Rented:
    """A row with a step and a goodput, with its days, cost and energy added; `num_spares` are devices that stand by."""
    if not row.goodput > 0:
        return replace(row, reason="parts fail too often for any step to be kept")
    hours = num_steps * row.step_s / row.goodput / 3600
    cost = hours * (row.num_devices + num_spares) * row.offer.price
    return replace(row, days=hours / 24, cost=cost, energy_kwh=hours * row.num_devices * power_watts / 1e3)


@dataclass(frozen=True, kw_only=True)
class Market:
    """The rows of all offers, and those to choose from.

    A row is allowed if it runs and is within the limits, and on the frontier if no other allowed one is both as cheap
    and as soon.
    """

    rows: tuple[Rented, ...]
    days: float = math.inf
    money: float = math.inf
    currency: str = ""

    def excess(self, row: Rented) -> str:
        """The limit that a row is beyond: "days" of the training, "offer" of its machines, "money"; "" if none."""
        if row.days > self.days:
            return "days"
        if row.days > row.offer.days:
            return "offer"
        return "money" if row.cost > self.money else ""

    @property
    def allowed(self) -> list[Rented]:
        return [row for row in self.rows if not row.reason and not self.excess(row)]

    @property
    def cheapest(self) -> Rented | None:
        return min(self.allowed, key=lambda row: (row.cost, row.days), default=None)

    @property
    def soonest(self) -> Rented | None:
        return min(self.allowed, key=lambda row: (row.days, row.cost), default=None)

    @property
    def frontier(self) -> list[Rented]:
        """Allowed rows that no other one beats in both, the soonest first."""
        found, least = list[Rented](), math.inf
        for row in sorted(self.allowed, key=lambda row: (row.days, row.cost)):
            if row.cost < least:
                found.append(row)
                least = row.cost
        return found


def ties_with(row: Rented, others: Sequence[Rented]) -> list[Rented]:
    """The rows whose costs the predictions cannot tell from that of `row`.

    Two sizes of one offer share most of their errors and tie as two plans of one search do. Between offers errors are
    independent: costs tie if their bands overlap.
    """

    def tie(other: Rented) -> bool:
        low, high = sorted((row, other), key=lambda each: each.cost)
        if row.offer is other.offer:
            return high.cost <= (1 + tie_share()) * low.cost
        return high.cost / (1 + high.share) <= low.cost * (1 + low.share)

    return [other for other in others if other is not row and tie(other)]

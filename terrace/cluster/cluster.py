"""Device, Tier, Cluster, and the numbering of ranks.

Ranks are numbered in mixed radix, the innermost tier varying fastest: with tiers (package 2, node 4), rank 5 is
position 1 of package 2. Bandwidths are per device and in one direction; vendors often quote the sum of both directions.

The cost model's constants are next to the figures they scale: the share of a device's peaks that kernels reach
(`Kernels`), and of a link's bandwidth that messages reach (`Tier.efficiency`, `Tier.half_bytes`). They default to the
ideal, so a cluster without them is priced at its peaks. `marks` gives the source of each constant.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from statistics import NormalDist

from terrace.base.errors import ClusterError, did_you_mean
from terrace.base.hashing import hashed_once
from terrace.cluster.below import Mark, settled, wrong_below
from terrace.cluster.device import DTYPES as DTYPES
from terrace.cluster.device import LEAST_RATE, LONGEST_S, MOST_RATE, check_device, check_marks, check_share
from terrace.cluster.device import Device as Device
from terrace.cluster.device import Kernels as Kernels
from terrace.cluster.failures import NO_FAILURES, Failures, wrong_failures
from terrace.cluster.members import Member, check_members, first_members, slowest_link
from terrace.cluster.width import Tree, wrong_width
from terrace.cluster.wiring import by_degree, wrong_links

_MOST_DEVICES = 10**12  # far more than exist; their quantile is still below 1 in floating point


@dataclass(frozen=True, kw_only=True)
class Tier:
    """A level of the cluster: `size` members of the next inner tier, joined by one kind of link.

    Messages of S bytes reach `efficiency * S / (S + half_bytes)` of the bandwidth. `marks` is as in `Device`.
    """

    name: str
    size: int
    bandwidth_bytes_per_s: float  # per device, one direction
    latency_s: float
    shared: bool = False  # True: inner ranks share one link, and the bandwidth is already one rank's share
    shared_by: str = ""  # inner tier whose devices share a link; "" with `shared`: all inner devices share one
    direct: bool = False  # True: members are wired in pairs without a switch; each pair has its part of the bandwidth
    # (Device, device, number of links) in a group, if pairs have different numbers of links; the bandwidth is then that
    # of one link (terrace.cluster.wiring).
    links: tuple[tuple[int, int, int], ...] = ()
    tree: Tree | None = None  # algorithm for small messages among many members; None: only rings
    # (Number of members, share of the rate), if the fabric is slower for many members.
    contention: tuple[tuple[int, float], ...] = ()
    efficiency: float = 1.0  # share of the bandwidth that large messages reach
    half_bytes: float = 0.0  # message size that reaches half of that
    overlap_penalty: float | None = None  # slowdown of compute during messages on this tier; None: the device's value
    # Inner tiers that share a bus with this one -> slowdown of concurrent messages on both: 1 on one bus (as slow as
    # one after the other), 0 on separate links.
    bus: Mapping[str, float] = field(default_factory=dict, hash=False)
    # Of the outermost tier, if its members differ (terrace.cluster.members); empty: all are alike
    members: tuple[Member, ...] = field(default=(), metadata={"absent": ()})
    marks: Mapping[str, Mark] = field(default_factory=dict, hash=False)
    source: str = ""
    # Number of `links` that each of 2, 3, ... members sends over; computed by `Cluster`.
    by_degree: tuple[int, ...] = field(default=(), metadata={"key": False})


def expected_most(number: int) -> float:
    """Expected maximum of `number` normal values, in standard deviations above the mean.

    Accurate to 2 % (Blom's formula, Statistical Estimates and Transformed Beta-Variables, 1958).
    """
    number = min(number, _MOST_DEVICES)
    return NormalDist().inv_cdf((number - 0.375) / (number + 0.25))


@hashed_once
@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A device and an ordered list of tiers, innermost first.

    Raises `ClusterError` for values that no machine can have.
    """

    name: str
    device: Device
    tiers: tuple[Tier, ...] = field(default=())
    failures: Failures = field(default=NO_FAILURES, metadata={"absent": NO_FAILURES})  # how often its parts fail
    # Number of devices of the whole cluster, if this is a part of one: they wait for each other. 0: not a part.
    around: int = field(default=0, metadata={"key": False})
    # Memory of the device in the file, if a member has less: it holds again for a part without that member
    own_memory_bytes: float = field(default=0.0, compare=False, metadata={"key": False})

    def __post_init__(self) -> None:
        check_device(self.device)
        if not self.tiers:
            raise ClusterError(f"cluster {self.name!r} has no tiers: give it at least one, of size 1 for one device")
        names = [tier.name for tier in self.tiers]
        for index, tier in enumerate(self.tiers):
            _check_tier(tier)
            if names.count(tier.name) > 1:
                raise ClusterError(f"two tiers are called {tier.name!r}: give each tier its own name")
            _check_bus(tier, names[:index])
            _check_shared_by(tier, names[:index])
            if tier.members and index < len(names) - 1:
                raise ClusterError(f"tiers.{tier.name}.members has no effect: members of the outermost tier may differ")
        object.__setattr__(self, "tiers", tuple(self._wired(index, tier) for index, tier in enumerate(self.tiers)))
        wrong = wrong_below(self.device.below, self.device.type, names) or wrong_failures(self.failures)
        if wrong:
            raise ClusterError(wrong)
        # Ranks wait for each other in every step, so the slowest device determines the pace.
        number = max(self.world_size, self.around)
        if members := self.tiers[-1].members:
            check_members(names[-1], self.tiers[-1].size, members, self.device)
            # Every member holds the same states, so the least memory is that of all.
            memory_bytes = min(each.device_of(self.device).memory_bytes for each in members)
            if memory_bytes < self.device.memory_bytes:
                object.__setattr__(self, "own_memory_bytes", self.device.memory_bytes)
            object.__setattr__(self, "device", replace(self.device, memory_bytes=memory_bytes))
        device = replace(self.device, below=settled(self.device.below, names, self.ranks_within))
        object.__setattr__(device, "pace", 1 / (1 + device.spread * expected_most(number)))
        object.__setattr__(self, "device", device)

    def _wired(self, index: int, tier: Tier) -> Tier:
        # Already computed: this is a part of a cluster and uses the links of the whole.
        if not tier.links or tier.by_degree:
            return tier
        inner = self.ranks_within(index - 1)
        if wrong := wrong_links(tier.name, tier.links, inner * tier.size):
            raise ClusterError(wrong)
        return replace(tier, by_degree=by_degree(tier.links, inner, tier.size))

    @property
    def is_measured(self) -> bool:
        """Whether any constant of the device was measured or fitted, as `terrace probe` marks them."""
        return any(mark != "preset" for mark in self.device.marks.values())

    @property
    def shared_buses(self) -> tuple[tuple[int, int, float], ...]:
        """(Tier, inner tier, slowdown) of each pair of tiers that share a bus."""
        names = [tier.name for tier in self.tiers]
        return tuple(
            (index, names.index(inner), share)
            for index, tier in enumerate(self.tiers)
            for inner, share in tier.bus.items()
            if share > 0
        )

    @property
    def world_size(self) -> int:
        return math.prod(tier.size for tier in self.tiers)

    def index(self, tier_name: str) -> int:
        """Index of a tier: 0 for the innermost, -1 for `device`. Raises `ClusterError` for an unknown tier."""
        if tier_name == "device":
            return -1
        for index, tier in enumerate(self.tiers):
            if tier.name == tier_name:
                return index
        known = ["device", *(tier.name for tier in self.tiers)]
        raise ClusterError(f"no tier {tier_name!r} in cluster {self.name!r}{did_you_mean(tier_name, known)}")

    def ranks_within(self, index: int) -> int:
        """Number of ranks in one group of tier `index` (1 for `device`, index -1)."""
        return math.prod(tier.size for tier in self.tiers[: index + 1])

    def sharers(self, index: int) -> int:
        """Number of ranks that share one link of tier `index`; the tier's bandwidth is one rank's share."""
        tier = self.tiers[index]
        if not tier.shared:
            return 1
        return self.ranks_within(self.index(tier.shared_by) if tier.shared_by else index - 1)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        if not 0 <= rank < self.world_size:
            raise ClusterError(f"rank {rank} is outside 0..{self.world_size - 1}")
        position = []
        for tier in self.tiers:
            rank, here = divmod(rank, tier.size)
            position.append(here)
        return tuple(position)

    def rank(self, coordinates: tuple[int, ...]) -> int:
        sizes = tuple(tier.size for tier in self.tiers)
        inside = len(coordinates) == len(sizes) and all(
            0 <= here < size for here, size in zip(coordinates, sizes, strict=True)
        )
        if not inside:
            raise ClusterError(f"no rank at {coordinates}: the tiers, innermost first, have sizes {sizes}")
        rank = 0
        for tier, here in zip(reversed(self.tiers), reversed(coordinates), strict=True):
            rank = rank * tier.size + here
        return rank

    def peers(self, rank: int, index: int) -> tuple[int, ...]:
        """The ranks that differ from `rank` only on tier `index`, itself included, in tier order.

        On `device` (index -1), only `rank`.
        """
        position = self.coordinates(rank)
        if index == -1:
            return (rank,)
        stride = self.ranks_within(index - 1)
        first = rank - position[index] * stride
        return tuple(first + stride * here for here in range(self.tiers[index].size))

    @property
    def alike(self) -> "tuple[tuple[Cluster, int], ...]":
        """(The cluster if all members of the outermost tier were alike, number of such members), for each table of
        members; the cluster itself if they are alike.
        """
        *inner, tier = self.tiers
        if not tier.members:
            return ((self, tier.size),)
        bandwidth, latency_s = slowest_link(tier.members, tier.bandwidth_bytes_per_s, tier.latency_s)
        linked = replace(tier, members=(), bandwidth_bytes_per_s=bandwidth, latency_s=latency_s)
        # What fits one member has to fit all: the least memory, less the cluster's headroom.
        own, found = self.device, []
        for each in tier.members:
            device = replace(each.device_of(own), memory_bytes=own.memory_bytes, headroom=own.headroom)
            found.append((replace(self, device=device, tiers=(*inner, linked)), each.count))
        return tuple(found)

    def resized(self, num_outermost: int) -> "Cluster":
        """This cluster with another number of members on its outermost tier: the first, if they differ.

        Raises `ClusterError` for more members than are described.
        """
        tier = self.tiers[-1]
        resized = replace(tier, size=num_outermost, members=first_members(tier.members, num_outermost))
        device = replace(self.device, memory_bytes=self.own_memory_bytes or self.device.memory_bytes)
        return replace(self, device=device, tiers=(*self.tiers[:-1], resized), own_memory_bytes=0.0)


def _check_tier(tier: Tier) -> None:
    if not tier.name or tier.name == "device":
        raise ClusterError(f"a tier cannot be called {tier.name!r}: 'device' is the implicit innermost tier")
    if not re.fullmatch(r"[A-Za-z0-9_-]+", tier.name):
        raise ClusterError(
            f"a tier cannot be called {tier.name!r}: plans and overrides use the name as a key, "
            "so write it with letters, digits, '-' and '_'"
        )
    if tier.size < 1:
        raise ClusterError(f"tier {tier.name!r} has size {tier.size}: it must join at least 1")
    if not LEAST_RATE <= tier.bandwidth_bytes_per_s <= MOST_RATE:
        raise ClusterError(
            f"tier {tier.name!r} has bandwidth {tier.bandwidth_bytes_per_s} bytes/s: give a positive number "
            f"between {LEAST_RATE:g} and {MOST_RATE:g}, in bytes (not GB or bits) a second"
        )
    if not 0 <= tier.latency_s <= LONGEST_S:
        raise ClusterError(
            f"tier {tier.name!r} has latency {tier.latency_s} s: give zero or a positive number up to {LONGEST_S:g}"
        )
    check_share(f"tiers.{tier.name}.efficiency", tier.efficiency)
    if not 0 <= tier.half_bytes <= MOST_RATE:
        raise ClusterError(
            f"tier {tier.name!r} has half_bytes {tier.half_bytes}: give zero or a positive number up to {MOST_RATE:g}"
        )
    if tier.overlap_penalty is not None and not 0 <= tier.overlap_penalty <= 1:
        raise ClusterError(f"tiers.{tier.name}.overlap_penalty = {tier.overlap_penalty} must lie between 0 and 1")
    if tier.links and tier.direct:
        raise ClusterError(f"tiers.{tier.name}.direct has no effect beside links, which say how devices are wired")
    if wrong := wrong_width(tier.name, tier.tree, tier.contention, LONGEST_S):
        raise ClusterError(wrong)
    check_marks(f"tiers.{tier.name}", tier.marks, {each.name for each in fields(Tier)} - {"by_degree"})


def _check_shared_by(tier: Tier, inside: Sequence[str]) -> None:
    if not tier.shared_by:
        return
    if not tier.shared:
        raise ClusterError(f"tiers.{tier.name}.shared_by has no effect without shared = true")
    if tier.shared_by not in inside:
        raise ClusterError(
            f"tiers.{tier.name}.shared_by = {tier.shared_by!r}, which is no tier inside {tier.name!r}"
            f"{did_you_mean(tier.shared_by, inside)}"
        )


def _check_bus(tier: Tier, inside: Sequence[str]) -> None:
    for name, share in tier.bus.items():
        if name not in inside:
            raise ClusterError(
                f"tiers.{tier.name}.bus names {name!r}, which is no tier inside {tier.name!r}"
                f"{did_you_mean(name, inside)}"
            )
        if not 0 <= share <= 1:
            raise ClusterError(
                f"tiers.{tier.name}.bus.{name} = {share} must lie between 0 and 1: 1 where both share one bus, 0 where "
                "each has links of its own"
            )

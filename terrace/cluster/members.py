"""Members of a cluster's outermost tier that differ: `[[tiers.members]]` of a cluster file.

    [[tiers.members]]
    count = 2                # members with these figures; all counts together are the tier's size
    device = "h100"          # the device of a preset or file; left out: the cluster's own
    speed = 0.5              # of the device, over the figures above
    bandwidth_bytes_per_s = 1e9   # and latency_s: of the member's link; left out: the tier's

Every message among all members passes the slowest link, so the slower end counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from terrace.base.errors import ClusterError
from terrace.base.words import counted
from terrace.cluster.device import LEAST_RATE, LONGEST_S, MOST_RATE, Device, check_device

_SLOWEST, _FASTEST = 1e-6, 1e6  # factors on a device


@dataclass(frozen=True, kw_only=True)
class Member:
    """`count` members of the outermost tier. Figures that are None are those of the cluster's device and tier."""

    count: int = 1
    device: Device | None = None
    speed: float = 1.0
    bandwidth_bytes_per_s: float | None = None
    latency_s: float | None = None

    def device_of(self, own: Device) -> Device:
        return slowed(self.device or own, self.speed)


def slowed(device: Device, speed: float) -> Device:
    """A device that does everything at `speed` times the rate."""
    if speed == 1:
        return device
    peaks = {dtype: speed * peak for dtype, peak in device.peak_flops_per_s.items()}
    kernels = device.kernels
    constants = {name: getattr(kernels, name) / speed for name in ("launch_s", "host_layer_s", "optimizer_s")}
    return replace(
        device,
        peak_flops_per_s=peaks,
        memory_bandwidth_bytes_per_s=speed * device.memory_bandwidth_bytes_per_s,
        kernels=replace(kernels, **constants),
    )


def slowest_link(members: Sequence[Member], bandwidth_bytes_per_s: float, latency_s: float) -> tuple[float, float]:
    """(Bandwidth, latency) of messages among all members of a tier with these figures of its own."""
    rates = (each.bandwidth_bytes_per_s for each in members)
    waits = (each.latency_s for each in members)
    return (
        min((bandwidth_bytes_per_s if rate is None else rate for rate in rates), default=bandwidth_bytes_per_s),
        max((latency_s if wait is None else wait for wait in waits), default=latency_s),
    )


def first_members(members: Sequence[Member], number: int) -> tuple[Member, ...]:
    found, left = list[Member](), number
    for each in members:
        if left:
            found.append(replace(each, count=min(each.count, left)))
            left -= found[-1].count
    return tuple(found)


def check_members(tier: str, size: int, members: Sequence[Member], own: Device) -> None:
    """Raise `ClusterError` unless `members` describe a tier of `size`, on devices of the backend of `own`."""
    where = f"tiers.{tier}.members"
    for index, each in enumerate(members):
        here = f"{where}[{index}]"
        if each.count < 1:
            raise ClusterError(f"{here}.count = {each.count}: a table describes 1 member or more")
        if not _SLOWEST <= each.speed <= _FASTEST:
            raise ClusterError(
                f"{here}.speed = {each.speed} must be a positive number from {_SLOWEST:g} to {_FASTEST:g}, such as 0.5 "
                "for half the speed of its device"
            )
        rate, latency_s = each.bandwidth_bytes_per_s, each.latency_s
        if rate is not None and not LEAST_RATE <= rate <= MOST_RATE:
            raise ClusterError(
                f"{here}.bandwidth_bytes_per_s = {rate}: give a positive number up to {MOST_RATE:g}, in bytes a second"
            )
        if latency_s is not None and not 0 <= latency_s <= LONGEST_S:
            raise ClusterError(f"{here}.latency_s = {latency_s}: give zero or up to {LONGEST_S:g} seconds")
        if each.device is not None:
            check_device(each.device)
            if each.device.backend != own.backend:
                raise ClusterError(
                    f"{here}.device has backend {each.device.backend!r} and the cluster's device {own.backend!r}: "
                    "the devices of a run have one backend, so give a device of that, or a speed"
                )
    described = sum(each.count for each in members)
    if described != size:
        raise ClusterError(
            f"{where} describe {counted(described, 'member')}, and tier {tier!r} has size {size}: give a table for "
            "each, or change a count"
        )

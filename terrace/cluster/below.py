"""Memory below a device: the host's, and the disks of its machine."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

MEDIA = ("host", "disk")
ALL = "all"  # of `shared_by`
_UPDATES, _PAGES = "update_bytes_per_s", ("read_pages_per_s", "write_pages_per_s")
_MARKED = ("memory_bytes", "read_bytes_per_s", "write_bytes_per_s", _UPDATES, *_PAGES)
Mark = Literal["preset", "measured", "fitted"]  # from a table, from this machine, or from matching whole steps
_LEAST, _MOST = 1e3, 1e20  # plausible bytes and rates, as of a device


@dataclass(frozen=True, kw_only=True)
class Medium:
    """A memory below a device, such as `[device.below.disk]`: figures of the whole medium, not of a device's share.

    Rates are those of one direction while the other is busy, too.
    """

    memory_bytes: float  # that runs may take
    read_bytes_per_s: float  # toward the device
    write_bytes_per_s: float
    # Of the host: bytes of gradients, states and parameters that updates on its cores read and write per second
    update_bytes_per_s: float = field(default=0.0, metadata={"absent": 0.0})
    # Of a disk: pages of rows at random places per second, many at a time (terrace.plan.kept_rows)
    read_pages_per_s: float = field(default=0.0, metadata={"absent": 0.0})
    write_pages_per_s: float = field(default=0.0, metadata={"absent": 0.0})
    shared_by: str = ""  # tier whose devices share it, such as "node", or "all" of them; "": each device has its own
    marks: Mapping[str, Mark] = field(default_factory=dict, hash=False)
    source: str = ""
    # Number of devices that share it; computed by `Cluster`
    sharers: int = field(default=1, metadata={"key": False})

    @property
    def share_bytes(self) -> float:
        return self.memory_bytes / self.sharers

    def read_s(self, num_bytes: float) -> float:
        """Seconds in which every device that shares it reads `num_bytes`."""
        return num_bytes * self.sharers / self.read_bytes_per_s

    def write_s(self, num_bytes: float) -> float:
        """Seconds in which every device that shares it writes `num_bytes`."""
        return num_bytes * self.sharers / self.write_bytes_per_s

    def pages_read_s(self, num_pages: float, num_bytes: float) -> float:
        """As `read_s`, of bytes in so many pages at random places, whose number may take longer than their bytes."""
        return max(self.read_s(num_bytes), self._pages_s(num_pages, self.read_pages_per_s))

    def pages_written_s(self, num_pages: float, num_bytes: float) -> float:
        """As `write_s`, of bytes in so many pages at random places."""
        return max(self.write_s(num_bytes), self._pages_s(num_pages, self.write_pages_per_s))

    def _pages_s(self, num_pages: float, pages_per_s: float) -> float:
        return num_pages * self.sharers / pages_per_s if pages_per_s else 0.0

    def update_s(self, num_bytes: float) -> float:
        """Seconds in which the host's cores read and write `num_bytes` for every device that shares them."""
        return num_bytes * self.sharers / self.update_bytes_per_s


def wrong_below(below: Mapping[str, Medium], device: str, tiers: Sequence[str]) -> str:
    """What is wrong with the media below a device of type `device` ("cpu", "cuda") of a cluster; "" if nothing is."""
    for name, medium in below.items():
        where = f"device.below.{name}"
        if name not in MEDIA:
            return f"{where} is no medium below a device: known are {' and '.join(MEDIA)}"
        if name == "host" and device == "cpu":
            return (
                f"{where}: the device is a CPU, whose memory is the host's: leave it out, and give its bytes as "
                "device.memory_bytes"
            )
        if name != "host" and medium.update_bytes_per_s:
            return (
                f"{where}.update_bytes_per_s = {medium.update_bytes_per_s:g} has no effect: states are updated in "
                "memory; give it as device.below.host.update_bytes_per_s, or leave it out"
            )
        for each in _MARKED:
            value = getattr(medium, each)
            if each in (_UPDATES, *_PAGES) and not value:
                continue
            if name == "host" and each in _PAGES:
                return (
                    f"{where}.{each} = {value:g} has no effect: rows in the host's memory are moved one by one; give "
                    f"it as device.below.disk.{each}, or leave it out"
                )
            if each in _PAGES and 1 <= value <= _MOST:
                continue
            if not _LEAST <= value <= _MOST:
                return (
                    f"{where}.{each} = {value} must be a positive number between {_LEAST:g} and {_MOST:g}: give bytes, "
                    "not GB"
                )
        # A part of a cluster may lack the tier by which the whole has settled it.
        if medium.shared_by not in ("", ALL, *tiers) and medium.sharers == 1:
            return f"{where}.shared_by = {medium.shared_by!r} is no tier: known are {', '.join([*tiers, ALL])}"
        for mark in medium.marks:
            if mark not in _MARKED:
                return f"{where}.marks.{mark} marks no constant of it: known are {', '.join(_MARKED)}"
    return ""


def settled(below: Mapping[str, Medium], tiers: Sequence[str], ranks_within: Callable[[int], int]) -> dict[str, Medium]:
    """`below` with the number of devices that share each medium."""
    indexes = {name: index for index, name in enumerate(tiers)} | {ALL: len(tiers) - 1}
    return {
        name: replace(medium, sharers=ranks_within(indexes[medium.shared_by]))
        if medium.shared_by in indexes
        else medium
        for name, medium in below.items()
    }

"""Bytes per tier: of the calling rank, and of all links of a rehearsal.

An interface counts frames: payload, 0.7 % headers (more for small messages), and acknowledgements. Bytes that the
kernel still holds back at a limited link are not counted yet, so pass a barrier before reading.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from terrace.lab.rehearse.wiring import Wiring

_OWN = Path("/proc/self/net/dev")  # shows the namespace of the reading process
_SENT_FIELD = 8  # of the numbers after `name:`; the first eight count received frames


def read(path: Path = _OWN) -> dict[int, int]:
    """Bytes that the calling rank has sent so far, by tier index.

    Index 0 is the innermost tier; tiers of size 1 have no network and no entry. Empty outside a rehearsal.
    """
    sent = {}
    for line in path.read_text(encoding="ascii", errors="replace").splitlines():
        name, colon, numbers = line.partition(":")
        found = re.fullmatch(r"t(\d+)", name.strip())
        if colon and found:
            sent[int(found[1])] = int(numbers.split()[_SENT_FIELD])
    return dict(sorted(sent.items()))


class Carried(NamedTuple):
    """Bytes over one link: `sent_bytes` from a rank (or a group) outward, `received_bytes` toward it."""

    sent_bytes: int
    received_bytes: int


@dataclass(frozen=True, kw_only=True)
class TierCounts:
    """Bytes over the links of one tier, by rank and, where links are shared, by group."""

    name: str
    index: int
    ranks: tuple[Carried, ...]
    uplinks: tuple[tuple[tuple[int, ...], Carried], ...]

    @property
    def sent_bytes(self) -> int:
        return sum(rank.sent_bytes for rank in self.ranks)


@dataclass(frozen=True)
class Counts:
    """Bytes over all links of a wiring, by the name of the link's interface in the fabric."""

    wiring: Wiring
    links: Mapping[str, Carried]

    @classmethod
    def of(cls, links: Mapping[str, tuple[int, int]], wiring: Wiring) -> "Counts":
        """Counts from the fabric's interfaces: name -> (bytes it received, bytes it sent)."""
        # The fabric's end of a link receives what the rank's end sent.
        return cls(wiring, {name: Carried(received, sent) for name, (received, sent) in links.items()})

    def __sub__(self, before: "Counts") -> "Counts":
        pairs = {name: (now, before.links[name]) for name, now in self.links.items()}
        return Counts(self.wiring, {name: Carried(a[0] - b[0], a[1] - b[1]) for name, (a, b) in pairs.items()})

    @property
    def tiers(self) -> tuple[TierCounts, ...]:
        return tuple(
            TierCounts(
                name=net.tier.name,
                index=net.index,
                ranks=tuple(self.links[port.name] for port in net.ports),
                uplinks=tuple((uplink.ranks, self.links[uplink.upper]) for uplink in net.uplinks),
            )
            for net in self.wiring.nets
        )

    def table(self) -> dict[str, Any]:
        """Plain values for JSON, by tier name."""
        return {
            tier.name: {
                "interface": f"t{tier.index}",
                "sent_bytes": tier.sent_bytes,
                "sent_bytes_by_rank": [rank.sent_bytes for rank in tier.ranks],
                "received_bytes_by_rank": [rank.received_bytes for rank in tier.ranks],
                "uplinks": [
                    {"ranks": list(ranks), "sent_bytes": link.sent_bytes, "received_bytes": link.received_bytes}
                    for ranks, link in tier.uplinks
                ],
            }
            for tier in self.tiers
        }

"""Bytes per tier: of the calling rank, and of all links of a rehearsal.

An interface counts frames: payload, 0.7 % headers (more for small messages), and acknowledgements. Bytes that the
kernel still holds back at a limited link are not counted yet, so pass a barrier before reading.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from terrace.rehearse.wiring import Wiring

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


@dataclass(frozen=True, kw_only=True)
class Carried:
    """Bytes over one link: `sent_bytes` from a rank (or a group) outward, `received_bytes` toward it."""

    sent_bytes: int
    received_bytes: int

    def __sub__(self, before: "Carried") -> "Carried":
        return Carried(
            sent_bytes=self.sent_bytes - before.sent_bytes,
            received_bytes=self.received_bytes - before.received_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class TierCounts:
    """Bytes over the links of one tier, by rank and, where links are shared, by group."""

    name: str
    index: int
    ranks: tuple[Carried, ...]
    uplinks: tuple[tuple[tuple[int, ...], Carried], ...]

    @property
    def sent_bytes(self) -> int:
        """Sum over ranks."""
        return sum(rank.sent_bytes for rank in self.ranks)


@dataclass(frozen=True)
class Counts:
    """Bytes over all links, by tier, innermost first."""

    tiers: tuple[TierCounts, ...]

    @classmethod
    def of(cls, links: Mapping[str, tuple[int, int]], wiring: Wiring) -> "Counts":
        """Counts from the fabric's interfaces: name -> (bytes it received, bytes it sent)."""

        def carried(name: str) -> Carried:
            # The fabric's end of a link receives what the rank's end sent.
            received, sent = links[name]
            return Carried(sent_bytes=received, received_bytes=sent)

        return cls(
            tuple(
                TierCounts(
                    name=net.tier.name,
                    index=net.index,
                    ranks=tuple(carried(port.name) for port in net.ports),
                    uplinks=tuple((uplink.ranks, carried(uplink.upper)) for uplink in net.uplinks),
                )
                for net in wiring.nets
            )
        )

    def __sub__(self, before: "Counts") -> "Counts":
        return Counts(
            tuple(
                TierCounts(
                    name=now.name,
                    index=now.index,
                    ranks=tuple(a - b for a, b in zip(now.ranks, then.ranks, strict=True)),
                    uplinks=tuple((a[0], a[1] - b[1]) for a, b in zip(now.uplinks, then.uplinks, strict=True)),
                )
                for now, then in zip(self.tiers, before.tiers, strict=True)
            )
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

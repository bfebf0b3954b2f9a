"""What media below the device reached while pieces of states passed a ring, as those of a cluster (docs/offload.md)."""

from dataclasses import dataclass, replace
from typing import Any

from terrace.cluster.below import ALL, Mark, Medium
from terrace.cluster.cluster import Cluster, Device


@dataclass(frozen=True, kw_only=True)
class MediumSample:
    """Bytes per second of one rank in each direction, while all ranks of its machine do the same, and free bytes.

    `update_bytes_per_s` is that of updates on the host's cores (terrace.plan.kept.updated_bytes), 0 for a disk. Pages
    per second are those of rows at random places (terrace.plan.kept_rows), 0 for the host's memory.
    """

    bytes_per_s: float = 0.0
    free_bytes: float = 0.0
    update_bytes_per_s: float = 0.0
    pages_read_per_s: float = 0.0
    pages_written_per_s: float = 0.0
    num_ranks: int = 1  # on one machine


NO_MEDIUM = MediumSample()  # of a folder that cannot hold states, or a device without a memory of its own


def with_medium(start: Cluster, device: Device, name: str, sample: MediumSample) -> Device:
    """The device with the medium `name` ("host", "disk") that a sample measured below it; unchanged without one."""
    if not sample.bytes_per_s:
        return device
    sizes = {start.ranks_within(index): tier.name for index, tier in reversed(list(enumerate(start.tiers)))}
    shared_by = ALL if sample.num_ranks == start.world_size else sizes.get(sample.num_ranks, "")
    rates: dict[str, Any] = {
        "read_bytes_per_s": sample.bytes_per_s,
        "write_bytes_per_s": sample.bytes_per_s,
        "update_bytes_per_s": sample.update_bytes_per_s,
        "read_pages_per_s": sample.pages_read_per_s,
        "write_pages_per_s": sample.pages_written_per_s,
    }
    rates = {key: rate * sample.num_ranks for key, rate in rates.items() if rate}
    marks: dict[str, Mark] = dict.fromkeys(("memory_bytes", *rates), "measured")
    medium = Medium(
        memory_bytes=sample.free_bytes,
        **rates,
        shared_by=shared_by if sample.num_ranks > 1 else "",
        marks=marks,
        source="terrace probe",
    )
    return replace(device, below={**device.below, name: medium})

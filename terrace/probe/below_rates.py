"""Measures the disk under a folder, and the host's memory, as runs use them.

All ranks pass pieces through a ring at once, and then pages of rows at random places (terrace.runtime.kept.rows).
"""

import os
from contextlib import suppress
from pathlib import Path

import torch

from terrace.accelerator import HOST, has_streams
from terrace.base.errors import TerraceError
from terrace.comm.ledger import Ledger
from terrace.comm.pace import UNPACED
from terrace.plan.keep import Keep
from terrace.plan.kept_rows import RowPages
from terrace.probe.below import NO_MEDIUM, MediumSample
from terrace.probe.timing import Stopwatch
from terrace.runtime.clock import NO_CLOCK, make_clock
from terrace.runtime.kept.channel import Channel
from terrace.runtime.kept.file import KeptFile
from terrace.runtime.kept.host import HostMemory
from terrace.runtime.kept.host_rate import update_rate
from terrace.runtime.kept.ring import Ring, make_slots
from terrace.runtime.kept.rows import RowsOnDisk

_PIECE_BYTES = 8 * Keep().piece  # of the moments of AdamW in fp32
_NUM_PIECES = 12
# Each has a page of 4 kB: 134 MB, of which random places are rarely neighbours.
_ROWS = RowPages(medium="disk", num_rows=1 << 15, width=256, formats=("fp32",) * 3)


def measure_disk(watch: Stopwatch, folder: Path, num_ranks: int) -> MediumSample:
    """Pass pieces and pages for about two seconds. Every rank must call this at the same point."""
    rate, pages = 0.0, (0.0, 0.0)
    with suppress(TerraceError):
        file = KeptFile(folder, [_PIECE_BYTES] * _NUM_PIECES)
        slots = make_slots(Keep().ring, _PIECE_BYTES, HOST)
        channel = Channel(file, Ledger(), "disk")
        rate = Ring(channel, range(_NUM_PIECES), slots, make_clock(HOST)).rate()
        rows = RowsOnDisk(_ROWS, channel, NO_CLOCK, UNPACED, 1, folder)
        pages = rows.page_rates()
        channel.close()
        rows.close()
    # One rank without a disk leaves all without.
    if -watch.largest(-rate) <= 0.0:
        return NO_MEDIUM
    free = os.statvfs(folder)
    free_bytes = -watch.largest(-float(free.f_bavail * free.f_frsize))
    reads, writes = map(watch.mean, pages)
    return MediumSample(
        bytes_per_s=watch.mean(rate),
        free_bytes=free_bytes,
        pages_read_per_s=reads,
        pages_written_per_s=writes,
        num_ranks=num_ranks,
    )


def measure_host(watch: Stopwatch, device: torch.device, num_ranks: int) -> MediumSample:
    """The same for the host's memory below a device with one of its own, and for updates on the host's cores."""
    if not has_streams(device):
        return NO_MEDIUM
    memory = HostMemory([_PIECE_BYTES] * _NUM_PIECES)
    channel = Channel(memory, Ledger(), "host")
    rate = Ring(channel, range(_NUM_PIECES), make_slots(Keep().ring, _PIECE_BYTES, device), make_clock(HOST)).rate()
    channel.close()
    free_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return MediumSample(
        bytes_per_s=watch.mean(rate),
        free_bytes=-watch.largest(-float(free_bytes)),
        update_bytes_per_s=watch.mean(update_rate()),
        num_ranks=num_ranks,
    )

"""Measures the disk under a folder as a ring uses it: all ranks pass pieces at once (terrace.runtime.kept)."""

import os
from contextlib import suppress
from pathlib import Path

from terrace.accelerator import HOST
from terrace.base.errors import TerraceError
from terrace.comm.ledger import Ledger
from terrace.plan.keep import Keep
from terrace.probe.disk import NO_DISK, DiskSample
from terrace.probe.timing import Stopwatch
from terrace.runtime.clock import make_clock
from terrace.runtime.kept.channel import Channel
from terrace.runtime.kept.file import KeptFile
from terrace.runtime.kept.ring import Ring, make_slots

_PIECE_BYTES = 8 * Keep().piece  # of the moments of AdamW in fp32
_NUM_PIECES = 12


def measure_disk(watch: Stopwatch, folder: Path, num_ranks: int) -> DiskSample:
    """Pass pieces for about a second. Every rank must call this at the same point."""
    rate = 0.0
    with suppress(TerraceError):
        file = KeptFile(folder, [_PIECE_BYTES] * _NUM_PIECES)
        slots = make_slots(Keep().ring, _PIECE_BYTES, HOST)
        channel = Channel(file, Ledger(), "disk")
        rate = Ring(channel, range(_NUM_PIECES), slots, make_clock(HOST)).rate()
        channel.close()
    # One rank without a disk leaves all without.
    if -watch.largest(-rate) <= 0.0:
        return NO_DISK
    free = os.statvfs(folder)
    free_bytes = -watch.largest(-float(free.f_bavail * free.f_frsize))
    return DiskSample(bytes_per_s=watch.mean(rate), free_bytes=free_bytes, num_ranks=num_ranks)

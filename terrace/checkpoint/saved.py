"""The record of one checkpoint that a run wrote."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint that is complete, and what it cost this rank."""

    folder: Path
    num_bytes: int  # of this rank
    stalled_s: float  # that training stood still: to wait for the save before, and to copy
    write_s: float  # until all ranks had written and the folder was renamed

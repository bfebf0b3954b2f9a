"""Torch's flight recorder: the last collectives of every rank, written to the run folder when a run hangs.

Torch records the collectives that a process issued (group, number within it, sizes, whether it has ended) in a ring
buffer. NCCL has its own recorder; Gloo uses a general one, which lacks sends and receives. NCCL writes its recorder
only when its own timeout fires. Terrace's watchdog ends a hang earlier, so it writes the file itself.

The functions are not part of torch's public interface. If there is a JSON form, it is used; the other form is a pickle,
which is stored as it is and never read here.
"""

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from terrace.base.files import write_atomic
from terrace.base.printable import printable
from terrace.launch.rank_log import write_loud

FOLDER = "flight"  # in the run folder
_SIZE, _FORMER_SIZE = "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"  # torch reads both
_JSON = "_json"
_NUM_RECORDS = 2000  # torch 2.13's own default; some 1 MB as JSON
LIMIT_S = 5.0  # to write a file; a disk may hang, too
# JSON is preferred to a pickle; a recorder without records is skipped.
_FUNCTIONS = {
    "nccl": ("_dump_nccl_trace_json", "_dump_fr_trace_json", "_dump_nccl_trace", "_dump_fr_trace"),
    "gloo": ("_dump_fr_trace_json", "_dump_fr_trace"),
}


def settings() -> dict[str, str]:
    """Environment variables that enable the recorder; empty if the user has set its size."""
    return {} if {_SIZE, _FORMER_SIZE} & os.environ.keys() else {_SIZE: str(_NUM_RECORDS)}


@dataclass(frozen=True)
class FlightRecorder:
    """The recorder of this process and the folder for its file. `functions` are torch's, in order of preference."""

    folder: Path
    functions: Sequence[Callable[[], bytes]]
    is_json: bool

    def words(self) -> str:
        """Location of all ranks' files, for the message of a hang; the same on every rank."""
        return f"; the last collectives of the ranks: {self.folder}/step-*-rank-*.{self._kind}"

    def keep(self, step: int, rank: int) -> str | None:
        """Writes this rank's records, in a few seconds at most. Returns the problem, or None.

        Replaces the file of an earlier hang of this rank at the same step.
        """
        problem: list[str | None] = [f"not written within {LIMIT_S:g} s"]

        def write() -> None:
            try:
                write_atomic(self.folder / f"step-{step:08d}-rank-{rank:05d}.{self._kind}", self._records())
                problem[:] = [None]
            except (OSError, RuntimeError) as error:
                problem[:] = [str(error).split("\n")[0]]

        # In its own thread, since the caller ends the process even if the disk hangs.
        writer = threading.Thread(target=write, name="flight recorder", daemon=True)
        writer.start()
        writer.join(LIMIT_S)
        return problem[0]

    def keep_or_say(self, step: int, rank: int) -> None:
        """Like `keep`, but prints the problem to stderr."""
        problem = self.keep(step, rank)
        if problem is not None:
            write_loud(f"terrace: rank {rank} cannot keep its last collectives: {printable(problem)}\n")

    @property
    def _kind(self) -> str:
        return "json" if self.is_json else "pickle"

    def _records(self) -> bytes:
        for function in self.functions:
            records = function()
            if not self.is_json or b'"entries"' in records:
                break
        return records


def flight_recorder(folder: Path) -> tuple[FlightRecorder | None, str]:
    """The recorder of this process for `folder`, or None and the reason, which is "" if the user disabled it.

    Call it after torch's process group was made.
    """
    if _size() <= 0:
        return None, ""
    # Imported here, since callers that only need the settings start without torch.
    import torch
    import torch.distributed as dist

    module: Any = torch._C._distributed_c10d
    there = [name for name in _FUNCTIONS[dist.get_backend()] if hasattr(module, name)]
    chosen = [name for name in there if name.endswith(_JSON)] or there
    if not chosen:
        return None, f"torch {torch.__version__} has no flight recorder: a hang will be told without last collectives"
    return FlightRecorder(folder, [getattr(module, name) for name in chosen], chosen[0].endswith(_JSON)), ""


def _size() -> int:
    for name in (_SIZE, _FORMER_SIZE):
        text = os.environ.get(name)
        if text is not None:
            return int(text) if text.isdecimal() else 0
    return 0

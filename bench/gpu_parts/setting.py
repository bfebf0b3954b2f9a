"""The setting of all parts, and the rows that they return."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

Work = Callable[[], object]
SECONDS = "training.json"  # in a setting's folder: the steps of the contestants so far


_MOST_WORDS = 160  # characters of an error
NOT_RUN, SKIPPED = "not run", "skipped"  # no time was left; something that a part needs is not here


class Row(NamedTuple):
    """A line of the table. A row with a goal is a figure that should reach it, one without is right or wrong.

    `without` is `NOT_RUN` or `SKIPPED` where nothing was tried, which is neither.
    """

    subject: str
    found: str
    passes: bool = True
    goal: str = ""
    without: str = ""

    @classmethod
    def refused(cls, subject: str, error: object, *, must: bool) -> "Row":
        """A row of something that a device refused; `must`: it is promised there, so the refusal is wrong."""
        words = f"refused: {' '.join(str(error).split())[:_MOST_WORDS]}"
        return cls(subject, words, not must, without="" if must else SKIPPED)

    @property
    def verdict(self) -> str:
        if self.without:
            return self.without
        if self.passes:
            return "ok"
        return "missed" if self.goal else "WRONG"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where a part runs; `tiny` is for trying the parts themselves, on a machine without a GPU too."""

    device: str = "cuda"
    tiny: bool = False
    peak_tflops: float  # dense bf16, of the data sheet
    folder: Path  # for files of the part's own; what it leaves there, later parts may read

    @property
    def is_cuda(self) -> bool:
        return self.device == "cuda"

    def size(self, usual: int, tiny: int) -> int:
        """The one that counts here."""
        return tiny if self.tiny else usual

    def goal(self, reached: bool) -> bool:
        """Whether a row with a goal passes: at the smallest sizes nothing is measured."""
        return reached or self.tiny

    def finish(self) -> None:
        """Wait for the device."""
        if self.is_cuda:
            import torch  # here: the process that starts the parts does without

            torch.cuda.synchronize()

    def median_s(self, work: Work, rounds: int = 20) -> float:
        """The median time of a call on the device, in seconds, after three others, which may compile."""
        for _ in range(3):
            work()
        return statistics.median(self._once_s(work) for _ in range(self.size(rounds, 2)))

    def _once_s(self, work: Work) -> float:
        if not self.is_cuda:
            begin_s = time.perf_counter()
            work()
            return time.perf_counter() - begin_s
        import torch

        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

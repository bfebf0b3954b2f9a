"""Rehearsals whose processes start warm (tests.support.warm), so that islands cost seconds instead of imports."""

import os
from collections.abc import Sequence
from pathlib import Path

from terrace.lab.faults.findings import Findings, findings
from terrace.lab.faults.grammar import check_faults, parse_fault
from terrace.lab.faults.islands import Rehearsal, Seen, Start
from terrace.lab.faults.restarts import Restarts
from tests.support import warm
from tests.support.tiny_runs import environment, write_run


class Warm:
    """A process of `terrace`, as `terrace.lab.faults.islands.Process`."""

    def __init__(self, words: Sequence[str], output: Path, orders: str, cwd: Path) -> None:
        table = environment() | {"TERRACE_FAULTS": orders, "TERRACE_SECRET": "only the islands know this"}
        self._command = warm.Command(words, cwd, table, screen=os.fspath(output), leads=True)
        self.pid = self._command.pid

    def poll(self) -> int | None:
        return self._command.returncode


def _start_in(folder: Path) -> Start:
    return lambda words, output, orders: Warm(words, output, orders, folder)


def rehearse(
    folder: Path, num_islands: int, texts: Sequence[str], ranks: int = 1, steps: int = 5
) -> tuple[Seen, Findings]:
    """Rehearse faults on islands of so many ranks, with an exchange after every step and a patience of 4 s."""
    write_run(folder, ranks, plan="ddp" if ranks == 1 else "zero1", steps=steps, batch=12)
    faults = [parse_fault(text) for text in texts]
    check_faults(faults, num_islands)
    (folder / "out").mkdir()
    words = ["train", "--config", "run.toml", "--elastic.every", "1", "--elastic.patience_s", "4"]
    seen = Rehearsal(words, num_islands, faults, folder / "out", _start_in(folder), print).run()
    return seen, findings(seen, 12, 1)


def rehearse_restarts(folder: Path, texts: Sequence[str]) -> Restarts:
    """Rehearse faults on a run of two ranks without islands, with a checkpoint after every second step."""
    (folder / "out").mkdir(parents=True)
    write_run(folder, 2, plan="zero1", steps=6, checkpoint_every=2, timeout_s=8.0)
    faults = [parse_fault(text) for text in texts]
    check_faults(faults, 0)
    restarts = Restarts(["train", "--config", "run.toml"], faults, folder / "out", _start_in(folder), print)
    restarts.run()
    return restarts

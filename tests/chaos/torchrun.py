"""Cases of the campaign whose ranks torchrun starts: the command, its strikes, and what may be said of its end.

A rank's errors are in a file of its own, apart from torchrun's traceback. Before the ranks watch each other, torchrun
alone knows of the end of one: it ends the others, and names the rank itself.
"""

import random
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.chaos.strikes import Strike

SHARE, MOST_RANKS = 1 / 6, 4  # of the cases; every rank starts cold
END_S = 30.0  # that torchrun leaves a rank after SIGTERM
LEAVE_S = 60.0  # that ranks have to end after torchrun: those that still import end once they look for its store
_LOG = "log"
# Torch's own warnings, with frames, when the store's process is gone.
_OF_TORCH = re.compile(r"(\[rank\d+\]:)?\[[WE]\d{3,4} |frame #\d+:|<omitting |Exception raised from |\s*$")
_OF_TERRACE = re.compile(r'File ".*/terrace/(?!__init__\.py", line \d+, in <module>)|^terrace: ', re.MULTILINE)
_PHASES = ("starting", "calibrating", "computing", "computing", "saving", "ending")
_SIGNALS = {
    "worker": ("SIGKILL", "SIGKILL", "SIGSTOP", "stall", "SIGTERM"),
    "launcher": ("SIGKILL", "SIGKILL", "SIGTERM", "SIGINT", "stall"),
}
_WATCHED = ("computing", "saving")
_STOPPED = ("SIGTERM", "SIGINT")


def drawn_under(generator: random.Random, num_ranks: int) -> Strike:
    """A strike at a random instant of a run under torchrun, which may start the ranks once more."""
    phase = generator.choice(_PHASES)
    victim = "launcher" if phase == "starting" else generator.choice(("worker", "worker", "launcher"))
    chosen = generator.choice(_SIGNALS[victim])
    # Ranks wait for ten minutes for one that has not joined.
    chosen = "stall" if chosen == "SIGSTOP" and phase not in _WATCHED else chosen
    return Strike(
        phase=phase,
        victim=victim,
        signal=chosen,
        rank=generator.randrange(num_ranks),
        where=generator.random(),
        restarts=generator.randrange(2),
    )


class Torchrun:
    """`terrace` with these words as ranks of torchrun, with the methods of `warm.Command`."""

    def __init__(
        self, words: Sequence[str], cwd: Path, environment: Mapping[str, str], num_ranks: int, restarts: int
    ) -> None:
        self._log = cwd / _LOG
        self._log.mkdir(exist_ok=True)
        self._before = set(self._log.rglob("stderr.log"))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
        command += [f"--max-restarts={restarts}", "--redirects=3", f"--log-dir={self._log}", "-m", "terrace", *words]
        with (self._log / "torchrun.txt").open("w") as said:
            self._process = subprocess.Popen(
                command,
                cwd=cwd,
                env={**environment, "TERRACE_SECRET": "of the campaign alone"},
                stdout=said,
                stderr=said,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Waits for the end; nothing, and the errors of all ranks. Raises `subprocess.TimeoutExpired`."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise
        return "", self.errors()

    def errors(self) -> str:
        """All that the ranks have said on stderr, once they were Terrace's."""
        files = sorted(set(self._log.rglob("stderr.log")) - self._before)
        texts = [path.read_text(errors="replace") for path in files]
        return "".join(text for text in texts if not is_of_python(text))


def of_terrace(errors: str) -> list[str]:
    """The lines that are not torch's own warnings."""
    return [line for line in errors.splitlines() if not _OF_TORCH.match(line)]


def is_of_python(text: str) -> bool:
    """Whether `text` is the traceback of an interpreter that was interrupted before it ran a line of Terrace."""
    return text.rstrip().endswith("KeyboardInterrupt") and not _OF_TERRACE.search(text)


def judged(what: Strike, code: int, took_s: float, errors: str, pids: Sequence[int], named_s: float) -> tuple[str, str]:
    """How a struck run under torchrun ended, in a word, and what is wrong with that or \"\"."""
    lines = of_terrace(errors)
    if alien := [line for line in lines if not line.startswith("terrace: ")]:
        return "other", f"a rank said: {alien[-1]} ({len(lines)} lines)"
    if code == 0:
        lost = what.victim == "worker" and what.signal in ("SIGKILL", "SIGSTOP") and what.phase != "ending"
        return "went on", "a run without one of its ranks ended well" if lost and not what.restarts else ""
    if what.victim == "launcher" and code == -signal.SIGKILL:
        return "killed", ""
    if what.signal in _STOPPED:
        return "stopped in order", "" if took_s < named_s + END_S else f"stopped after {took_s:.1f} s"
    # Its last heartbeat may reach the store late: it is then named by where it is, without its process.
    named = re.search(r"^terrace: rank (\d+)", errors, re.MULTILINE)
    if what.victim == "worker" and (
        any(f"pid {pid}" in errors for pid in pids) or (named is not None and int(named[1]) == what.rank)
    ):
        return "named", "" if took_s < named_s + END_S else f"the culprit was named after {took_s:.1f} s"
    if what.victim == "worker" and what.phase not in _WATCHED and what.signal == "SIGKILL":
        return "named", ""  # by torchrun
    return "other", f"ended with {code} after {took_s:.1f} s: {errors.strip()[-400:]}"

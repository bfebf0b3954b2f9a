"""The meeting place of a roster: one process with a port and a log (`terrace meet`).

It receives reports of islands, decides (terrace.roster.decisions) and replies. Every decision is on the disk before an
island receives it, so this process may be killed and started again with the same log. It holds no parameters.
"""

import fcntl
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from math import inf
from pathlib import Path

from terrace.base.errors import ConfigError, TerraceError, TrainingError
from terrace.base.schema import load
from terrace.base.words import counted
from terrace.launch.seal import Seal
from terrace.roster.decisions import arrival, forsaken, reply, settled
from terrace.roster.entries import Attempted, Dealt, Entry, Finished, Gone, Joined, entry_of, line_of
from terrace.roster.reports import Contact, Reply, Report, cut, restarted, with_report
from terrace.roster.state import Roster, after, folded
from terrace.roster.talk import Talk

_TICK_S = 0.1
_BACKLOG = 256
_SILENT_S = 600.0  # a connection without a line is closed
_PROVE_S = 10.0  # until its first line, since islands report as soon as they are connected
_MOST_STRANGERS = 64  # connections without a sealed line yet, each of which may hold one line in memory
_SAY_AGAIN_S = 60.0  # between two lines on refused connections
_ENDING_S = 5.0  # in which islands ask once more after the end


class Log:
    """The file of a roster's decisions. Only one process has it open.

    Raises `ConfigError` for a file that another meeting place uses or that is no log.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and not path.is_file():
                raise ConfigError(f"--log {path} is no file, so no decision would be kept there: name another --log")
            # Without a buffer, which would write lines of a failed write again.
            self._file = path.open("a+b", buffering=0)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}; name another --log") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise ConfigError(f"{path} is in use by another meeting place: stop it, or name another --log") from error
        self.entries = self._read()

    def _read(self) -> list[Entry]:
        self._file.seek(0)
        whole = self._file.readall()
        # A process that was killed may have left the beginning of a line, which no island has received.
        kept, _, rest = whole.rpartition(b"\n")
        if rest:
            self._file.truncate(len(whole) - len(rest))
        lines = kept.decode(errors="replace").splitlines()
        return [entry_of(line, f"{self.path}, line {number}") for number, line in enumerate(lines, 1)]

    def write(self, entries: tuple[Entry, ...]) -> None:
        """Append entries; they are on the disk when this returns.

        Raises `TrainingError` if they cannot be written: the log may then have some of them, so nothing more can be
        decided before it is read again.
        """
        data = memoryview("".join(f"{line_of(entry)}\n" for entry in entries).encode())
        try:
            begin = os.fstat(self._file.fileno()).st_size
            try:
                while data:
                    data = data[self._file.write(data) :]
                os.fsync(self._file.fileno())
            except OSError:
                self._file.truncate(begin)
                raise
        except OSError as error:
            raise TrainingError(
                f"cannot write {self.path}: {error.strerror}; make room, then start terrace meet again at this port "
                "with this --log: islands wait for it"
            ) from error

    def close(self) -> None:
        self._file.close()


def read_log(path: Path) -> list[Entry]:
    """The entries of a log that a meeting place may be writing. Raises `ConfigError`."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    lines = text.rpartition(b"\n")[0].decode(errors="replace").splitlines()
    return [entry_of(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]


class Place:
    """Decides for the islands of one run. `say` gets a line for every decision that users care for.

    `wait_for` is the number of islands with which the run begins. Raises `ConfigError` for a port that is in use, and
    for a log that was changed by hand.
    """

    def __init__(self, host: str, port: int, seal: Seal, log: Path, wait_for: int, say: Callable[[str], None]) -> None:
        self._seal, self._wait_for, self._say = seal, wait_for, say
        self._log = Log(log)
        try:
            self._roster = folded(self._log.entries, str(log))
        except ConfigError:
            self._log.close()
            raise
        self._contacts: dict[str, Contact] = restarted(self._roster, time.monotonic())
        self._deciding = threading.Lock()
        self._talks: set[Talk] = set()
        self._strangers: dict[socket.socket, None] = {}  # the oldest first
        self._is_closed = False
        self._problems: list[TrainingError] = []  # with the log, which end this process
        self._num_refused, self._said_s = 0, -inf
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        except (OSError, OverflowError) as error:
            self._log.close()
            raise ConfigError(f"cannot listen at {host or '*'}, port {port}: {error}; name another port") from error
        self.port = int(self._listener.getsockname()[1])
        if self._log.entries:
            say(f"resumed from {log}: {len(self._log.entries)} decisions, {_members(self._roster)}")

    def serve(self, is_over: Callable[[], bool] = lambda: False) -> bool:
        """Serve until the run is finished and all islands know it, or `is_over`. Returns whether it is finished.

        Raises `TrainingError` if the log cannot be written.
        """
        threading.Thread(target=self._accept, name="roster place", daemon=True).start()
        ended_s: float | None = None
        try:
            while not is_over():
                time.sleep(_TICK_S)
                with self._deciding:
                    self._settle()
                if self._roster.is_finished:
                    ended_s = ended_s or time.monotonic()
                    if not self._talks or time.monotonic() - ended_s > _ENDING_S:
                        return True
            return False
        finally:
            self.close()

    def close(self) -> None:
        self._is_closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for talk in list(self._talks):
            talk.end()
        with self._deciding:
            self._log.close()

    def _refuse(self, address: str) -> None:
        """Say that a connection was refused, at most once in a while."""
        with self._deciding:
            self._num_refused += 1
            if time.monotonic() - self._said_s > _SAY_AGAIN_S:
                self._say(
                    f"refused {counted(self._num_refused, 'connection')} without the secret of the run, the last from "
                    f"{address}: TERRACE_SECRET must be the same for terrace meet and all islands"
                )
                self._num_refused, self._said_s = 0, time.monotonic()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                link, (address, *_) = self._listener.accept()
            # Closed, or out of files for a moment, or the other end has gone already: no reason to stop listening.
            except OSError:
                time.sleep(_TICK_S)
                continue
            link.settimeout(_PROVE_S)
            self._strangers[link] = None
            for oldest in list(self._strangers)[:-_MOST_STRANGERS]:
                self._strangers.pop(oldest, None)
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it
            threading.Thread(target=self._hold, args=(link, address), name="roster island", daemon=True).start()

    def _hold(self, link: socket.socket, address: str) -> None:
        last: Report | None = None
        talk: Talk | None = None
        try:
            talk = Talk(link, self._seal, serves=True)
            self._talks.add(talk)
            while True:
                last = load(Report, talk.receive(), "a report")
                if self._strangers.pop(link, self) is None:
                    link.settimeout(_SILENT_S)
                talk.send(asdict(self._answer(last)))
        # The island has ended, or a stranger has connected: only this connection ends.
        except (OSError, TerraceError, ValueError):
            pass
        finally:
            self._strangers.pop(link, None)
            if talk is not None:
                self._talks.discard(talk)
                talk.close()
            link.close()
            if last is None and not self._is_closed:
                self._refuse(address)
            # Unless this process itself closes the connection.
            if last is not None and not self._is_closed:
                with self._deciding:
                    self._contacts = cut(self._contacts, last.island, last.token)

    def _answer(self, report: Report) -> Reply:
        with self._deciding:
            now_s = time.monotonic()
            entries, answer = arrival(self._roster, self._contacts, report, now_s)
            self._take(entries)
            if answer is not None:
                return answer
            self._contacts = with_report(self._contacts, report, now_s)
            self._settle()
            return forsaken(self._roster, self._contacts, report, now_s) or reply(self._roster, report)

    def _settle(self) -> None:
        _, entries = settled(self._roster, self._contacts, time.monotonic(), self._wait_for)
        self._take(entries)

    def _take(self, entries: tuple[Entry, ...]) -> None:
        for problem in self._problems:
            raise problem
        try:
            self._log.write(entries)
        except TrainingError as error:
            self._problems.append(error)
            raise
        for entry in entries:
            self._roster = after(self._roster, entry)
            if words := in_words(entry):
                self._say(words)


def _members(roster: Roster) -> str:
    names = ", ".join(each.name for each in roster.members) or "none"
    return f"window {roster.window}, exchange {roster.exchange}, islands {names}"


def in_words(entry: Entry) -> str:
    """A decision as a line for users; "" for those that need none."""
    match entry:
        case Joined():
            return f"island {entry.island} has joined" + ("" if entry.version == 0 else ", and waits to be healed")
        case Dealt():
            shares = ", ".join(f"{name} {share}" for name, share in entry.shares.items())
            return f"roster {entry.number} trains steps {entry.first + 1} to {entry.last + 1}: shares {shares}"
        case Attempted() if entry.attempt or entry.missed:
            left_out = "".join(f"; without {name}: {why}" for name, why in entry.missed.items())
            again = f", attempt {entry.attempt + 1}" * bool(entry.attempt)
            return f"exchange {entry.exchange}{again} among {', '.join(entry.islands)}{left_out}"
        case Gone():
            lost = "nothing is lost"
            if entry.first >= 0:
                lost = f"lost: its {entry.share} rounds of each of steps {entry.first + 1} to {entry.last + 1}"
            return f"island {entry.island} has left the roster: {entry.why}; {lost}"
        case Finished():
            return f"the run is finished: version {entry.version}"
        case _:
            return ""

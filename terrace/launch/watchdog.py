"""Watchdog: if a step stops, every rank learns which rank stopped it, reports that in one line, and exits.

A thread publishes the main thread's position in the store. If a rank has not moved for its timeout, one of its
collectives fails, or it gets SIGTERM because another rank died, one elected rank reads all heartbeats twice and
publishes a verdict that every other rank repeats. So thousands of ranks do not overload the store, and all survivors
report the same.

The thread runs while the main thread releases the interpreter lock, as collectives and kernels do. A rank that never
releases it publishes nothing, so the others name it, and its launcher has to end it.
"""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Literal, NamedTuple, Self

from torch.distributed.distributed_c10d import PrefixStore, Store

from terrace.base.errors import ConfigError, HangError
from terrace.base.printable import printable
from terrace.launch.flight import LIMIT_S, FlightRecorder
from terrace.launch.heartbeats import HeartbeatStore, Position, Stillness
from terrace.launch.postmortem import Heartbeat, State, compress, diagnose
from terrace.launch.rank_log import write_loud
from terrace.launch.seal import Seal
from terrace.launch.signals import SIGNALS
from terrace.launch.silence import BEATS, INTERVAL_S, WINDOW_INTERVALS
from terrace.launch.slow import Lookout, OwnTimes
from terrace.launch.wake_pipe import WakePipe
from terrace.launch.world import World, is_communication_error

EXIT_HANG = 70  # EX_SOFTWARE of sysexits.h
EXIT_STOPPED = 128 + signal.SIGTERM  # the shell's code for SIGTERM

_MAX_WRITES_PER_S = 2000  # a store took some 10^5 small calls a second on one core; on other machines: a guess
_ATTEMPTS = 3

_Cause = Literal["error", "stalled", "stopped", "settled", "silent"]


class _Seconds(NamedTuple):
    """Durations in seconds: between heartbeats before the first step (`early`) and after it (`interval`), between the
    two readings of a post-mortem (`window`), in which every living rank publishes, and the timeout of a step.
    """

    early: float
    interval: float
    window: float
    timeout: float

    @classmethod
    def of(cls, timeout_s: float, interval_s: float, world_size: int) -> "_Seconds":
        least_s = world_size / _MAX_WRITES_PER_S
        interval_s = max(min(interval_s, timeout_s / 8), least_s)
        window_s = WINDOW_INTERVALS * interval_s
        if window_s > timeout_s / 2:
            raise ConfigError(
                f"a timeout of {timeout_s:g} s is too short to watch {world_size} ranks: "
                f"make it at least {int(2 * window_s) + 1} s"
            )
        # More often before the first step: there is no vote on a stop there, and the user waits for two looks.
        return cls(max(interval_s / 2, least_s), interval_s, window_s, timeout_s)


class _Departure:
    """How a rank leaves: its `state` after leaving, the `reason`, and the verdict (`answer`) for a rank that asked."""

    def __init__(self) -> None:
        self.state: State | None = None
        self.reason = self.answer = ""
        self.is_published, self.is_answered = threading.Event(), threading.Event()

    def begin(self, state: State, error: BaseException | None) -> None:
        self.reason = "" if error is None else f"{type(error).__name__}: {error}".strip().split("\n")[0]
        self.is_published.clear()
        self.state = state


class Watchdog:
    """Publishes this rank's position, and names the culprit if the step stops. A context manager.

    `store` must be a name space that no earlier watchdog used, because a verdict in it is final. Heartbeats come every
    `interval_s`, more often with a short `timeout_s` (eight per timeout), less often in a large world (at most 2000
    writes per second in all). `on_hang` gets the message instead of stderr. `catch_sigterm` delays SIGTERM until the
    message is out, and needs the main thread. With `stops`, words for the user, other code handles stop signals once it
    has called `begin`, and the watchdog acts on SIGTERM only if a rank is missing; before `begin`, a signal ends the
    rank with these words. `recorder` holds this rank's last collectives, which are saved if the run hangs.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        timeout_s: float,
        interval_s: float = 0.5,
        on_hang: Callable[[str], None] | None = None,
        catch_sigterm: bool = False,
        stops: str = "",
        seal: Seal,
        store_rank: int | None = None,
        recorder: FlightRecorder | None = None,
    ) -> None:
        self._seconds = _Seconds.of(timeout_s, interval_s, world_size)
        self._rank, self._store_rank = rank, store_rank
        self._stops, self._begun = stops, not stops
        self._on_hang = on_hang
        self._recorder = recorder
        self._kept = "" if recorder is None else recorder.words()
        self._heartbeats = HeartbeatStore(store, rank, world_size, timeout_s, seal)
        self._whereabouts = f"host {socket.gethostname()}, pid {os.getpid()}"
        self._position = Position(0, 0, "start", None, 0.0)
        self._still = Stillness(self._position, 3 * self._seconds.interval)
        self._number = 0  # of heartbeats
        self._unpublished_s = 0.0  # since the store took a heartbeat
        self._departure, self._closing = _Departure(), False
        self._stop_request = ""  # the name of a signal
        self.lookout = Lookout(rank, world_size, limit_s=timeout_s, least_s=world_size / _MAX_WRITES_PER_S)
        self._own_times, self._figures = OwnTimes(0), (0.0, 0.0, 0.0)
        self._pipe = WakePipe(hears_signals=catch_sigterm, delays_sigterm=not stops)
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def at(self, step: int, counter: int, doing: object, ranks: tuple[int, ...] = (), extra_s: float = 0.0) -> None:
        """Sets the main thread's position, the ranks it waits with (none: it computes), and seconds beyond the timeout.

        A single assignment, cheap enough for the hot loop.
        """
        self._position = Position(step, counter, doing, ranks, extra_s)

    def look_for_slow(self, peers: Sequence[Sequence[int]], factor: float, num_steps: int) -> None:
        """Publishes statistics of the last `num_steps` steps, by which ranks are compared with their `peers`."""
        self._own_times = OwnTimes(num_steps)
        self.lookout.compare(peers, factor)

    def stepped(self, own_s: float, step_s: float) -> None:
        """Records a finished step. `own_s` are the seconds in which this rank read and computed, without waiting."""
        self._own_times.add(own_s, step_s)
        self._figures = self._own_times.figures()

    def name_island(self, number: int) -> None:
        self._whereabouts = f"island {number}, {self._whereabouts}"

    def begin(self) -> None:
        """Marks the start of the first step: the main thread handles stop signals from now on."""
        self._begun = True

    def idle(self, what: str = "between steps") -> None:
        """Marks the main thread as outside a step: no timeout runs until the next `at`."""
        self._position = self._position._replace(doing=what, ranks=None, extra_s=0.0)

    def explain(self, error: BaseException) -> HangError:
        """The error that names the culprit, after a collective on this rank failed with `error`.

        Takes about four intervals. The process's connections must stay open meanwhile.
        """
        # This rank's error is a consequence; publishing it as such leads the others past it to the cause.
        self._leave("dragged", error)
        answered = self._departure.is_answered.wait((_ATTEMPTS + 1) * (2 * self._seconds.window + 1.0) + LIMIT_S)
        return HangError(self._departure.answer if answered else self._own_words())

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Turns a communication error in the body into the `HangError` that names its cause.

        Any other error is published as this rank's reason to leave, and propagates.
        """
        try:
            yield
        except HangError:
            raise
        except BaseException as error:
            if is_communication_error(error, waiting=bool(self._position.ranks)):
                raise self.explain(error) from error
            self._leave("failed", error)
            self._departure.is_published.wait(2 * self._seconds.interval)
            raise

    def __enter__(self) -> Self:
        self._pipe.__enter__()
        self._beat()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        # Leaving is published; otherwise the others would consider a finished rank dead.
        if self._departure.state is None:
            self._leave("failed" if error else "left", error)
        self._closing = True
        self._pipe.wake()
        self._thread.join(self._seconds.timeout)
        self._pipe.__exit__()
        if not self._thread.is_alive():
            self._pipe.close()

    def _leave(self, state: State, error: BaseException | None) -> None:
        self._departure.begin(state, error)
        self._pipe.wake()

    def _run(self) -> None:
        while True:
            self._beat()
            if self._closing:
                return
            cause = self._cause()
            if cause is not None:
                self._act(cause)
            with suppress(RuntimeError):
                self.lookout.look(self._heartbeats)
            self._sleep(self._beat_s)

    @property
    def _beat_s(self) -> float:
        return self._seconds.interval if self._begun else self._seconds.early

    def _sleep(self, duration_s: float) -> None:
        woken_by = self._pipe.sleep(duration_s)
        for number in (signal.SIGTERM,) if self._begun else SIGNALS:
            if number in woken_by:
                self._stop_request = signal.Signals(number).name

    def _beat(self) -> None:
        position, leaving = self._position, self._departure.state
        self._unpublished_s += self._still.look(position)
        self._number += 1
        with suppress(RuntimeError):
            self._heartbeats.publish(self._describe(position, leaving))
            self._unpublished_s = 0.0
        if leaving is not None:
            self._departure.is_published.set()

    def _describe(self, position: Position, leaving: State | None) -> Heartbeat:
        group = position.ranks
        low_s, typical_s, step_s = self._figures
        running: State = "idle" if group is None else "waiting" if group else "computing"
        return Heartbeat(
            number=self._number,
            rank=self._rank,
            step=position.step,
            counter=position.counter,
            text=str(position.doing),
            state=leaving or running,
            group=_compressed(group) if group else "",
            still_s=round(self._still.seconds, 1),
            reason=self._departure.reason,
            place=self._whereabouts,
            low_s=low_s,
            typical_s=typical_s,
            step_s=step_s,
        )

    def _cause(self) -> _Cause | None:
        # The look takes a window, so it starts that much before the limit.
        is_still = self._still.seconds >= self._seconds.timeout + self._still.position.extra_s - self._seconds.window
        if self._stop_request and self._departure.state in (None, "dragged"):
            in_order = self._stops and self._begun and self._departure.state is None
            return "stalled" if in_order and is_still else "stopped"
        if self._departure.state is not None:
            return "error" if self._departure.state == "dragged" and not self._departure.is_answered.is_set() else None
        # Without its store a run cannot end in order, so it ends now, not after a long measurement or step.
        if self._unpublished_s >= self._seconds.window:
            return "stalled"
        if self.lookout.is_silent:
            return "silent"
        if self._position is not self._still.position or self._position.ranks is None:
            return None
        if is_still:
            return "stalled"
        # A rank without messages to a failing rank learns of the end here.
        with suppress(RuntimeError):
            if self._still.seconds >= self._seconds.window and self._heartbeats.verdict() is not None:
                return "settled"
        return None

    def _act(self, cause: _Cause) -> None:
        try:
            verdict = self._agree(cause)
        except RuntimeError as error:
            verdict = f"hang {self._without_store(error)}"
        if verdict is None:
            return
        kind, _, message = verdict.partition(" ")
        if kind == "hang" and self._recorder is not None:
            self._recorder.keep_or_say(self._position.step, self._rank)
        if self._departure.state == "dragged" and not self._stop_request:
            self._departure.answer = message
            self._departure.is_answered.set()
        elif self._departure.state in (None, "dragged"):
            self._die(message, EXIT_STOPPED if kind == "stop" else EXIT_HANG)

    def _agree(self, cause: _Cause) -> str | None:
        position = self._position
        has_grace = cause == "stopped" and self._stops and self._begun and self._departure.state is None
        for attempt in range(_ATTEMPTS):
            verdict = self._heartbeats.verdict()
            if verdict is not None:
                return verdict
            if self._heartbeats.elect(attempt):
                verdict = self._look(cause)
                # The step advanced while heartbeats were read, so it was slow, not stalled.
                moved_on = cause == "stalled" and self._position is not position and self._departure.state is None
                # All ranks publish again: the machine was suspended.
                heartbeat_resumed = cause == "silent" and not self.lookout.is_silent
                if moved_on or heartbeat_resumed or (has_grace and verdict.startswith("stop ")):
                    self._heartbeats.withdraw(attempt)
                    return None
                return self._heartbeats.settle(verdict)
            # Whoever was elected may have died since: wait for two looks, then elect again.
            deadline_s = time.monotonic() + 2 * self._seconds.window
            while time.monotonic() < deadline_s and self._heartbeats.verdict() is None:
                self._sleep(self._seconds.interval)
                self._beat()
                if cause == "stalled" and self._position is not position and self._departure.state is None:
                    return None
            if has_grace:
                return self._heartbeats.verdict()
        return self._heartbeats.verdict() or f"hang {self._own_words()}"

    def _look(self, cause: _Cause) -> str:
        before, start_s = self._heartbeats.read_all(), time.monotonic()
        window_s = WINDOW_INTERVALS * self._beat_s if cause == "stopped" else self._seconds.window
        while time.monotonic() < start_s + window_s:
            self._sleep(self._beat_s)
            self._beat()
        verdict = diagnose(before, self._heartbeats.read_all(), time.monotonic() - start_s)
        self.lookout.is_silent = verdict.rule == "silent"
        # All ranks are alive, so the stop was meant for the whole run.
        if cause == "stopped" and verdict.rule in ("behind", "nobody"):
            reason = f"rank {self._rank} was told to stop ({self._stop_request})"
            if not self._begun:
                return f"stop {reason} before its first step; {self._stops}"
            return f"stop {reason} at {self._describe(self._position, None).where()}; no rank was missing"
        # If the rank's own error ended it, the last collectives are of no use.
        return f"failed {verdict.message}" if verdict.rule == "failed" else f"hang {verdict.message}{self._kept}"

    def _own_words(self) -> str:
        beat = self._describe(self._position, None)
        where = beat.where() + (f"; it waits with ranks {beat.group}" if beat.group else "")
        return f"rank {self._rank} stopped at {where}; no post-mortem could be made{self._kept}"

    def _without_store(self, error: RuntimeError) -> str:
        host = "the launcher" if self._store_rank is None else f"rank {self._store_rank}"
        first = str(error).split("\n")[0]
        return f"{host} stopped: the store it hosts does not answer ({first}); {self._own_words()}"

    def _die(self, message: str, code: int) -> None:
        # From this thread, because the main thread may block in a collective forever.
        if self._on_hang is not None:
            self._on_hang(message)
        elif code == EXIT_HANG or message.startswith(f"rank {self._rank} "):  # one line for a plain stop
            write_loud(f"terrace: {printable(message)} (reported by rank {self._rank})\n")
        os._exit(code)


@lru_cache(maxsize=1)
def _compressed(ranks: tuple[int, ...]) -> str:
    return compress(ranks)


def watch(
    world: World,
    *,
    timeout_s: float,
    interval_s: float = INTERVAL_S,
    stops: str = "",
    recorder: FlightRecorder | None = None,
) -> Watchdog:
    """Watchdog of `world`, with the message delivery of its launcher.

    With `stops`, words for the user, the main thread ends the run in order after SIGTERM.
    """
    return Watchdog(
        PrefixStore(BEATS, world.store),
        world.rank,
        world.world_size,
        timeout_s=timeout_s,
        interval_s=interval_s,
        on_hang=world.on_hang,
        catch_sigterm=world.supervised,
        stops=stops,
        seal=world.seal.within(BEATS),
        store_rank=world.store_rank,
        recorder=recorder,
    )

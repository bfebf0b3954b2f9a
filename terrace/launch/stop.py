"""Stop requests, and the agreement of all ranks on the step after which they stop.

A signal may reach one rank, all of them, or the process that started them, at any time. Every rank reads a key of the
store after each step. A rank that wants to stop writes there a step that no rank can have ended yet: it writes before
it enters step k + 1, and no rank ends a step before all have entered it, because a step ends with sums over all ranks.
So all ranks read the key in time and stop after the same step.

In a large world ranks read the key only every few steps, to limit the load on the store. Islands (terrace.plan.outer)
read it when one of their fragments has its turn, since the store is across a slow link. Until a rank has started the
exchange of its next turn, no island is more than the exchange's delay past that step. So a rank that wants to stop
writes the first turn that is at least that late.

Before the first step (reading a checkpoint, measuring) nothing would be lost, so a request ends the ranks at once.
"""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any, Literal

from torch.distributed.distributed_c10d import PrefixStore

from terrace.base.schema import load
from terrace.launch.seal import Seal
from terrace.launch.signals import SIGNALS, handled
from terrace.launch.world import World

# If a signal goes to all processes of a job, ranks also get it from their launcher.
_SAME_S = 2.0
_LOOKS_A_STEP = 512  # ranks that may ask the store in one step: a guess
_REQUESTED, _AGREED, _BEGUN = "stop/asked", "stop/agreed", "stop/begun"


@dataclass(frozen=True, kw_only=True)
class Stop:
    """Reason for a stop, and the step after which all ranks stop. `text` is a signal's name or an error."""

    step: int
    why: Literal["signal", "failed"]
    text: str


class StoppedEarly(BaseException):
    """A signal, named in the message, came before the first step. Raised by its handler."""


class StopSignal:
    """Context manager that records the first stop signal of this process; a later one ends the process at once.

    Signals within two seconds count as one. Has no effect outside the main thread.
    """

    def __init__(self, signals: Sequence[int] = SIGNALS) -> None:
        self.name: str | None = None  # of the signal
        self._since_s = 0.0
        self._handled = handled(signals, self._take)

    def __enter__(self) -> "StopSignal":
        self._handled.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._handled.__exit__(None, None, None)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.name is None:
            self.name, self._since_s = signal.Signals(number).name, time.monotonic()
        # Launchers often send a signal to a group and its members, so one request may arrive twice.
        elif time.monotonic() - self._since_s > _SAME_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


class StopRequest:
    """A stop requested by a signal in this process; `name` is the signal's, once it has come."""

    def __init__(self) -> None:
        self.name: str | None = None
        self._has_begun = False

    def begin(self) -> None:
        """From now on a signal requests a stop after the current step."""
        self._has_begun = True

    def ask(self, name: str) -> None:
        """Handler for `passed_on`. Raises `StoppedEarly` before the steps have begun, when nothing would be lost."""
        if not self._has_begun:
            raise StoppedEarly(name)
        self.name = name


@contextmanager
def passed_on(ask: Callable[[str], None]) -> Iterator[None]:
    """In the parent of the ranks, calls `ask` on the first signal; one more than two seconds later has its previous
    effect.

    Has no effect outside the main thread.
    """
    first_s: list[float] = []

    def take(number: int, frame: FrameType | None) -> None:
        if not first_s:
            first_s.append(time.monotonic())
            ask(signal.Signals(number).name)
        elif time.monotonic() - first_s[0] > _SAME_S:
            signal.signal(number, before[number])
            os.kill(os.getpid(), number)

    with handled(SIGNALS, take) as before:
        yield


def begin_steps(world: World) -> None:
    """From now on ranks vote on stops. Rank 0 calls this before its first step."""
    world.store.set(_BEGUN, "")


def ask(store: Any, seal: Seal, name: str) -> None:
    """Asks the ranks in the world of `store` to stop, from another process.

    Raises `StoppedEarly` if their steps have not begun; the caller then ends them.
    """
    if not store.check([_BEGUN]):
        raise StoppedEarly(name)
    store.set(_REQUESTED, seal.close(_REQUESTED, name))


class Vote:
    """Agreement of all ranks on the step after which they stop. Each rank calls `after` at every step.

    With islands, `interval` is the number of steps between exchanges of two fragments, and `delay` the number of steps
    that an exchange may take. Without islands ranks meet in every step. Without `asks_outside` a stop by the
    process that started the ranks is ignored.
    """

    def __init__(
        self, world: World, signal_: StopSignal, *, interval: int = 1, delay: int = 0, asks_outside: bool = True
    ) -> None:
        self._rank, self._alone, self._signal = world.rank, world.world_size == 1, signal_
        self._store, self._seal = PrefixStore("run", world.store), world.seal
        is_asked = asks_outside and world.rank == 0 and not world.supervised
        self._outside = world.store if is_asked else None
        self._every = interval * -(-(1 + world.world_size // _LOOKS_A_STEP) // interval)
        # Steps from a look to the first look that all ranks are still before.
        self._ahead = self._every * -(-(self._every + delay) // self._every)
        self._request: tuple[Literal["signal", "failed"], str] | None = None
        self._settled = False

    def fail(self, text: str) -> None:
        self._request = ("failed", text)

    def requested(self) -> str | None:
        """The name of the signal by which this rank, or rank 0's parent, was asked to stop; None if it was not."""
        if self._signal.name is not None:
            return self._signal.name
        if self._outside is not None and self._outside.check([_REQUESTED]):
            return self._seal.open(_REQUESTED, bytes(self._outside.get(_REQUESTED)))
        return None

    def after(self, num_done: int) -> Stop | None:
        """The stop due after `num_done` steps, or None; the same on every rank."""
        if num_done % self._every:
            return None
        if self._request is None and (name := self.requested()) is not None:
            self._request = ("signal", name)
        if self._request is not None and not self._settled:
            why, text = self._request
            # No rank can be past the look at this step, so all of them see the wish before it ends.
            step = num_done if self._alone else num_done + self._ahead
            # The first request decides; later ones in the same step would decide the same.
            stop = self._seal.close(_AGREED, json.dumps(asdict(Stop(step=step, why=why, text=text))))
            self._store.compare_set(_AGREED, "", stop)
            self._settled = True
        if not self._store.check([_AGREED]):
            return None
        agreed = load(Stop, json.loads(self._seal.open(_AGREED, bytes(self._store.get(_AGREED)))), "the agreed stop")
        return agreed if num_done >= agreed.step else None

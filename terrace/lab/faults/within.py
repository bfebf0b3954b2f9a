"""Faults within a rank: what happens at a place of a run when a rehearsal asks for it (`TERRACE_FAULTS`).

A rank writes an event before it carries out a fault, since it may not live to say so afterwards. Faults of a whole
island are carried out by its first rank, on the process group, but each rank is slow or cut off by itself.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from torch import Tensor

from terrace.base.errors import ConfigError
from terrace.base.words import counted
from terrace.lab.faults.grammar import Fault, Where, parse_fault
from terrace.lab.faults.orders import Happening, Written, read_orders
from terrace.program.instruction import Instruction
from terrace.roster.entries import Attempted
from terrace.roster.island import Kept
from terrace.roster.links import LinkError, Links
from terrace.roster.outer import RosterState
from terrace.runtime.messages import Progress
from terrace.train.injected import BEGINS, Faults

_POLL_S = 0.005
_ANSWER_S = 20.0  # for the rehearsal to carry out a reported fault
_LEAVE_S = 0.3  # for a request to stop to reach the ranks


class Injected(Faults):
    """The faults of one rank. Raises `ConfigError` for a rank that is not there."""

    def __init__(self, text: str, rank: int, world_size: int) -> None:
        self._orders, self._rank = read_orders(text), rank
        self.events = Written(self._orders.events, self._orders.island, rank)
        self._open = {int(number): parse_fault(each) for number, each in self._orders.faults.items()}
        self._reported = {int(number): parse_fault(each) for number, each in self._orders.reported.items()}
        for fault in self._open.values():
            if fault.rank >= world_size:
                raise ConfigError(f"--fault {fault.text!r}: it has {counted(world_size, 'rank')}, counted from 0")
        self._step, self._is_training = 0, False
        self._slow: tuple[float, float] = 1.0, 0.0  # factor, and until when
        self._since_s, self._cut_s = time.monotonic(), 0.0
        texts = ", ".join(fault.text for fault in self._open.values()) or "none of this run"
        self.words = f"TERRACE_FAULTS is set: this run is part of a rehearsal, with the faults: {texts}"
        self._reaching = threading.Lock()

    def watched(self, progress: Progress, step: Callable[[], int]) -> Progress:
        def watched(counter: int, instruction: object, waiting_on: tuple[int, ...]) -> None:
            if instruction == BEGINS:
                self._begin(step() + 1)
            # Between steps, parameters that an exchange or a checkpoint has changed are sent round.
            elif self._is_training and isinstance(instruction, Instruction):
                self.reach(Where(kind="instruction", number=self._step, name=instruction.op.value))
            self.drag()
            progress(counter, instruction, waiting_on)

        return watched

    def _begin(self, number: int) -> None:
        self._step, self._since_s = number, time.monotonic()
        if not self._is_training:
            self._is_training = True
            self.events.add("trains", number)
        self.reach(Where(kind="step", number=number))

    def kept(self, state: RosterState) -> Kept:
        return _Exchanging(state, self)

    def joins(self) -> None:
        while self._orders.joins >= 0 and not self._orders.answer(self._orders.joins).exists():
            time.sleep(_POLL_S)

    def meets(self, window: int) -> None:
        self._is_training = False
        self.events.add("meets", window)
        self.reach(Where(kind="exchange", number=window))

    def reach(self, here: Where) -> None:
        """Carry out what is to happen at this place."""
        for number, fault in [each for each in self._reported.items() if each[1].where == here and not self._rank]:
            with suppress(KeyError):  # another thread reports it
                self._reported.pop(number)
                self._report(number, fault)
        for number, fault in [each for each in self._open.items() if each[1].where == here and self._is_own(each[1])]:
            with suppress(KeyError):
                self._open.pop(number)
                self._carry_out(number, fault)

    def _is_own(self, fault: Fault) -> bool:
        if fault.rank < 0:
            return fault.what in ("slow", "cut") or not self._rank
        return fault.rank == self._rank

    def _report(self, number: int, fault: Fault) -> None:
        answer, until_s = self._orders.answer(number), time.monotonic() + _ANSWER_S
        if answer.exists():
            return  # another island has reported it
        self.events.add("fault", number)
        while fault.is_of_place and not answer.exists() and time.monotonic() < until_s:
            time.sleep(_POLL_S)

    def _carry_out(self, number: int, fault: Fault) -> None:
        self.events.add("fault", number)
        now_s, is_whole = time.monotonic(), fault.rank < 0
        match fault.what:
            case "kill":
                _signal(signal.SIGKILL, is_whole=is_whole)
            case "freeze":
                _signal(signal.SIGSTOP, is_whole=is_whole)
            case "leave":
                os.kill(os.getpgrp(), signal.SIGTERM)  # the process that was started, which passes it on
                # Ranks vote at the next end of a window. Within an exchange that is far enough, and the others wait.
                if fault.where.kind not in ("within", "healing"):
                    time.sleep(_LEAVE_S)
            case "slow":
                self._slow = fault.factor, now_s + fault.seconds
            case "cut":
                self._cut_s = now_s + fault.seconds
            case "join":
                raise AssertionError("a join is carried out by the rehearsal")

    def drag(self) -> None:
        """Spend as many times the time since the last call as this rank is slower."""
        (factor, until_s), now_s = self._slow, time.monotonic()
        if now_s < until_s:
            time.sleep((factor - 1) * (now_s - self._since_s))
        self._since_s = time.monotonic()

    def stand(self, links: Links, others: Sequence[str]) -> None:
        """While this rank is cut off, wait as for messages that do not arrive. Raises `LinkError`."""
        until_s = min(self._cut_s, time.monotonic() + links.patience_s)
        if not others or time.monotonic() >= self._cut_s:
            return
        while time.monotonic() < until_s and not links.is_closed:
            time.sleep(_POLL_S)
        raise LinkError(others, "it is cut off")


def _signal(number: int, *, is_whole: bool) -> None:
    if is_whole:
        os.killpg(os.getpgrp(), number)
    else:
        os.kill(os.getpid(), number)


class _Exchanging:
    """A state whose exchanges are places. It has the methods of `terrace.roster.island.Kept`."""

    def __init__(self, state: RosterState, faults: Injected) -> None:
        self._state, self._faults = state, faults
        self._state_bytes = state.nbytes - state.anchor.nbytes  # anchor and momentum, without the message

    def digest(self) -> int:
        return self._state.digest()

    def exchange(self, attempt: Attempted, own: str, links: Links) -> None:
        events = self._faults.events
        events.add("exchanges", attempt.exchange, attempt.attempt)
        watched = _Watched(links, attempt, own, self._faults)
        try:
            self._state.exchange(attempt, own, watched)
        except LinkError:
            events.add("fails", attempt.exchange, attempt.attempt)
            raise
        watched.reach()  # without others there was no message
        if watched.healing_bytes:
            what: Happening = "heals" if attempt.islands[own].version == attempt.version else "healed"
            events.add(what, attempt.exchange, attempt.attempt, watched.healing_bytes, self._state_bytes)
        events.add("holds", attempt.exchange, attempt.attempt)

    def apply(self, attempt: Attempted) -> None:
        self._state.apply(attempt)
        self._faults.events.add("applied", attempt.exchange, attempt.attempt)


class _Watched(Links):
    """Connections of an attempt, each of whose messages is a place."""

    def __init__(self, links: Links, attempt: Attempted, own: str, faults: Injected) -> None:
        # The connections are those of `links`, which the island counts and closes.
        self._inner, self._attempt, self._faults = links, attempt, faults
        self._others = [name for name in attempt.islands if name != own]
        self._is_holder = attempt.islands[own].version == attempt.version
        self._heals = any(each.version != attempt.version for each in attempt.islands.values())
        self._is_healing, self.healing_bytes = self._heals, 0

    def send(self, island: str, values: Tensor) -> None:
        self._faults.stand(self._inner, self._others)
        self._inner.send(island, values)
        self._count(values, is_own=self._is_holder)

    def receive(self, island: str, values: Tensor) -> None:
        self._faults.stand(self._inner, self._others)
        self._inner.receive(island, values)
        self._count(values, is_own=not self._is_holder)
        self.reach()

    def sent(self) -> None:
        self._faults.stand(self._inner, self._others)
        self._inner.sent()
        self._is_healing = False  # healing comes before the sums

    def reach(self) -> None:
        """This rank is in the midst of the exchange."""
        self._faults.drag()
        self._faults.reach(Where(kind="within", number=self._attempt.exchange))

    def _count(self, values: Tensor, *, is_own: bool) -> None:
        if self._is_healing and is_own:
            self.healing_bytes += values.nbytes
            self._faults.reach(Where(kind="healing"))

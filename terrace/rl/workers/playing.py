"""One environment and one response: its turns are answered in order, each with a deadline, and faults are kept.

Everything runs on one event loop in a thread beside the one that draws. Async methods run on the loop, plain ones in
threads: as many as calls wait for one. A thread that hangs is left alone, and as a daemon does not keep the process
alive.
"""

import asyncio
import inspect
import math
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any

from terrace.base.errors import DataError
from terrace.base.user_modules import shown_error
from terrace.rl.values.prompts import Prompt
from terrace.rl.workers.dialects import Dialect
from terrace.rl.workers.reward_forms import shown_prompt, shown_value
from terrace.rl.workers.reward_function import in_fp32

# A result, or the error: some, such as StopIteration and SystemExit, cannot pass through an event loop.
Returned = tuple[Any, BaseException | None]
_WAITS_S = 0.01  # that a call may wait before it gets another thread; a guess
_SLACK_S = 10.0  # beyond its deadlines, until a call counts as one that blocks the event loop; a guess


@dataclass(frozen=True)
class Played:
    """What an environment has answered so far: totals over the turns, and the newest answer in `tokens`."""

    turns: int = 0
    earned: float = 0.0  # sum of rewards
    calls: int = 0  # tool calls that the model began
    calls_read: int = 0  # and those that were valid
    environment_s: float = 0.0  # spent in the environment
    tokens: tuple[int, ...] = ()
    is_done: bool = False
    fault: str = ""  # what went wrong, with prompt and turn


class _FaultError(Exception):
    pass


class Loop:
    """An event loop in a thread of its own, and the threads in which plain functions are called."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._calls, self._num_threads, self._is_growing = SimpleQueue[Callable[[], None] | None](), 0, False
        threading.Thread(target=self._run, name="environments", daemon=True).start()

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    async def plain(self, function: Callable[..., Any], *arguments: Any) -> Returned:
        """Call a plain function in a thread."""
        found = Future[Returned]()
        found.set_running_or_notify_cancel()

        def call() -> None:
            try:
                found.set_result((function(*arguments), None))
            except BaseException as error:
                found.set_result((None, error))

        self._calls.put(call)
        if not self._is_growing:
            self._is_growing = True
            self._loop.call_later(_WAITS_S if self._num_threads else 0.0, self._grow)
        return await asyncio.wrap_future(found)

    def _grow(self) -> None:
        """Start a thread, and then twice as many each time that calls still wait; quick functions need but one."""
        num_waiting = self._calls.qsize()
        for _ in range(min(num_waiting, max(1, self._num_threads))):
            threading.Thread(target=self._answer, name="environment", daemon=True).start()
            self._num_threads += 1
        self._is_growing = num_waiting > 0
        if self._is_growing:
            self._loop.call_later(_WAITS_S, self._grow)

    def _answer(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

    def start(self, work: Coroutine[Any, Any, Played]) -> "Future[Played]":
        """Start `work`, after what was started before it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def stop(self) -> None:
        """Cancel what still runs, and end the thread."""

        async def cancelled() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.wait(others, timeout=_SLACK_S) if others else None
            self._loop.stop()
            for _ in range(self._num_threads):
                self._calls.put(None)

        self._loop.call_soon_threadsafe(lambda: self._loop.create_task(cancelled()))


class Player:
    """Plays one response with an instance of the user's class. Its coroutines run in the order of their start."""

    def __init__(
        self, loop: Loop, made: Callable[[], Any], name: str, prompt: Prompt, dialect: Dialect, deadline_s: float
    ) -> None:
        self._loop, self._made, self._name, self._prompt = loop, made, name, prompt
        self._dialect, self._deadline_s = dialect, deadline_s
        self._order, self._played = asyncio.Lock(), Played()
        self._environment: Any = None

    def longest_s(self, num_turns: int) -> float:
        """Seconds after which no answer to a response of `num_turns` can come: it may be played again before."""
        return (num_turns + 3) * self._deadline_s + _SLACK_S

    def late(self) -> Played:
        """What stands for an answer that has not come within `longest_s`."""
        fault = "its event loop stands still: let async methods await, or write def"
        return replace(self._played, fault=f"the environment {self._name}, {self._where}: {fault}")

    @property
    def _where(self) -> str:
        return f"at turn {self._played.turns + 1} of the response to {shown_prompt(self._prompt.text)}"

    async def reset(self) -> Played:
        """Make the environment and begin."""

        async def work() -> Played:
            self._environment = await self._called(self._made)
            await self._called(self._environment.reset, self._prompt)
            return self._played

        return await self._kept(work)

    async def step(self, ids: Sequence[int], recorded: Sequence[int] | None = None) -> Played:
        """Answer the turn of `ids`; of a turn that is played again, `recorded` are the tokens of its answer."""

        async def work() -> Played:
            before = self._played
            turn = self._dialect.turn(ids)
            texts, reward, is_done = _answer(await self._called(self._environment.step, turn))
            tokens = () if is_done else tuple(self._dialect.answer(turn, texts))
            if not is_done and not (tokens and any(texts)):
                raise _FaultError("gave no text although the response is not done: say something, or end it")
            if recorded is not None and (is_done or tokens != tuple(recorded)):
                raise _FaultError("answered otherwise when the response was resumed: make its answers repeatable")
            return replace(
                self._played,
                turns=before.turns + 1,
                earned=before.earned + reward,
                calls=before.calls + len(turn.calls) + turn.unread,
                calls_read=before.calls_read + len(turn.calls),
                tokens=tokens,
                is_done=is_done,
            )

        return await self._kept(work)

    async def cut(self) -> Played:
        """A turn that was cut is not answered: what was answered before it."""

        async def work() -> Played:
            return replace(self._played, tokens=(), is_done=True)

        return await self._kept(work)

    async def close(self) -> Played:
        """Call the environment's `close`, if it has one."""

        async def work() -> Played:
            close = getattr(self._environment, "close", None)
            if close is not None:
                await self._called(close)
            return self._played

        return await self._kept(work, always=True)

    async def _kept(self, work: Callable[[], Coroutine[Any, Any, Played]], *, always: bool = False) -> Played:
        async with self._order:
            if self._played.fault and not always:
                return self._played
            try:
                self._played = await work()
            except (_FaultError, DataError) as error:
                fault = f"the environment {self._name}, {self._where}: {error}"
                self._played = replace(self._played, fault=self._played.fault or fault)
            return self._played

    async def _called(self, function: Callable[..., Any], *arguments: Any) -> Any:
        begin_s = time.monotonic()
        try:
            value, error = await asyncio.wait_for(self._returned(function, *arguments), self._deadline_s)
        except TimeoutError:
            raise _FaultError(
                f"{_name(function)} took longer than environment.deadline_s = {self._deadline_s:g} s: raise it, or "
                "let it answer sooner"
            ) from None
        finally:
            spent_s = self._played.environment_s + time.monotonic() - begin_s
            self._played = replace(self._played, environment_s=spent_s)
        if error is not None:
            last = traceback.extract_tb(error.__traceback__)[-1]
            raise _FaultError(f"{_name(function)} {shown_error(error)}, in line {last.lineno} of {last.filename}")
        return value

    async def _returned(self, function: Callable[..., Any], *arguments: Any) -> Returned:
        if inspect.iscoroutinefunction(function):
            return await _awaited(function(*arguments))
        value, error = await self._loop.plain(function, *arguments)
        # A plain function may return what is to be awaited, as a decorated async one does.
        return await _awaited(value) if inspect.isawaitable(value) else (value, error)


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", function))


def _answer(given: Any) -> tuple[list[str], float, bool]:
    """The texts, reward and end in what a step returned; raises `_FaultError` for anything else."""
    if not isinstance(given, (tuple, list)) or len(given) != 3:
        raise _FaultError(f"step gave {shown_value(given)}: return (text, reward, done)")
    text, reward, is_done = given
    texts = [text] if isinstance(text, str) else text
    if not isinstance(texts, (tuple, list)) or not all(isinstance(each, str) for each in texts):
        raise _FaultError(f"step gave the text {shown_value(text)}: return a string, or one for each call")
    if not math.isfinite(number := in_fp32(reward)):
        raise _FaultError(f"step gave the reward {shown_value(reward)}: return a finite number, which fp32 can hold")
    if not isinstance(is_done, bool) and type(is_done).__name__ not in ("bool_", "bool"):
        raise _FaultError(f"step gave done = {shown_value(is_done)}: return True or False")
    return list(texts), number, bool(is_done)


async def _awaited(value: Awaitable[Any]) -> Returned:
    try:
        return await value, None
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():  # its deadline, or the end of the loop
            raise
        return None, error
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        return None, error

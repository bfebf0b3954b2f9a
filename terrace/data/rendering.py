"""The parent's side of the process that renders chat templates (terrace.data.template_process)."""

import functools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import IO, Any, TypeVar

from terrace.base.errors import DataError
from terrace.base.extras import needs
from terrace.data import template_process

_T = TypeVar("_T")


class TemplateRefusalError(Exception):
    """A template refuses a conversation, or cannot be used. The caller adds the line of the data."""


class _EndedError(Exception):
    pass


class Renderers:
    """The rendering process, started on demand and restarted if a template has ended it."""

    def __init__(self, most_s: int = template_process.PROCESSOR_S) -> None:
        self._most_s, self._lock = most_s, threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._owner = 0
        self._known: dict[str, tuple[int, bool]] = {}  # template -> its number there, whether it has tags

    def has_tags(self, source: str, name: str, tokens: Mapping[str, Any]) -> bool:
        """Whether a template has generation tags. Raises `TemplateRefusalError` if it cannot be compiled."""
        with self._lock:
            return self._retried(name, lambda: self._introduced(source, name, tokens)[1])

    def ask(
        self, source: str, name: str, tokens: Mapping[str, Any], asked: Mapping[str, Any]
    ) -> tuple[list[Any], TemplateRefusalError | None]:
        """Renders the `conversations` in `asked`. Returns the results up to the first refusal, and the refusal or None.

        Raises `DataError` if Jinja is not installed.
        """
        made: list[Any] = []

        def answers() -> None:
            number, _ = self._introduced(source, name, tokens)
            self._send({"template": number, **asked})
            for _ in asked["conversations"]:
                made.append(self._answer())

        try:
            with self._lock:
                self._retried(name, answers)
        except TemplateRefusalError as refusal:
            return made, refusal
        return made, None

    def _retried(self, name: str, work: Callable[[], _T]) -> _T:
        for _ in range(2):
            try:
                return work()
            except _EndedError:
                code = self._close()
                # It ends itself when idle; any other end is caused by the template.
                if code == -signal.SIGALRM:
                    continue
                why = f"ends the process that renders it ({code})"
                if code == -signal.SIGXCPU:
                    why = f"takes more than {self._most_s} s of processor time"
                raise TemplateRefusalError(f"{name} {why} for one conversation: repair it") from None
            except TemplateRefusalError:
                raise
            except BaseException:
                # Ctrl-C, for example: answers that nobody has read must not be taken for those to the next question.
                if self._process is not None:
                    self._process.kill()
                    self._close()
                raise
        raise TemplateRefusalError(f"{name} cannot be rendered: its process ends before it answers")

    def _introduced(self, source: str, name: str, tokens: Mapping[str, Any]) -> tuple[int, bool]:
        # A fork of this process must not write into the pipes of its parent.
        if self._process is None or self._owner != os.getpid():
            self._start()
        key = json.dumps([source, name, sorted(tokens.items())])
        if key not in self._known:
            number = len(self._known)
            self._send({"template": number, "source": source, "name": name, "tokens": dict(tokens)})
            self._known[key] = number, bool(self._answer())
        return self._known[key]

    def _start(self) -> None:
        self._known, self._owner = {}, os.getpid()
        # -P: modules in the child's own folder must not shadow Python's. The child has its own session, so Ctrl-C
        # reaches only this process; when it ends, the child's input ends.
        self._process = subprocess.Popen(
            (sys.executable, "-P", template_process.__file__, str(self._most_s)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="ascii",
            start_new_session=True,
        )
        # Waited for as soon as it ends by itself after an idle minute, so that no zombie stays.
        threading.Thread(target=self._process.wait, name="template process", daemon=True).start()

    @property
    def _running(self) -> tuple["subprocess.Popen[str]", IO[str], IO[str]]:
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise AssertionError("it is started with both pipes before it is asked")
        return process, process.stdin, process.stdout

    def _send(self, asked: Mapping[str, Any]) -> None:
        _, to_it, _ = self._running
        try:
            to_it.write(json.dumps(asked) + "\n")
            to_it.flush()
        except RecursionError as error:
            raise TemplateRefusalError("brackets are nested too deeply") from error
        except BrokenPipeError as error:
            raise _EndedError from error

    def _answer(self) -> Any:
        process, _, from_it = self._running
        line = from_it.readline(template_process.MOST_CHARACTERS + 1)
        # The process keeps to the limit itself, unless a template has escaped from its sandbox.
        if len(line) > template_process.MOST_CHARACTERS and not line.endswith("\n"):
            process.kill()
            self._close()
            raise TemplateRefusalError(template_process.TOO_LONG)
        if not line.endswith("\n"):
            raise _EndedError
        answer = json.loads(line)
        if "missing" in answer:
            raise DataError(f"a chat template {needs('jinja2')}")
        if "refused" in answer:
            raise TemplateRefusalError(answer["refused"])
        return answer["made"]

    def _close(self) -> int:
        process, *streams = self._running
        self._process = None
        for stream in streams:
            with suppress(OSError):
                stream.close()
        return process.wait()


@functools.lru_cache(maxsize=1)
def renderers() -> Renderers:
    return Renderers()

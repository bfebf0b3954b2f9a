"""An island's connection to the meeting place: it reports in the background, and asks what to do between windows.

While the meeting place does not answer, reports fail and steps go on; only `ask` and `begin` wait for it.
"""

import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict

from terrace.base.errors import ConfigError, HangError
from terrace.base.schema import load
from terrace.launch.seal import Seal
from terrace.roster.entries import Attempt, Terms
from terrace.roster.reports import Reply, Report
from terrace.roster.side import Act, Side
from terrace.roster.talk import Talk

BEAT_S = 0.2  # between two reports
_AGAIN_S = 0.2  # between two tries to connect
_QUIET_S = 5.0


class Reporter:
    """The reports of an island, on its first rank. `side` is the state of the island, `token` what the log calls
    its process: another one after the roster has counted it as lost.

    `lost_s` is how long it waits for a meeting place that does not answer. `say` gets a line when it waits.
    """

    def __init__(
        self,
        island: str,
        where: tuple[str, int],
        seal: Seal,
        terms: Terms,
        facts: dict[str, str],
        addresses: tuple[str, ...],
        *,
        lost_s: float,
        say: Callable[[str], None],
    ) -> None:
        self.island, self.side, self._where, self._seal = island, Side(), where, seal
        self._lost_s, self._say = lost_s, say
        self.tokens, self._leaves, self._trained = 0, False, -1
        self.addresses: dict[str, tuple[str, ...]] = {}  # of the islands of the newest attempt
        self._terms, self._facts, self._addresses = terms, facts, addresses
        self.token = uuid.uuid4().hex
        self._talk: Talk | None = None
        self._talking = threading.Lock()
        self._closed = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="roster beats", daemon=True)

    def begin(self) -> None:
        """Ask for the first time. Raises `ConfigError` if the meeting place refuses this island."""
        begin_s = time.monotonic()
        while True:
            answer = self._asked(self._lost_s)
            # The roster may still have an earlier process of this name, which has just died.
            if not answer.refused or time.monotonic() - begin_s > self._terms.patience_s + 1:
                break
            time.sleep(_AGAIN_S)
        self._check(answer)
        self._beats.start()

    def ask(self) -> Act:
        """Report, and do what the reply says to `side`. Raises `ConfigError` and `HangError`."""
        answer = self._asked(self._lost_s)
        self._check(answer)
        with self._talking:
            self.side, act = self.side.follow(answer)
            self.addresses = answer.addresses
            if act is Act.BEGIN_AGAIN:
                self.token, self.tokens = uuid.uuid4().hex, 0
        return act

    def ask_within(self, limit_s: float) -> None:
        """Report once more, without following the reply. A place that does not answer is waited for `limit_s`."""
        with suppress(HangError, ConfigError):
            self._asked(limit_s)

    def ready(self, tokens: int, *, has_window: bool, leaves: bool) -> None:
        """The island is ready to exchange; its window, if it has one, is trained on `tokens` tokens."""
        with self._talking:
            self.tokens, self._leaves = tokens, leaves
            if has_window:
                self.side, self._trained = self.side.trained(), self.side.window

    def ended(self, key: Attempt, blames: tuple[str, ...], *, is_held: bool) -> None:
        """An attempt has ended: this island holds its sums, or did not reach the islands `blames`."""
        with self._talking:
            self.side = self.side.held(key) if is_held else self.side.fails(key, blames)

    def close(self) -> None:
        self._closed.set()
        with self._talking:
            self._drop()

    def _check(self, answer: Reply) -> None:
        if answer.refused:
            raise ConfigError(f"the roster at {self._where[0]}:{self._where[1]} refuses this island: {answer.refused}")

    def _asked(self, limit_s: float) -> Reply:
        begin_s, said = time.monotonic(), False
        while True:
            try:
                return self._exchanged()
            except OSError as error:
                waited_s = time.monotonic() - begin_s
                if waited_s > limit_s:
                    raise HangError(
                        f"no meeting place answers at {self._where[0]}:{self._where[1]} for {waited_s:.0f} s "
                        f"({error}): start terrace meet there, with the --log that it had"
                    ) from error
                if waited_s > _QUIET_S and not said:
                    said = True
                    self._say(f"waiting for the meeting place at {self._where[0]}:{self._where[1]} ({error})")
            time.sleep(_AGAIN_S)

    def _exchanged(self) -> Reply:
        with self._talking:
            try:
                if self._talk is None:
                    link = socket.create_connection(self._where, timeout=self._terms.patience_s)
                    self._talk = Talk(link, self._seal, serves=False)
                self._talk.send(asdict(self._report()))
                return load(Reply, self._talk.receive(), "a reply of the meeting place")
            except (OSError, ValueError):
                self._drop()
                raise

    def _report(self) -> Report:
        side = self.side
        return Report(
            island=self.island,
            token=self.token,
            terms=self._terms,
            facts=self._facts,
            addresses=self._addresses,
            version=side.version,
            window=side.window,
            is_ready=side.is_trained,
            tokens=self.tokens,
            holds=side.holds,
            failed=side.failed,
            blames=side.blames,
            leaves=self._leaves,
            trained=self._trained,
        )

    def _drop(self) -> None:
        if self._talk is not None:
            self._talk.close()
            self._talk = None

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_S):
            # The next `ask` raises the error.
            with suppress(OSError, ConfigError, ValueError):
                self._exchanged()

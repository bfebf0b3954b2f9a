"""Environments of the responses that a replica draws: which rows wait for an answer, and when they go on.

A row whose turn has ended waits for its environment while the replica draws the others. Its answer is taken `overlap`
passes later, or once no other row can be drawn, and the replica stands still until it is there. So the order in which
rows go on is one of passes, never of the clock, and the same run draws the same tokens. A row that goes on is a request
whose begun tokens include the answer: its random numbers are those of its positions, whoever is drawn beside it.

Of a replica's tensor ranks the first one has the environments, and tells the others what they answered.
"""

import os
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import astuple, dataclass, field, replace
from itertools import groupby
from typing import Any

import torch

from terrace.base.errors import ConfigError
from terrace.base.user_modules import load_object
from terrace.comm.exchange import gather_plain
from terrace.comm.process_group import OrderedGroup, rank_device
from terrace.data.chat_prompt import chat_prompts
from terrace.data.tokenizer import Tokenizer
from terrace.generation.request import Completion, Request
from terrace.rl.values.prompts import Prompt
from terrace.rl.values.ragged import Ragged, offsets_of
from terrace.rl.values.rows import Rows
from terrace.rl.workers.dialects import Chat, Dialect, PlainText
from terrace.rl.workers.playing import Loop, Played, Player

PLAYED = ("turns", "earned", "calls", "calls_read", "environment_s", "stalled_s")  # columns, fp64 (R)


@dataclass(frozen=True, kw_only=True)
class EnvironmentSettings:
    """The environment of a run: `name` is module:class, found in `folder`; without one a response is one turn.

    `chat` is the tokenizer file with whose template prompts were rendered; empty where they are texts.
    """

    name: str = ""
    folder: str = ""
    tokenizer: Tokenizer | None = None
    chat: str = ""
    max_turns: int = 1
    deadline_s: float = 30.0
    overlap: int = 1

    def dialect(self, stops: frozenset[int]) -> Dialect:
        """How this run's turns and answers are written."""
        assert self.tokenizer is not None, "an environment hears and says text"
        if not self.chat:
            return PlainText(self.tokenizer)
        tools = getattr(load_environment(self.name, self.folder), "tools", None)
        return Chat(chat_prompts(self.tokenizer, self.chat), stops, tools)


NO_ENVIRONMENT = EnvironmentSettings()


def load_environment(name: str, folder: str) -> type:
    """Import the class `module:class`; raises `ConfigError` if there is none, or it is no environment."""
    found = load_object(name, folder or os.getcwd(), "environment", "class", "my_environment:Shop")
    assert isinstance(found, type), "load_object has looked"
    for method in ("reset", "step"):
        if not callable(getattr(found, method, None)):
            raise ConfigError(f"the environment {name!r} has no method {method}: write reset(prompt) and step(turn)")
    if (tools := getattr(found, "tools", None)) is not None and not isinstance(tools, (list, tuple)):
        raise ConfigError(f"the environment {name!r} has tools = {tools!r}: must be a list, as chat templates take it")
    return found


@dataclass(eq=False)
class _Row:
    index: int
    request: Request
    player: Player | None = None  # on the first tensor rank
    emitted: list[bool] = field(default_factory=list)  # whether the policy drew it, by token
    made: Completion = field(default_factory=lambda: Completion((), (), (), "aborted"))
    played: Played = field(default_factory=Played)
    stalled_s: float = 0.0
    finish: str = "aborted"

    def heard(self, made: Completion) -> list[int]:
        """Add what the policy drew. Returns the tokens of its newest turn."""
        self.emitted += [True] * (len(made.tokens) - len(self.emitted))
        self.made = made
        return _turns(made.tokens, self.emitted)[-1][0]

    def answered(self, played: Played, max_turns: int) -> Request | None:
        """Add an answer. Returns the request that goes on; None if the response is over."""
        self.played, made, num = played, self.made, len(played.tokens)
        if played.fault:
            self.finish = "fault"
        elif made.finish == "length" or played.is_done:
            self.finish = made.finish
        elif played.turns >= max_turns:
            self.finish = "turns"
        elif len(made.tokens) + num >= self.request.num_tokens:
            self.finish = "length"
        else:
            self.emitted += [False] * num
            # Foreign tokens have no log-probability and no version; zeros stand there, and no column has them.
            tokens, none = (*made.tokens, *played.tokens), (0,) * num
            begun = Completion(tokens, (*made.logprobs, *map(float, none)), (*made.versions, *none), "aborted")
            self.made = begun
            return replace(self.request, begun=begun)
        return None


class OneTurn:
    """No environment: a response ends with its first turn."""

    def first(self, requests: Sequence[Request]) -> list[tuple[int, Request]]:
        """The requests to begin with, by row."""
        return list(enumerate(requests))

    def hears(self, row: int, made: Completion) -> bool:
        """Take note that a turn of a row has ended. Returns whether the row waits for an answer."""
        return False

    def answer(self, row: int, made: Completion) -> Request | None:
        """Take note that a turn of a row has ended, and wait for its answer, beside the threads of other rows.

        Returns the request that goes on, None if the response is over.
        """
        return None

    def answers(self, *, is_idle: bool) -> list[tuple[int, Request | None]]:
        """Rows whose answer is there, with the request that goes on, or None if the response is over.

        Called before each pass; `is_idle` if nothing can be drawn before an answer is taken.
        """
        return []

    def close(self) -> None:
        """End what is still under way."""

    def columns(self, made: Sequence[Completion]) -> Rows:
        """Columns beside the tokens of all completions: `finish`."""
        return Rows({"finish": tuple(each.finish for each in made)})


NOBODY = OneTurn()


class Environments(OneTurn):
    """The environments of a share of rows, with `prompt_texts` and `data` of each prompt."""

    def __init__(
        self, settings: EnvironmentSettings, rows: Rows, stops: frozenset[int], group: OrderedGroup | None
    ) -> None:
        self._settings, self._stops, self._group = settings, stops, group
        self._waiting = deque[tuple[int, _Row, "Future[Played] | None"]]()  # (pass from which it goes on, row, answer)
        self._passes, self._rows = 0, list[_Row]()
        self._loop: Loop | None = None
        self._players = list[Player | None]([None] * len(rows))
        self._closing = list[tuple[_Row, Future[Played] | None]]()
        if len(rows) and (group is None or not group.position):
            self._loop = loop = Loop()
            made, dialect = load_environment(settings.name, settings.folder), settings.dialect(stops)
            texts: Any = rows.objects("prompt_texts")
            data: Any = rows.objects("data")
            self._players = [
                Player(loop, made, settings.name, Prompt(text, tuple(ids), own), dialect.of(own), settings.deadline_s)
                for text, ids, own in zip(texts, rows.ragged("prompts").lists(), data, strict=True)
            ]
        self._emitted: list[list[bool]] = rows.ragged("emitted").lists() if "emitted" in rows.columns else []

    def first(self, requests: Sequence[Request]) -> list[tuple[int, Request]]:
        found = list[tuple[int, Request]]()
        for index, (request, player) in enumerate(zip(requests, self._players, strict=True)):
            row = _Row(index, request, player)
            self._rows.append(row)
            self._start(player and player.reset())
            if request.begun is None:
                found.append((index, request))
                continue
            row.made, row.emitted = request.begun, self._emitted[index]
            turns = _turns(request.begun.tokens, row.emitted)
            for said, answer in turns[:-1]:
                self._start(player and player.step(said, answer))
            said, answer = turns[-1]
            if answer:
                self._start(player and player.step(said, answer))
            elif said[-1] in self._stops:
                self.hears(index, replace(request.begun, finish="stop"))
                continue
            found.append((index, request))
        return found

    def hears(self, row: int, made: Completion) -> bool:
        own = self._rows[row]
        self._waiting.append((self._passes + self._settings.overlap, own, self._said(own, made)))
        return True

    def answer(self, row: int, made: Completion) -> Request | None:
        own = self._rows[row]
        played, _ = self._waited(own, self._said(own, made))
        return self._answered(own, played)

    def _said(self, row: _Row, made: Completion) -> "Future[Played] | None":
        said = row.heard(made)
        return self._start(row.player and (row.player.step(said) if made.finish == "stop" else row.player.cut()))

    def _answered(self, row: _Row, played: Played) -> Request | None:
        goes_on = row.answered(played, self._settings.max_turns)
        if goes_on is None:
            self._end(row)
        return goes_on

    def answers(self, *, is_idle: bool) -> list[tuple[int, Request | None]]:
        self._passes += 1
        until = max(self._passes, self._waiting[0][0]) if is_idle and self._waiting else self._passes
        taken = []
        while self._waiting and self._waiting[0][0] <= until:
            taken.append(self._waiting.popleft())
        return self._took(taken)

    def _took(self, taken: Sequence[tuple[int, _Row, "Future[Played] | None"]]) -> list[tuple[int, Request | None]]:
        if not taken:
            return []
        told = self._told([self._waited(row, answer) for _, row, answer in taken])
        found = list[tuple[int, Request | None]]()
        for (_, row, _), (played, stalled_s) in zip(taken, told, strict=True):
            row.stalled_s = stalled_s
            found.append((row.index, self._answered(row, played)))
        return found

    def close(self) -> None:
        # A row that has all its tokens cannot go on in another round, so its last answer is waited for.
        full = [each for each in self._waiting if len(each[1].made.tokens) >= each[1].request.num_tokens]
        self._took(full)
        for row in self._rows:
            if row.finish == "aborted":
                self._end(row)
        if self._loop is not None:
            for row, closing in self._closing:
                closed, _ = self._waited(row, closing)
                row.played = replace(row.played, fault=row.played.fault or closed.fault)
            self._loop.stop()

    def columns(self, made: Sequence[Completion]) -> Rows:
        """Columns `finish`, also "turns" and "fault"; ragged `emitted`; `fault`, what was wrong; and PLAYED."""
        for row, each in zip(self._rows, made, strict=True):
            if each.tokens:
                row.heard(each)
        masks = [row.emitted for row in self._rows]
        lengths = torch.tensor(list(map(len, masks)), dtype=torch.int64)
        emitted = Ragged(torch.tensor([own for each in masks for own in each], dtype=torch.bool), offsets_of(lengths))
        # What is put aside is played again, and counted then.
        played = [row.played if row.finish != "aborted" else Played(fault=row.played.fault) for row in self._rows]
        totals = {name: [float(getattr(each, name)) for each in played] for name in PLAYED[:-1]}
        totals["stalled_s"] = [row.stalled_s for row in self._rows]
        return Rows({
            "emitted": emitted,
            "finish": tuple(row.finish for row in self._rows),
            "fault": tuple(each.fault for each in played),
            **{name: torch.tensor(values, dtype=torch.float64) for name, values in totals.items()},
        })  # fmt: skip

    def _end(self, row: _Row) -> None:
        self._closing.append((row, self._start(row.player and row.player.close())))

    def _start(self, work: Any) -> "Future[Played] | None":
        return None if self._loop is None else self._loop.start(work)

    def _waited(self, row: _Row, answer: "Future[Played] | None") -> tuple[Played, float]:
        """An answer, and the seconds in which this replica has stood still for the row."""
        if answer is None or row.player is None:
            return Played(), 0.0
        begin_s = time.monotonic()
        try:
            played = answer.result(row.player.longest_s(self._settings.max_turns))
        except TimeoutError:
            played = row.player.late()
        return played, row.stalled_s + time.monotonic() - begin_s

    def _told(self, found: list[tuple[Played, float]]) -> list[tuple[Played, float]]:
        """What the first tensor rank has found, on all of them."""
        if self._group is None:
            return found
        sent = [[astuple(played), stalled_s] for played, stalled_s in found]
        (first, *_), device = self._group.places, rank_device()
        of_first = gather_plain(sent, device, self._group.handle)[first]
        return [(_played(*each), stalled_s) for each, stalled_s in of_first]


def partner_of(
    settings: EnvironmentSettings, rows: Rows, stops: frozenset[int], group: OrderedGroup | None = None
) -> OneTurn:
    """What answers the turns of a share of rows; `group` has the tensor ranks that draw it, if there are several."""
    return Environments(settings, rows, stops, group) if settings.name else NOBODY


def _played(*values: Any) -> Played:
    found = Played(*values)
    return replace(found, tokens=tuple(found.tokens))


def _turns(tokens: Sequence[int], emitted: Sequence[bool]) -> list[tuple[list[int], list[int]]]:
    """The turns of a response: what the policy drew, and the answer (empty for the last, if it has none yet)."""
    found, start = list[tuple[list[int], list[int]]](), 0
    for is_own, run in groupby(emitted):
        end = start + len(list(run))
        part = list(tokens[start:end])
        if is_own:
            found.append((part, []))
        else:
            found[-1] = found[-1][0], part
        start = end
    return found

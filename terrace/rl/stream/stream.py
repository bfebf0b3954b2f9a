"""The stream of responses that a controller learns from, generated in rounds with the newest weights.

A group is a prompt and its responses. A round hands the current weights to the generator, starts new groups, and
continues unfinished ones. A step takes the oldest complete groups. Weight versions count completed steps; the lag of a
response is the number of steps between the weights that drew its first token and the step that learns from it.

    max_lag = 0                        a step starts its own round, which ends when all groups are complete
    rollout with own ranks, lag 1      the round of the next step runs while this step learns
    larger lag                         a round has half a step's groups more than a step needs, and ends when enough are
                                       complete; unfinished groups continue in the next round, with its weights

A group that would be too old after the next round must be complete at the end of this one, so no response ever exceeds
`max_lag`. A round leaves at most half a step's groups unfinished, so a step can take all groups that become due at
once. Rounds end by counts and never by the clock, so repeated or resumed runs are bitwise equal.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from terrace.base.errors import TrainingError
from terrace.base.words import counted
from terrace.rl.algorithms.metrics import Metrics
from terrace.rl.calls.runtime import Handle
from terrace.rl.values.prompts import PromptSource, rows_of
from terrace.rl.values.ragged import Ragged, offsets_of
from terrace.rl.values.rows import Rows, cat
from terrace.rl.workers.drawing import BEGUN, FINISHES, FOR_ENVIRONMENTS, READS
from terrace.rl.workers.environments import PLAYED
from terrace.rl.workers.servers import ANSWERING

_SPARE = 2  # a round may have 1 / _SPARE of a step's groups in addition; a guess
_SEEDS_A_GROUP = 1 << 20  # more than the responses to one prompt
_STATE = ("groups", *BEGUN, "emitted", *PLAYED)  # columns of the saved state, beside `finish`
_OF_ENVIRONMENTS = ("emitted", "fault", *PLAYED)

# Starts the hand-over of the current weights as this version; the returned function waits for it and returns metrics.
HandOver = Callable[[int], Callable[[], Metrics]]


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """What a stream generates: groups of `responses` per prompt, plus one greedy response if `has_greedy`.

    A step takes `prompts` groups, at most `max_lag` steps old.
    """

    source: PromptSource
    prompts: int
    responses: int
    has_greedy: bool = False
    max_lag: int = 0
    is_apart: bool = False  # the generator has its own ranks, so that it can draw while others learn
    has_environments: bool = False
    most_faults: float = 0.0  # share of a step's responses whose environments may fail

    @property
    def ahead(self) -> int:
        """Steps between starting a round and learning from it: 1 if rounds overlap with steps, else 0."""
        return int(self.is_apart and self.max_lag > 0)

    @property
    def under_way(self) -> int:
        """Number of groups in a round."""
        return self.prompts + (-(-self.prompts // _SPARE) if self.max_lag > self.ahead else 0)


class Stream:
    """Supplies a controller with responses from the call `generate`; `hand_over` gives the generator new weights."""

    def __init__(
        self, drawing: Drawing, generate: Any, hand_over: HandOver, count: Callable[[], Metrics] = dict
    ) -> None:
        """`count` returns metrics of the drawing since its last call."""
        self._drawing, self._generate, self._bring, self._count = drawing, generate, hand_over, count
        self._place = 0  # index of the next prompt
        self._live = self._empty()  # groups that are started and not yet taken
        self._asked: tuple[Rows, Any] | None = None  # rows of the round in progress, and its result
        self._brought: int | None = None
        self._arrives: Callable[[], Metrics] = dict
        self.numbers: Metrics = {}  # metrics of the newest hand-over
        self.counted: Metrics = {}  # and of the newest round
        self.num_faults = 0  # responses whose environments failed, and that were left out, since someone set it to 0
        self.faults = list[str]()  # what environments did wrong, likewise

    def hand_over(self, step: int) -> None:
        # End the round first: senders would wait for it, and might exceed their timeout.
        self._end()
        self._arrives = self._bring(step)

    def next(self, step: int) -> Rows:
        """Rows of the next groups, sorted by group and sample, for a controller that has completed `step` steps.

        Columns `prompts`, `prompt_texts`, `data`, `groups` (the prompt's index in the run), `samples`, `seeds`,
        `greedy`, and those of a response: `responses`, `rollout`, `versions`, `finish`; with environments also
        `emitted`, `fault` and PLAYED. Responses whose environments failed are left out. Raises `TrainingError` if
        they are more than the share `most_faults`, or none is left to learn from.
        """
        if self._asked is None and len(self._complete()) < self._drawing.prompts:
            self._begin(step)
        self._end()
        complete = self._complete()
        assert len(complete) >= self._drawing.prompts, "a round leaves no more groups than it may"
        taken = complete[: self._drawing.prompts]
        assert step - min(version for version, _ in taken) <= self._drawing.max_lag, "a response is older than max_lag"
        rows = self._take({group for _, group in taken})
        if self._drawing.ahead:
            self._begin(step)
        return self._without_faults(rows)

    def state(self) -> tuple[int, Rows]:
        """(Index of the next prompt, responses so far), for `restore`; waits for the round in progress.

        Columns: `groups` (R); ragged `responses`, `rollout`, `versions`; `finish` (R), indices into FINISHES.
        """
        self._end()
        rows = self._live
        finish = torch.tensor([FINISHES.index(each) for each in rows.objects("finish")], dtype=torch.int64)
        saved = {name: rows.columns[name] for name in _STATE if name in rows.columns}
        return self._place, Rows({**saved, "finish": finish})

    def restore(self, place: int, rows: Rows) -> None:
        """Continue from a result of `state`."""
        self._place, self._live = place, self._empty()
        groups = rows.tensor("groups")
        if len(rows):
            asked = cat([self._prompts(group) for group in sorted(set(groups.tolist()))])
            # Same order as `rows`: by group and sample.
            names = [name for name in (*BEGUN, *_OF_ENVIRONMENTS) if name in asked.columns]
            asked = asked.drop(*names, "finish")
            finish = tuple(FINISHES[each] for each in rows.tensor("finish").tolist())
            # What was wrong has been said before the run was stopped.
            found = {name: rows.columns[name] if name != "fault" else ("",) * len(rows) for name in names}
            self._live = asked | Rows({**found, "finish": finish})

    def _begin(self, step: int) -> None:
        """Start a round with new groups and the unfinished rows of older ones."""
        drawing = self._drawing
        open_groups = set(self._live.tensor("groups").tolist())
        new = [self._prompts(self._place + each) for each in range(drawing.under_way - len(open_groups))]
        self._place += len(new)
        self._live = live = _whole([self._live, *new])
        asked = live.take(_mask(each == "aborted" for each in live.objects("finish")))
        num_open = len(set(asked.tensor("groups").tolist()))
        num_spare = min(num_open, drawing.under_way - drawing.prompts)
        due = step + 1 + drawing.ahead - drawing.max_lag
        first = _first_versions(live)
        must = _mask(first.get(group, step) < due for group in asked.tensor("groups").tolist())
        if self._brought != step:
            self.hand_over(step)
            self._brought = step
        given = asked | Rows({"must": must})
        unread = () if drawing.has_environments else FOR_ENVIRONMENTS
        given = Rows({name: given.columns[name] for name in READS if name in given.columns and name not in unread})
        draw = self._generate.remote if drawing.ahead else self._generate
        self._asked = asked, draw(given, leave=Fraction(num_spare, num_open))

    def _end(self) -> None:
        """Wait for the round in progress, if any, and add its results."""
        if self._asked is None:
            return
        (asked, found), self._asked = self._asked, None
        made: Rows = found.get() if isinstance(found, Handle) else found
        self.numbers, self._arrives = self._arrives() or self.numbers, dict
        self.counted = self._count()
        live = self._live
        done = live.take(_mask(each != "aborted" for each in live.objects("finish")))
        self.faults += faults_of(made)
        self._live = _sorted(
            _whole([done, asked.drop(*(name for name in made.columns if name in asked.columns)) | made])
        )

    def _complete(self) -> list[tuple[int, int]]:
        """(First version, group) of the complete groups, oldest first."""
        groups, finish = self._live.tensor("groups").tolist(), self._live.objects("finish")
        unfinished = {group for group, each in zip(groups, finish, strict=True) if each == "aborted"}
        first = _first_versions(self._live)
        return sorted((first[group], group) for group in set(groups) - unfinished)

    def _take(self, taken: set[int]) -> Rows:
        mask = _mask(group in taken for group in self._live.tensor("groups").tolist())
        rows, left = self._live.take(mask), self._live.take(~mask)
        self._live = left
        return rows

    def _prompts(self, place: int) -> Rows:
        """Rows of a new group, with empty responses."""
        drawing = self._drawing
        num = drawing.responses + drawing.has_greedy
        rows = rows_of([drawing.source.prompt(place)], place).repeat(num)
        samples = torch.arange(num)
        own = {"samples": samples, "seeds": place * _SEEDS_A_GROUP + samples, "greedy": samples >= drawing.responses}
        return rows | Rows(own) | _nothing(num, drawing.has_environments)

    def _without_faults(self, rows: Rows) -> Rows:
        """`rows` without those whose environments failed, and without groups whose greedy response is one of them."""
        is_fault = [each == "fault" for each in rows.objects("finish")]
        if not any(is_fault):
            return rows
        num, most = sum(is_fault), self._drawing.most_faults
        self.num_faults += num
        groups, greedy = rows.tensor("groups").tolist(), rows.tensor("greedy").tolist()
        bare = {group for group, wrong, alone in zip(groups, is_fault, greedy, strict=True) if wrong and alone}
        kept = rows.take(_mask(not wrong and group not in bare for group, wrong in zip(groups, is_fault, strict=True)))
        is_over, is_bare = num > most * len(rows), bool(kept.tensor("greedy").all())  # greedy ones are not learned from
        if is_over or is_bare:
            why = (
                f"more than the share environment.most_faults = {most:g}"
                if is_over
                else "and none is left to learn from"
            )
            first = f"; the first: {self.faults[0]}" if self.faults else ""
            raise TrainingError(f"the environments of {num} of {counted(len(rows), 'response')} failed, {why}{first}")
        return kept

    def _empty(self) -> Rows:
        return self._prompts(0).part(0, 0)


def faults_of(rows: Rows) -> list[str]:
    """What environments did wrong, in words; empty without environments."""
    return [str(each) for each in rows.objects("fault") if each] if "fault" in rows.columns else []


def stream_of(drawing: Drawing, actor: Any, rollout: Any = None) -> Stream:
    """The stream of an actor that generates between its updates, or of a `rollout` with its own ranks."""
    if rollout is None:

        def hand_over(step: int) -> Callable[[], Metrics]:
            found: Metrics = actor.hand_over(version=step)
            return lambda: found

        return Stream(drawing, actor.generate, hand_over)

    def send(step: int) -> Callable[[], Metrics]:
        sent, passed = actor.give.remote(), rollout.take.remote(version=step)

        def numbers() -> Metrics:
            both: tuple[Metrics, Metrics] = sent.get(), passed.get()
            return {name: both[0][name] + both[1][name] for name in both[0]}

        return numbers

    return Stream(drawing, rollout.generate, send)


def served_stream(drawing: Drawing, actor: Any, rollout: Any) -> Stream:
    """The stream of servers, which load what the actor writes."""

    def hand_over(step: int) -> Callable[[], Metrics]:
        found: Metrics = actor.write(version=step)  # whole before any server reads it
        loaded = rollout.load.remote(version=step)

        def numbers() -> Metrics:
            loaded.get()
            return found

        return numbers

    def count() -> Metrics:
        by_rank: list[Metrics] = rollout.counts()
        total = {name: sum(each[name] for each in by_rank) for name in by_rank[0]}
        # Every rank counts the servers that answer it.
        return total | {ANSWERING: min(each[ANSWERING] for each in by_rank)}

    return Stream(drawing, rollout.generate, hand_over, count)


def lags(rows: Rows, step: int) -> Metrics:
    """Mean and maximum lag of responses at step `step`, from 0.

    `sync/stale_tokens`: share of tokens from older weights; `sync/resumed`: share of responses with tokens from several
    weight versions.
    """
    versions = [each for each in rows.ragged("versions").rows() if len(each)]
    if not versions:
        return {}
    lag = torch.tensor([step - int(each[0]) for each in versions], dtype=torch.float64)
    resumed = torch.tensor([bool(each[0] != each[-1]) for each in versions], dtype=torch.float64)
    stale = (rows.ragged("versions").values < step).double()
    return {
        "sync/version_lag": float(lag.mean()),
        "sync/version_lag_max": float(lag.max()),
        "sync/stale_tokens": float(stale.mean()),
        "sync/resumed": float(resumed.mean()),
    }


def _first_versions(rows: Rows) -> dict[int, int]:
    """The oldest version that drew a token of each group; groups without tokens are left out."""
    found: dict[int, int] = {}
    for group, versions in zip(rows.tensor("groups").tolist(), rows.ragged("versions").rows(), strict=True):
        if len(versions):
            # Versions ascend within a response.
            found[group] = min(int(versions[0]), found.get(group, int(versions[0])))
    return found


def _nothing(num: int, has_environments: bool) -> Rows:
    """Columns of `num` empty responses."""
    offsets = offsets_of(torch.zeros(num, dtype=torch.int64))
    dtypes = dict(zip(BEGUN, (torch.int64, torch.float32, torch.int64), strict=True))
    columns = {name: Ragged(torch.zeros(0, dtype=dtype), offsets) for name, dtype in dtypes.items()}
    found = Rows({**columns, "finish": ("aborted",) * num})
    if not has_environments:
        return found
    numbers = {name: torch.zeros(num, dtype=torch.float64) for name in PLAYED}
    return found | Rows({"emitted": Ragged(torch.zeros(0, dtype=torch.bool), offsets), "fault": ("",) * num, **numbers})


def _whole(parts: Sequence[Rows]) -> Rows:
    """Concatenate the parts that have rows: only drawn ones have routes."""
    return cat([each for each in parts if len(each)] or parts)


def _sorted(rows: Rows) -> Rows:
    """Sort rows by group and sample."""
    keys = list(zip(rows.tensor("groups").tolist(), rows.tensor("samples").tolist(), strict=True))
    return rows.take(torch.tensor(sorted(range(len(keys)), key=keys.__getitem__), dtype=torch.int64))


def _mask(values: Iterable[bool]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.bool)

"""Streams of responses: how old they may be, which a step takes, and that all of it can be repeated."""

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from terrace.base.errors import CheckpointError
from terrace.generation.request import Completion, Request
from terrace.rl.algorithms.metrics import Metrics
from terrace.rl.calls.call import call_of
from terrace.rl.calls.layout import RoleLayout
from terrace.rl.calls.runtime import Handle
from terrace.rl.controllers.step import is_own
from terrace.rl.stream.saved import read_state, write_state
from terrace.rl.stream.stream import Drawing, Stream, lags
from terrace.rl.values.prompts import Prompt
from terrace.rl.values.ragged import Ragged
from terrace.rl.values.rows import Rows, cat
from terrace.rl.workers.drawing import completed, requests_of, rows_of_completions
from terrace.rl.workers.policy import Actor
from terrace.rl.workers.rollout import Rollout

NUM_TOKENS = 12


class Numbered:
    """Prompts that are their place."""

    def prompt(self, place: int) -> Prompt:
        return Prompt(f"{place}?", (place,), {"place": place})

    def held_out(self) -> tuple[Prompt, ...]:
        return ()


def length_of(prompt: int, seed: int) -> int:
    """A response of prompt 0 in 3 is long, of others short; a function of prompt and seed."""
    return NUM_TOKENS - seed % 3 if prompt % 3 == 0 else 1 + seed % 3


class Typist:
    """A generation engine that writes the version of its weights as tokens, one a turn to each request."""

    def __init__(self, version: int) -> None:
        self.version, self.open, self.turns = version, dict[int, tuple[Request, list[int]]](), 0

    def add(self, request: Request) -> int:
        begun = request.begun.versions if request.begun is not None else ()
        self.open[len(self.open)] = request, list(begun)
        return len(self.open) - 1

    def step(self) -> dict[int, Completion]:
        self.turns += 1
        ended = {}
        for number, (request, versions) in list(self.open.items()):
            versions.append(self.version)
            if len(versions) == length_of(request.prompt[0], request.seed):
                ended[number] = completion(versions, "stop")
                del self.open[number]
        return ended

    def abort(self) -> dict[int, Completion]:
        found = {number: completion(versions, "aborted") for number, (_, versions) in self.open.items()}
        self.open = {}
        return found


def completion(versions: list[int], finish: Any) -> Completion:
    return Completion(tuple(versions), tuple(0.5 for _ in versions), tuple(versions), finish)


class Typists:
    """A role that draws on some replicas, each with its groups; its call is answered when its result is asked for."""

    def __init__(self, num: int) -> None:
        self.num, self.version, self.turns = num, -1, list[int]()
        self.under_way = 0

    def __call__(self, rows: Rows, *, leave: Fraction) -> Rows:
        groups = rows.tensor("groups").tolist()
        firsts = [row for row in range(len(groups)) if row == 0 or groups[row] != groups[row - 1]]
        ends = [firsts[len(firsts) * share // self.num] for share in range(self.num)] + [len(rows)]
        made, turns = [], 0
        for start, stop in pairwise(ends):
            part, typist = rows.part(start, stop), Typist(self.version)
            requests = requests_of(part, num_tokens=NUM_TOKENS, stops=frozenset(), seed=0)
            made.append(rows_of_completions(completed(typist, requests, part, leave)))  # type: ignore[arg-type]
            turns = max(turns, typist.turns)
        self.turns.append(turns)
        return cat(made)

    def remote(self, rows: Rows, *, leave: Fraction) -> Handle:
        return Answered(self(rows, leave=leave))


class Answered(Handle):
    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def get(self) -> Rows:
        return self.rows


def made(drawing: Drawing, replicas: int = 2) -> tuple[Stream, Typists]:
    typists = Typists(replicas)

    def hand_over(step: int) -> Callable[[], Metrics]:
        typists.version = step
        return lambda: {"bytes_sent": 1.0}

    return Stream(drawing, typists, hand_over), typists


def drawing_of(**more: Any) -> Drawing:
    return Drawing(**{"source": Numbered(), "prompts": 4, "responses": 3, **more})


def same(found: Rows, wanted: Rows) -> bool:
    names = ("groups", "samples", "seeds")
    ragged = all(found.ragged(name).values.equal(wanted.ragged(name).values) for name in ("responses", "versions"))
    return ragged and all(found.tensor(name).equal(wanted.tensor(name)) for name in names)


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.integers(1, 7),
    responses=st.integers(1, 4),
    max_lag=st.integers(0, 4),
    is_apart=st.booleans(),
    has_greedy=st.booleans(),
    replicas=st.integers(1, 3),
)
def test_no_response_is_too_old_or_lost(
    prompts: int, responses: int, max_lag: int, is_apart: bool, has_greedy: bool, replicas: int
) -> None:
    drawing = drawing_of(
        prompts=max(prompts, replicas), responses=responses, max_lag=max_lag, is_apart=is_apart, has_greedy=has_greedy
    )
    stream, _ = made(drawing, replicas)
    seen, samples = list[int](), responses + has_greedy
    for step in range(8):
        rows = stream.next(step)
        groups = rows.tensor("groups").tolist()
        assert groups == sorted(groups)
        assert [groups.count(group) for group in set(groups)] == [samples] * drawing.prompts, "groups are whole"
        assert rows.tensor("samples").tolist() == list(range(samples)) * drawing.prompts
        assert rows.tensor("greedy").sum() == drawing.prompts * has_greedy
        assert set(rows.objects("finish")) == {"stop"}
        assert [data["place"] for data in rows.objects("data")] == groups  # type: ignore[index]
        for group, seed, versions in zip(
            groups, rows.tensor("seeds").tolist(), rows.ragged("versions").rows(), strict=True
        ):
            assert len(versions) == length_of(group, seed), "a response that is resumed is no other"
            assert versions.tolist() == sorted(versions.tolist())
            assert step - max_lag <= int(versions[0])
            assert int(versions[-1]) <= step
        found = lags(rows, step)
        assert found["sync/version_lag_max"] <= max_lag
        if not max_lag:
            assert found == {
                "sync/version_lag": 0.0,
                "sync/version_lag_max": 0.0,
                "sync/stale_tokens": 0.0,
                "sync/resumed": 0.0,
            }
        seen += sorted(set(groups))
    assert len(seen) == len(set(seen)), "no group is learned from twice"
    place, left = stream.state()
    assert sorted({*seen, *left.tensor("groups").tolist()}) == list(range(place)), "and none is lost"


@pytest.mark.parametrize("worker", [Actor, Rollout])
def test_groups_stay_whole_on_a_replica_that_draws(worker: type) -> None:
    """Replicas count complete groups, each by itself."""
    draws = call_of(worker, "generate", "rollout")
    assert "groups" in draws.reads
    assert RoleLayout.alike(2).bounds(draws, [9, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1]) == [(0, 3), (3, 6)]


def test_weights_are_handed_over_between_two_rounds() -> None:
    """An evaluation hands weights over while a round is under way: that round ends first, and stays as it was."""
    drawing = drawing_of(max_lag=1, is_apart=True)
    (stream, typists), (alone, _) = made(drawing), made(drawing)
    assert same(stream.next(0), alone.next(0))
    stream.hand_over(1)
    assert typists.version == 1
    assert stream.numbers == {"bytes_sent": 1.0}, "the hand-over of the round has ended"
    for step in (1, 2):
        assert same(stream.next(step), alone.next(step))


@pytest.mark.parametrize(
    ("versions", "is_exact", "own"), [((2, 2), True, True), ((1, 2), True, False), ((2, 2), False, False)]
)
def test_old_log_probabilities_are_those_of_rollout_where_no_token_is_stale(
    versions: tuple[int, ...], is_exact: bool, own: bool
) -> None:
    rows = rows_of_completions([completion([2], "stop"), completion(list(versions), "stop")])
    setup: Any = SimpleNamespace(rollout_is_exact=is_exact, progress=SimpleNamespace(step=2))
    assert is_own(setup, rows) == own


def test_a_long_response_holds_no_step_that_may_lag() -> None:
    def turns_of(max_lag: int) -> list[int]:
        stream, typists = made(drawing_of(prompts=9, max_lag=max_lag), replicas=1)
        for step in range(12):
            stream.next(step)
        return typists.turns

    waiting, going_on = turns_of(0), turns_of(4)
    assert all(turns >= NUM_TOKENS - 2 for turns in waiting), "each step has a long response, and waits for it"
    assert sum(going_on) < 0.6 * sum(waiting)


def test_a_round_runs_beside_a_step_where_a_generator_is_apart() -> None:
    stream, typists = made(drawing_of(max_lag=1, is_apart=True))
    lag = [lags(stream.next(step), step)["sync/version_lag"] for step in range(4)]
    assert lag == [0, 1, 1, 1]
    assert len(typists.turns) == 5, "the round of the next step has begun"
    together, _ = made(drawing_of(max_lag=0, is_apart=True))
    alone, _ = made(drawing_of())
    for step in range(3):
        assert same(together.next(step), alone.next(step)), "without a lag a generator apart draws the same"


@pytest.mark.parametrize(("max_lag", "is_apart"), [(0, False), (2, False), (1, True), (3, True)])
def test_a_stream_goes_on_from_any_step(max_lag: int, is_apart: bool, tmp_path: Path) -> None:
    drawing = drawing_of(max_lag=max_lag, is_apart=is_apart, prompts=5)
    for stop in range(1, 5):
        whole, _ = made(drawing)
        for step in range(stop):
            whole.next(step)
        path = tmp_path / f"{stop}.safetensors"
        facts = write_state(path, *whole.state())
        resumed, _ = made(drawing)
        resumed.restore(*read_state(path, facts))
        for step in range(stop, stop + 4):
            assert same(resumed.next(step), whole.next(step)), step


def test_a_damaged_state_is_refused(tmp_path: Path) -> None:
    stream, _ = made(drawing_of(max_lag=2))
    stream.next(0)
    path = tmp_path / "state.safetensors"
    facts = write_state(path, *stream.state())
    content = path.read_bytes()
    for damaged in (content[:-1], content[:-1] + b"x", b""):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"state.safetensors is damaged: its digest is not that of its check"):
            read_state(path, facts)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"cannot read .*the responses under way of a checkpoint"):
        read_state(path, facts)


def test_a_stream_that_resumes_with_another_lag_goes_on() -> None:
    stream, _ = made(drawing_of(max_lag=3))
    for step in range(3):
        stream.next(step)
    place, rows = stream.state()
    assert len(rows)
    other, _ = made(replace(drawing_of(max_lag=3), is_apart=True))
    other.restore(place, rows)
    for step in range(3, 7):
        assert lags(other.next(step), step)["sync/version_lag_max"] <= 3


def test_replicas_stop_when_enough_groups_are_complete() -> None:
    """Of four groups a half may stay: the two short ones end it, unless a long one must end."""
    groups = torch.tensor([0, 1, 2, 3]).repeat_interleave(2)
    prompts = Ragged.of([torch.tensor([group]) for group in groups.tolist()])
    rows = Rows({"prompts": prompts, "groups": groups, "seeds": torch.arange(8) % 2, "must": torch.zeros(8).bool()})

    def ended(rows: Rows, leave: Fraction) -> list[str]:
        requests = requests_of(rows, num_tokens=NUM_TOKENS, stops=frozenset(), seed=0)
        return [each.finish for each in completed(Typist(0), requests, rows, leave)]  # type: ignore[arg-type]

    assert ended(rows, Fraction(1, 2)) == ["aborted"] * 2 + ["stop"] * 4 + ["aborted"] * 2
    must = rows.drop("must") | Rows({"must": torch.tensor([False, True] + [False] * 6)})
    # What is as long as the second row has ended with it.
    assert ended(must, Fraction(1, 2)) == ["aborted"] + ["stop"] * 5 + ["aborted", "stop"]
    assert ended(rows, Fraction(0)) == ["stop"] * 8
    assert ended(rows, Fraction(1)) == ["aborted"] * 8

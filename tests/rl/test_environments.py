"""Responses of many turns: what the policy draws between answers, budgets, faults, and rows that are put aside."""

import asyncio
import re
import time
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from terrace.base.errors import ConfigError
from terrace.generation.engine import GenerationEngine
from terrace.rl.keys import EnvironmentKeys
from terrace.rl.values.environment import Turn
from terrace.rl.values.prompts import Prompt
from terrace.rl.values.ragged import Ragged
from terrace.rl.values.rows import Rows
from terrace.rl.workers.drawing import BEGUN, completed, drawn, requests_of
from terrace.rl.workers.environments import PLAYED, Environments, EnvironmentSettings, load_environment
from tests.support.generation import MODELS, make
from tests.support.toys import run_blocks

HERE = __name__
STOPS = frozenset(range(20))  # of 64 tokens: turns are short
NUM, LONGEST, CONTEXT = 6, 60, 80
CONFIG = MODELS["llama"]


class Numbers:
    """A tokenizer whose texts are the ids of their tokens."""

    vocab_size, fingerprint = 64, "numbers"
    text_tokens: Any = None

    def encode(self, text: str) -> Any:
        return np.array([int(each) for each in text.split()], dtype=np.int64)

    def encode_batch(self, texts: Sequence[str]) -> list[Any]:
        return [self.encode(text) for text in texts]

    def encode_prompt(self, text: str, *, begins_text: bool = True) -> Any:
        return self.encode(text)

    def decode(self, ids: Sequence[int], *, keep_special: bool = False) -> str:
        return " ".join(map(str, ids))


class Echo:
    """Says the first token of a turn and its number, three times; earns a half each time."""

    closed = 0

    def reset(self, prompt: Prompt) -> None:
        self.prompt, self.turn = prompt, 0

    def step(self, turn: Turn) -> tuple[str, float, bool]:
        self.turn += 1
        return f"{turn.text.split()[0]} {20 + self.turn}", 0.5, self.turn == 3 + self.prompt.data["more"]

    def close(self) -> None:
        Echo.closed += 1


class SlowEcho(Echo):
    def step(self, turn: Turn) -> tuple[str, float, bool]:
        time.sleep(0.002 * (len(turn.text) % 7))
        return super().step(turn)


class AsyncEcho:
    def __init__(self) -> None:
        self.inner = Echo()

    async def reset(self, prompt: Prompt) -> None:
        await asyncio.sleep(0.001)
        self.inner.reset(prompt)

    async def step(self, turn: Turn) -> tuple[str, float, bool]:
        await asyncio.sleep(0.002 * (len(turn.text) % 5))
        return self.inner.step(turn)


class Wrapped(AsyncEcho):
    """Plain methods that return what is to be awaited, as decorated ones do."""

    def reset(self, prompt: Prompt) -> Any:
        return super().reset(prompt)

    def step(self, turn: Turn) -> Any:
        return super().step(turn)


class Faulty(Echo):
    def step(self, turn: Turn) -> Any:
        kind = self.prompt.data["fault"]
        if kind == "cancels":

            async def cancelled() -> None:
                raise asyncio.CancelledError

            return cancelled()
        if kind == "raises":
            raise ValueError("out of stock")
        if kind == "exits":
            raise SystemExit(3)
        if kind == "sleeps":
            time.sleep(9)
        wrong = {"pair": ("1", 0.0), "text": (5, 0.0, False), "reward": ("1", float("nan"), False)}
        wrong |= {"done": ("1", 0.0, 1), "silent": ("", 0.0, False)}
        return wrong.get(kind) or super().step(turn)


class Forgetful(Echo):
    """Answers otherwise each time that it is made."""

    made = 0

    def reset(self, prompt: Prompt) -> None:
        super().reset(prompt)
        Forgetful.made += 1

    def step(self, turn: Turn) -> tuple[str, float, bool]:
        said, reward, is_done = super().step(turn)
        return f"{said} {Forgetful.made % 64}", reward, is_done


def settings_of(name: str = "Echo", **more: Any) -> EnvironmentSettings:
    own = {"name": f"{HERE}:{name}", "tokenizer": Numbers(), "max_turns": 9, "overlap": 2, **more}
    return EnvironmentSettings(**own)


def rows_of(num: int = NUM, **data: Sequence[Any]) -> Rows:
    given: list[dict[str, Any]] = [{"more": index % 2} | {k: v[index] for k, v in data.items()} for index in range(num)]
    return Rows({
        "prompts": Ragged.of([torch.arange(30, 33 + index) for index in range(num)]),
        "seeds": torch.arange(num),
        "prompt_texts": tuple(f"prompt {index}" for index in range(num)),
        "data": tuple(given),
    })  # fmt: skip


@pytest.fixture(scope="module")
def blocks() -> Any:
    return [block.double() for block in make(CONFIG)]


def made(blocks: Any, rows: Rows, settings: EnvironmentSettings, **more: Any) -> Rows:
    own: dict[str, Any] = {"context": CONTEXT, "num_tokens": LONGEST, "leave": Fraction(0), "version": 0, **more}
    return drawn(blocks, CONFIG, rows, stops=STOPS, seed=3, tensor_rows=1, environment=settings, **own)


def test_what_is_kept_is_what_plain_torch_computes(blocks: Any) -> None:
    """Positions, log-probabilities and turns; the environment's tokens are in the context and in no column."""
    rows, settings = rows_of(), settings_of()
    requests = requests_of(rows, num_tokens=LONGEST, stops=STOPS, seed=3)
    partner = Environments(settings, rows, STOPS, None)
    engine = GenerationEngine(blocks, CONFIG, context=CONTEXT, num_pages=64, page_tokens=8)
    Echo.closed = 0
    completions = completed(engine, requests, rows, Fraction(0), partner)
    assert Echo.closed == NUM
    columns = partner.columns(completions)
    for index, (request, completion) in enumerate(zip(requests, completions, strict=True)):
        mask = columns.ragged("emitted").lists()[index]
        text = torch.tensor([*request.prompt, *completion.tokens])
        logs = run_blocks(blocks, text[None, :-1]).log_softmax(-1)[0].detach()
        first = len(request.prompt)
        plain = [float(logs[at - 1, text[at]]) for at in range(first, len(text))]
        assert [x for x, own in zip(completion.logprobs, mask, strict=True) if own] == pytest.approx(
            [x for x, own in zip(plain, mask, strict=True) if own], abs=1e-10
        )
        if columns.objects("finish")[index] == "stop":
            assert columns.tensor("turns")[index] == 3 + index % 2
            assert mask.count(False) == 2 * (2 + index % 2)
        assert columns.tensor("earned")[index] == columns.tensor("turns")[index] / 2
    assert {"stop"} <= set(columns.objects("finish")) <= {"stop", "length"}
    found = made(blocks, rows, settings)
    assert len(found.ragged("rollout").values) == int(found.ragged("emitted").values.sum())
    assert found.ragged("rollout").lengths.tolist() == found.ragged("versions").lengths.tolist()


def test_the_same_tokens_in_any_company_and_at_any_pace(blocks: Any) -> None:
    rows = rows_of()
    wanted = made(blocks, rows, settings_of())
    names = ("responses", "emitted")
    for name, overlap in (("SlowEcho", 1), ("AsyncEcho", 30), ("Wrapped", 7)):
        found = made(blocks, rows, settings_of(name, overlap=overlap))
        assert all(found.ragged(each).lists() == wanted.ragged(each).lists() for each in names)
        assert found.objects("finish") == wanted.objects("finish")
    for index in (0, 3):
        alone = made(blocks, rows.take([index]), settings_of())
        assert alone.ragged("responses").lists() == [wanted.ragged("responses").lists()[index]]


def test_budgets_of_turns_and_tokens_end_a_response(blocks: Any) -> None:
    found = made(blocks, rows_of(), settings_of(max_turns=2))
    assert set(found.objects("finish")) <= {"turns", "length"}
    ended = zip(found.tensor("turns").tolist(), found.objects("finish"), strict=True)
    assert {turns for turns, why in ended if why == "turns"} == {2}
    assert not any(mask[-1] is False for mask in found.ragged("emitted").lists()), "nothing is said for nobody"
    short = made(blocks, rows_of(), settings_of(), num_tokens=7)
    assert max(short.ragged("responses").lengths) <= 7
    assert "length" in short.objects("finish")


@pytest.mark.parametrize("leave", [Fraction(1, 2), pytest.param(Fraction(5, 6), marks=pytest.mark.nightly)])
def test_a_response_that_is_put_aside_is_played_again(blocks: Any, leave: Fraction) -> None:
    rows, settings = rows_of(), settings_of("SlowEcho")
    whole = made(blocks, rows, settings)
    parts = made(blocks, rows, settings, leave=leave)
    aside = [index for index, why in enumerate(parts.objects("finish")) if why == "aborted"]
    assert aside
    assert all(parts.tensor(name)[index] == 0 for name in PLAYED[:2] for index in aside)
    begun = Rows({name: parts.columns[name] for name in (*BEGUN, "emitted")}).take(aside)
    assert any(not all(mask) for mask in begun.ragged("emitted").lists()), "with answers among their tokens"
    rest = made(blocks, rows.take(aside) | begun, settings, version=1)
    for name in ("responses", "emitted"):
        assert rest.ragged(name).lists() == [whole.ragged(name).lists()[index] for index in aside]
    for name in PLAYED[:4]:
        assert rest.tensor(name).tolist() == whole.tensor(name)[aside].tolist()
    assert rest.objects("finish") == tuple(whole.objects("finish")[index] for index in aside)
    other = made(blocks, rows.take(aside) | begun, settings_of("Forgetful"))
    wrong = [fault for fault in other.objects("fault") if fault]
    assert wrong
    assert all("answered otherwise when the response was resumed" in str(fault) for fault in wrong)


def test_faults_are_named_and_leave_the_other_rows_alone(blocks: Any) -> None:
    kinds = ["never asked", "raises", "exits", "sleeps", "pair", "text", "reward", "done", "silent", "cancels", "none"]
    rows = rows_of(len(kinds), fault=kinds)
    found = made(blocks, rows, settings_of("Faulty", deadline_s=0.3))
    faults = dict(zip(kinds, map(str, found.objects("fault")), strict=True))
    wanted = {
        "raises": "step raised ValueError: out of stock, in line",
        "exits": r"step called sys.exit\(3\), in line",
        "sleeps": "step took longer than environment.deadline_s = 0.3 s",
        "pair": r"step gave \('1', 0.0\): return \(text, reward, done\)",
        "text": "step gave the text 5: return a string",
        "reward": "step gave the reward nan",
        "done": "step gave done = 1: return True or False",
        "silent": "gave no text although the response is not done",
        "cancels": "step raised CancelledError",
    }
    for index, (kind, message) in enumerate(wanted.items(), start=1):
        place = f"the environment {HERE}:Faulty, at turn 1 of the response to 'prompt {index}': "
        assert faults[kind].startswith(place), faults[kind]
        assert re.search(message, faults[kind]), faults[kind]
    assert not faults["none"]
    assert found.objects("finish")[:-1] == ("length", *("fault",) * 9)
    alone = made(blocks, rows.take([10]), settings_of("Faulty"))
    assert alone.ragged("responses").lists() == found.ragged("responses").lists()[10:]


def test_wrong_environments_are_refused_before_a_run() -> None:
    with pytest.raises(ConfigError, match=f"no class of {HERE}; did you mean 'Echo'"):
        load_environment(f"{HERE}:Eccho", "")
    with pytest.raises(ConfigError, match=r"has no method reset: write reset\(prompt\) and step\(turn\)"):
        load_environment(f"{HERE}:Numbers", "")
    with pytest.raises(ConfigError, match="must be module:class, such as my_environment:Shop"):
        load_environment("Echo", "")
    with pytest.raises(ConfigError, match=r"environment.max_turns = 3 has no effect without an environment"):
        EnvironmentKeys(max_turns=3)
    for key, value in (("max_turns", 0), ("overlap", 0), ("deadline_s", 0.0), ("most_faults", 1.5)):
        with pytest.raises(ConfigError, match=f"environment.{key} = "):
            EnvironmentKeys(name="a:b", **{key: value})  # type: ignore[arg-type]

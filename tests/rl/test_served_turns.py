"""Responses of many turns by inference servers: the likeliest turns are those of the own engine."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from terrace.generation.request import Completion, Request, Sampling
from terrace.rl.algorithms.metrics import Metrics
from terrace.rl.calls.inline import InlineRuntime
from terrace.rl.config import RlConfig
from terrace.rl.making import started
from terrace.rl.values.environment import Turn
from terrace.rl.values.prompts import Prompt
from terrace.rl.workers import served
from terrace.rl.workers.completions import completion_of, request_body
from tests.support.rl_runs import ALONE, GRPO, config_of, inputs_of, served_by
from tests.support.stub_server import GoneError, first, stubs


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "_FIRST_PAUSE_S", 0.001)


class Digits:
    """Answers each turn with its length, and earns the share of digits; after 4 turns it is over."""

    def reset(self, prompt: Prompt) -> None:
        self.turn = 0

    async def step(self, turn: Turn) -> tuple[str, float, bool]:
        self.turn += 1
        share = sum(each.isdigit() for each in turn.text) / max(1, len(turn.text))
        return f"{len(turn.text)}=", share, self.turn == 4


def nothing(samples: list[Any]) -> list[float]:
    return [0.0 for _ in samples]


TURNS: dict[str, Any] = {
    **GRPO,
    "reward": [{"function": "tests.rl.test_served_turns:nothing"}],
    "environment": {"name": "tests.rl.test_served_turns:Digits", "max_turns": 5},
    "run": {**GRPO["run"], "max_response": 48},
}


def test_servers_draw_responses_of_many_turns(tmp_path: Path) -> None:
    """The likeliest turns are those of the own engine; a fault of the server between two turns is made good."""

    def held_out(config: RlConfig, folder: Path) -> tuple[float, list[Any], list[Metrics]]:
        with InlineRuntime() as runtime:
            run = started(inputs_of(config), runtime, folder, print)
            reward, samples = run.evaluated()["val/reward"], run.samples.taken(0, True)
            return reward, samples, [found for _, found in run.steps()] if config.rollout.is_served else []

    with stubs(2) as servers:
        servers[0].faults.append(first(3, GoneError()))
        config = config_of(ALONE, TURNS, served_by(servers), task="calculator")
        reward, samples, steps = held_out(config, tmp_path / "served")
        begins = {tuple(body["prompt"]): body for path, body in servers[1].asked if path == "/v1/completions"}
    own_reward, own_samples, _ = held_out(config_of(ALONE, TURNS, task="calculator"), tmp_path / "own")
    assert (reward, samples) == (own_reward, own_samples)
    assert reward > 0
    assert any(len(each["turns"]) > 2 for each in samples)
    assert len({body["max_tokens"] for body in begins.values()}) > 1, "a turn has what those before it left"
    # The training engine reads the whole response at once, with the answers in its context.
    assert all(0 < found["rollout/logprob_diff_max"] < 1e-5 for found in steps)
    assert all(found["environment/turns/mean"] > 1.5 and found["environment/foreign_tokens"] > 0 for found in steps)
    assert all(found["environment/faults"] == found["environment/stalled_s"] == 0 for found in steps)


def test_a_turn_has_random_numbers_of_its_own() -> None:
    request = Request(prompt=(3, 4), num_tokens=9, seed=7, sampling=Sampling(seed=1), stop_tokens=frozenset({0}))
    begun = Completion((5, 0, 6), (-1.0, -1.0, 0.0), (2, 2, 0), "aborted")
    one, other = (request_body(each, "m", {}) for each in (request, replace(request, begun=begun)))
    assert one["seed"] != other["seed"]
    assert (other["prompt"], other["max_tokens"]) == ([3, 4, 5, 0, 6], 6)
    choice = {"token_ids": [1, 0], "logprobs": {"token_logprobs": [-2.0, -3.0]}, "finish_reason": "stop"}
    made = completion_of({"choices": [choice]}, replace(request, begun=begun), "http://a:1", 12, version=3)
    assert made == Completion((5, 0, 6, 1, 0), (-1.0, -1.0, 0.0, -2.0, -3.0), (2, 2, 0, 3, 3), "stop")

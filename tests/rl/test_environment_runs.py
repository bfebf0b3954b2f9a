"""Runs with environments: on several ranks as on one, resumed with the same bits, with gradients of drawn tokens alone.

The task `calculator` is learned at night, on two seeds.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch

from terrace.base.errors import TrainingError
from terrace.base.schema import merge
from terrace.model.decoder import build_blocks
from terrace.model.init import initialise
from terrace.rl.algorithms.advantages import grpo
from terrace.rl.algorithms.metrics import Metrics
from terrace.rl.calculator_task import Calculator, CalculatorPrompts, CalculatorTokenizer
from terrace.rl.calls.inline import InlineRuntime
from terrace.rl.calls.local import LocalRuntime
from terrace.rl.commands.run import _checked
from terrace.rl.config import to_toml_table
from terrace.rl.keys import TASKS as NAMES
from terrace.rl.making import started
from terrace.rl.resolve import parse, resolve
from terrace.rl.run import RunInputs
from terrace.rl.tasks import TASKS
from terrace.rl.values.environment import Turn
from terrace.rl.values.prompts import Prompt
from terrace.rl.values.rows import Rows
from tests.support.chats import HERMES, write_lines, write_tokenizer
from tests.support.hf_folder import TABLE, write_model
from tests.support.rl_runs import ALONE, FOUR, config_of, inputs_of, numbers, ran
from tests.support.toys import run_blocks

HERE = "tests.rl.test_environment_runs"


class Digits:
    """Answers each turn with its length, four times; earns the share of digits."""

    def reset(self, prompt: Any) -> None:
        self.turn, self.prompt = 0, prompt

    def step(self, turn: Turn) -> tuple[str, float, bool]:
        self.turn += 1
        share = sum(each.isdigit() for each in turn.text) / max(1, len(turn.text))
        return f"{len(turn.text)}=", share, self.turn == 4


class Sometimes(Digits):
    """Fails for prompts whose first number is even."""

    def step(self, turn: Turn) -> tuple[str, float, bool]:
        if int(self.prompt.text.partition("*")[0]) % 2 == 0:
            raise LookupError(self.prompt.text)
        return super().step(turn)


TURNS: dict[str, Any] = {
    "run": {"max_response": 48, "reference": False, "evaluate_every": 0, "start_steps": 0, "steps": 2},
    "algorithm": {"name": "grpo", "kl_coefficient": 0.0},
    "environment": {"name": f"{HERE}:Digits", "max_turns": 5},
    "optimizer": {"lr": 0.01},
}


def config(*more: Mapping[str, Any]) -> Any:
    return config_of(TURNS, *more, task="calculator")


TWO = {"cluster": {"tiers": {"node": {"size": 1}, "system": {"size": 1}}}}
RANKS = {"two tensor ranks": (TWO, 2), "two replicas": (TWO, 1), "two of two": (FOUR, 2), "four replicas": (FOUR, 1)}


def by_night(*names: str) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.nightly] if number else []) for number, name in enumerate(names)]


ONE = {"run": {"steps": 1, "mini_batch": 16}}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Metrics, Rows]:
    """A step of GRPO in one process, and its rows."""
    return observed(inputs_of(config(ALONE, ONE)), tmp_path_factory.mktemp("alone"))


def observed(inputs: RunInputs, folder: Path) -> tuple[Metrics, Rows]:
    seen = list[Rows]()
    with InlineRuntime() as runtime:
        run = started(inputs, runtime, folder, print)
        object.__setattr__(run._setup, "observe", lambda rows, advantages: seen.append(rows))
        ((_, found),) = run.steps()
    return found, seen[0]


def check_alike(found: list[Metrics], wanted: list[Metrics]) -> None:
    assert len(found) == len(wanted)
    for mine, other in zip(found, wanted, strict=True):
        assert numbers(mine) == pytest.approx(numbers(other), rel=1e-9, abs=1e-9)
        assert mine["environment/turns/mean"] > 1.5
        assert 0 < mine["environment/foreign_tokens"] < 0.5
        assert mine["actor/grad_norm"] > 0


@pytest.mark.parametrize("ranks", by_night(*RANKS))
def test_ranks_take_the_step_of_one_process(ranks: str, alone: tuple[Metrics, Rows], tmp_path: Path) -> None:
    cluster, rows = RANKS[ranks]
    found = ran(LocalRuntime(timeout_s=200.0), config(ONE, cluster, {"run": {"rows": rows}}), tmp_path)
    check_alike(found, [alone[0]])


@pytest.mark.nightly  # several processes for each
@pytest.mark.parametrize("algorithm", ["ppo", "dapo", "remax"])
@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_learn_as_one_process(ranks: str, algorithm: str, tmp_path: Path) -> None:
    cluster, rows = RANKS[ranks]
    more = {"algorithm": {"name": algorithm}, "run": {"steps": 3}, "environment": {"overlap": 1}}
    wanted = ran(InlineRuntime(), config(more, ALONE), tmp_path / "alone")
    found = ran(LocalRuntime(timeout_s=200.0), config(more, cluster, {"run": {"rows": rows}}), tmp_path / "ranks")
    check_alike(found, wanted)


def test_the_gradient_is_that_of_drawn_tokens_alone(alone: tuple[Metrics, Rows]) -> None:
    """The update of a step, whose ratios are 1, against plain torch: GRPO's loss over what the policy drew."""
    (found, rows), of_run = alone, config(ALONE, ONE)
    blocks = build_blocks(of_run.model, dtype=torch.float64)
    initialise(blocks, of_run.model, of_run.run.seed, torch.float64)
    advantages, terms = grpo(rows.tensor("reward").double(), rows.tensor("groups")).float(), list[torch.Tensor]()
    columns = (rows.ragged(name).rows() for name in ("prompts", "responses", "emitted", "rollout"))
    for advantage, prompt, response, emitted, rollout in zip(advantages, *columns, strict=True):
        text = torch.cat([prompt, response])
        logs = run_blocks(blocks, text[None, :-1]).log_softmax(-1)[0]
        own = logs[torch.arange(len(prompt) - 1, len(text) - 1), response][emitted]
        assert own.tolist() == pytest.approx(rollout.tolist(), abs=1e-6)
        terms.append(-advantage * own.mean())
    gradients = torch.autograd.grad(
        torch.stack(terms).mean(), [each for block in blocks for each in block.parameters()]
    )
    norm = torch.cat([each.flatten() for each in gradients]).norm()
    # Log-probabilities are kept in fp32, so a ratio is 1 but for their rounding.
    assert found["actor/grad_norm"] == pytest.approx(float(norm), rel=1e-6)
    assert not rows.ragged("emitted").values.all()


def test_a_run_that_goes_on_in_the_middle_of_responses_has_the_same_bits(tmp_path: Path) -> None:
    lagging = {"run": {"max_lag": 2, "steps": 3, "prompts": 4, "responses": 2, "mini_batch": 8}}
    whole = ran(InlineRuntime(), config(ALONE, lagging), tmp_path / "whole")
    first = ran(InlineRuntime(), config(ALONE, lagging, {"run": {"steps": 1}}), tmp_path / "parts")
    rest = ran(InlineRuntime(), config(ALONE, lagging), tmp_path / "parts")
    assert [numbers(each) for each in rest] == [numbers(each) for each in whole[1:]]
    assert numbers(first[0])["reward/mean"] == whole[0]["reward/mean"]
    assert any(each["sync/resumed"] > 0 for each in rest), "a response goes on in another round"


def test_faults_leave_the_group_or_end_the_run(tmp_path: Path) -> None:
    failing = {"environment": {"name": f"{HERE}:Sometimes", "most_faults": 0.9}, "run": {"steps": 1}}
    with InlineRuntime() as runtime:
        run = started(inputs_of(config(ALONE, failing)), runtime, tmp_path, print)
        ((_, found),) = run.steps()
        faults, samples = run.faults(), run.samples.taken(1, True)
    prompts = [CalculatorPrompts(0).prompt(place).text for place in range(4)]
    most = 4 * sum(int(each.partition("*")[0]) % 2 == 0 for each in prompts)
    num = round(found["environment/faults"])
    assert 0 < num <= most < 16, "a response that is cut in its first turn has no fault"
    assert len(faults) == num
    places = [f"Sometimes, at turn 1 of the response to {text!r}: step raised LookupError" for text in prompts]
    assert all(any(place in fault for place in places) for fault in faults)
    for each in samples:
        assert [who for who, _ in each["turns"]][:2] in (["model", "environment"], [])
        assert "".join(text for _, text in each["turns"]) in (each["response"], "")
    assert any(each["turns"] for each in samples)
    with pytest.raises(TrainingError, match=rf"environments of {num} of 16 responses failed, .*= 0.1; the first: "):
        ran(InlineRuntime(), config(ALONE, failing, {"environment": {"most_faults": 0.1}}), tmp_path / "strict")


def test_a_configuration_is_read_back() -> None:
    one = config(ALONE)
    assert parse(to_toml_table(one)) == one
    assert "environment" not in to_toml_table(config_of(ALONE))
    assert tuple(TASKS) == NAMES


def test_the_calculator_answers_calls_and_judges_numbers() -> None:
    task, tokenizer = CalculatorPrompts(3), CalculatorTokenizer()
    assert task.prompt(5) == CalculatorPrompts(3).prompt(5) != CalculatorPrompts(4).prompt(5)
    assert not {task.prompt(place).text for place in range(300)} & {each.text for each in task.held_out()}
    rows = task.examples(0, 8)
    columns = (rows.ragged(name).lists() for name in ("prompts", "responses", "emitted"))
    for number, (prompt, response, emitted) in enumerate(zip(*columns, strict=True)):
        game, text = Calculator(), tokenizer.decode(prompt)
        game.reset(Prompt(text, ()))
        drawn = [token for token, own in zip(response, emitted, strict=True) if own]
        *turns, rest = " ".join(map(str, drawn)).split(str(tokenizer.end))
        assert not rest
        said = [game.step(Turn(tokenizer.decode([int(each) for each in turn.split()]))) for turn in turns]
        assert said[-1] == ("", 1.0, True)
        foreign = [token for token, own in zip(response, emitted, strict=True) if not own]
        assert [tokenizer.decode(foreign)] == ([said[0][0]] if number % 4 == 0 else [""])
    game = Calculator()
    game.reset(Prompt("12*12=", ()))
    assert [game.step(Turn(each)) for each in ("?12*1", "?12**", "145", "144")] == [
        ("12=", 0.0, False),
        ("!=", 0.0, False),
        ("", 0.0, True),
        ("", 1.0, True),
    ]


@pytest.mark.nightly
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_calculator_is_learned(seed: int, tmp_path: Path) -> None:
    """From a policy that mostly guesses to one that calls: the bar is .8 of held-out prompts, drawn .5."""
    alone = {**ALONE, "plan": {"preset": "ddp", "micro_batch": 128}, "run": {"seed": seed}}
    of_run = resolve("calculator", None, {}, merge({}, alone))
    found = list[Metrics]()
    with InlineRuntime() as runtime:
        run = started(inputs_of(of_run), runtime, tmp_path, print)
        start = run.evaluated()["val/reward"]
        found += [metrics for _, metrics in run.steps()]
    last = sum(each["reward/mean"] for each in found[-5:]) / 5
    print(f"seed {seed}: held out {start:.3f} to {found[-1]['val/reward']:.3f}, drawn {last:.3f}")
    assert found[-1]["val/reward"] >= 0.8 > start
    assert last >= 0.5 > 2 * found[0]["reward/mean"]
    assert found[-1]["environment/turns/mean"] > found[0]["environment/turns/mean"]


class Shop:
    """Says the same after each turn, and earns by its length."""

    tools = ({"type": "function", "function": {"name": "buy", "parameters": {"type": "object"}}},)

    async def reset(self, prompt: Prompt) -> None:
        assert "buy" in prompt.text, "tools stand in the prompt"

    async def step(self, turn: Turn) -> tuple[str, float, bool]:
        return "Go on.", len(turn.text) / 100, False


def test_a_chat_model_is_answered_in_its_template(tmp_path: Path) -> None:
    """From a file with messages to a step: every answer has the tokens of the template, between turns as drawn."""
    pytest.importorskip("jinja2")
    folder = tmp_path / "model"
    folder.mkdir()
    write_model(folder, {**TABLE, "vocab_size": 420})
    write_tokenizer(folder, HERMES)
    # A policy that knows nothing seldom writes one token: many end its turns.
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(60, 200))}))
    line = {"prompt": [{"role": "user", "content": "Two apples?"}]}
    write_lines(tmp_path / "prompts.jsonl", [line, line])
    table: dict[str, Any] = {"model": str(folder), "cluster": "local", "plan": {"preset": "ddp", "micro_batch": 4}}
    table["environment"] = {"name": f"{HERE}:Shop", "max_turns": 3}
    table["run"] = {"prompts_file": str(tmp_path / "prompts.jsonl"), "max_prompt": 120, "max_response": 90, "steps": 1}
    table["run"] |= {"prompts": 1, "responses": 4, "mini_batch": 4, "held_out": 1, "evaluate_every": 1}
    (tmp_path / "run.toml").write_text(tomli_w.dumps(table))
    inputs = _checked(resolve(None, str(tmp_path / "run.toml"), {}, ALONE), "")
    found, rows = observed(inputs, tmp_path / "run")
    wanted = "\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"
    responses, masks = (rows.ragged(name).lists() for name in ("responses", "emitted"))
    said = [
        inputs.tokenizer.decode([x for x, own in zip(response, mask, strict=True) if not own], keep_special=True)
        for response, mask in zip(responses, masks, strict=True)
    ]
    assert {text.replace(wanted, "") for text in said} == {""}
    assert max(text.count(wanted) for text in said) == 2
    assert found["environment/ended_by_turns"] > 0
    assert found["environment/faults"] == 0
    assert found["reward/mean"] > 0
    assert "val/reward" in found, "held-out prompts are judged by the environment alone"

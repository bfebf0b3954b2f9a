"""The task `sort`: prompts by place, held-out ones apart, rewards of exact answers with their end."""

import pytest
import torch

from terrace.rl.algorithms.metrics import joined, of_rows, of_tokens
from terrace.rl.resolve import resolve
from terrace.rl.sort_task import END, NUM_HELD_OUT, SortPrompts, SortTokenizer, answer, length_cost, reward
from terrace.rl.values.prompts import Sample, rows_of
from terrace.rl.values.ragged import Ragged
from terrace.rl.values.rows import Rows


def test_a_prompt_is_a_function_of_seed_and_place() -> None:
    task = SortPrompts(seed=3)
    assert [task.prompt(place) for place in range(20)] == [SortPrompts(seed=3).prompt(place) for place in range(20)]
    assert task.prompt(0) != SortPrompts(seed=4).prompt(0)
    lengths = {len(task.prompt(place).text) for place in range(200)}
    assert lengths == set(range(6, 12))


def test_held_out_prompts_are_never_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SortPrompts, "num_held_out", NUM_HELD_OUT)  # all of them
    task = SortPrompts()
    held_out = {prompt.text for prompt in task.held_out()}
    assert len(task.held_out()) == NUM_HELD_OUT
    assert not held_out & {task.prompt(place).text for place in range(2000)}
    tokenizer = SortTokenizer()
    assert not held_out & {tokenizer.decode(row.tolist()) for row in task.examples(0, 2000).ragged("prompts").rows()}


def test_examples_have_the_right_answer_and_its_end() -> None:
    rows = SortPrompts().examples(5, 3)
    tokenizer = SortTokenizer()
    for prompt, response in zip(rows.ragged("prompts").rows(), rows.ragged("responses").rows(), strict=True):
        text = tokenizer.decode(prompt.tolist())
        assert tokenizer.decode(response.tolist()) == "".join(sorted(text[:-1]))
        assert response.tolist()[-1] == END
        assert END not in response.tolist()[:-1]
    again = SortPrompts().examples(6, 1)
    assert torch.equal(again.ragged("prompts").values, rows.ragged("prompts").rows()[1])


def test_only_an_exact_answer_with_its_end_is_rewarded() -> None:
    assert answer("3102>") == "0123"
    samples = [Sample("31>", response, finish, {}) for response, finish in [("13", "stop"), ("13", "length")]]
    samples += [Sample("31>", response, "stop", {}) for response in ("31", "113", "", "1")]
    assert reward(samples) == [1, 0, 0, 0, 0, 0]
    assert length_cost(samples) == [0.2, 0.2, 0.2, 0.3, 0, 0.1]


def test_the_model_is_as_large_as_it_says() -> None:
    config = resolve("sort", None, {}, {}).model
    hidden, inner = config.hidden_size, config.intermediate_size
    layer = 4 * hidden**2 + 3 * hidden * inner + 2 * hidden
    total = 2 * config.vocab_size * hidden + config.num_layers * layer + hidden
    assert round(total / 1e6, 2) == 0.79


def test_the_numbers_of_an_iteration() -> None:
    """Two groups: one of equal rewards, all right; log-probabilities that differ at one token."""
    prompts = rows_of([SortPrompts().prompt(0), SortPrompts().prompt(1)], first_group=7)
    assert prompts.tensor("groups").tolist() == [7, 8]
    lengths = torch.tensor([0, 1, 3, 3, 6])
    old = Ragged(torch.full((6,), -1.0), lengths)
    rollout = Ragged(torch.tensor([-1.0, -1.0, -1.5, -1.0, -1.0, -1.0]), lengths)
    rows = prompts.repeat(2) | Rows({
        "responses": Ragged(torch.zeros(6, dtype=torch.int64), lengths),
        "reward": torch.tensor([1.0, 1.0, 0.0, 1.0]),
        "score/0": torch.tensor([1.0, 1.0, 0.0, 2.0]),
        "old": old,
        "rollout": rollout,
        "kl": old.with_values(torch.arange(6.0)),
    })  # fmt: skip
    found = of_rows(rows, num_tokens=3)
    assert found["reward/mean"] == 0.75
    assert found["reward/std"] == 0.5
    assert found["score/0/mean"] == 1.0
    assert (found["response_length/mean"], found["response_length/min"]) == (1.5, 0)
    assert found["response_length/clip_ratio"] == 0.25
    assert (found["group/all_right"], found["group/all_wrong"]) == (0.5, 0)
    assert found["rollout/logprob_diff_max"] == 0.5
    assert abs(found["rollout/logprob_diff_mean"] - 0.5 / 6) < 1e-9
    assert found["rollout/ess"] < 1
    assert found["actor/kl"] == 2.5
    assert of_tokens("advantages", old) == {"advantages/mean": -1, "advantages/max": -1, "advantages/min": -1}
    assert joined([{"a": 1.0}, {"a": 3.0}], "actor") == {"actor/a": 2.0}
    # The empty response divides nothing by 0.
    assert of_rows(rows.take([2]), num_tokens=3)["rollout/logprob_diff_max"] == 0.0

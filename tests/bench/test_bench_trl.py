"""TRL gets the same task as Terrace."""

from pathlib import Path

import pytest

from bench.against_trl import config_of, reward_of, tokenizer
from terrace.rl import sort_task
from terrace.rl.values.prompts import Sample


def test_the_tokenizer_has_the_ids_of_the_task() -> None:
    text = "0123456789>"
    ids = tokenizer()(text)["input_ids"]
    assert ids == sort_task.SortTokenizer().encode(text).tolist()
    assert tokenizer().eos_token_id == sort_task.END


@pytest.mark.parametrize(
    ("tokens", "reward"),
    [([1, 3, 3, 11], 1.0), ([1, 3, 3], 0.0), ([3, 1, 3, 11], 0.0), ([], 0.0), ([1, 3, 11, 3, 11], 0.0)],
)
def test_rewards_are_the_tasks(tokens: list[int], reward: float) -> None:
    assert reward_of("313>", tokens) == reward
    finish = "stop" if tokens[-1:] == [sort_task.END] else "length"
    if sort_task.END not in tokens[:-1]:
        text = sort_task.SortTokenizer().decode(tokens)
        sample = Sample(prompt="313>", response=text, finish=finish, data={})
        assert sort_task.reward([sample]) == [reward]


def test_both_run_one_rank_without_a_reference(tmp_path: Path) -> None:
    config = config_of(3, tmp_path)
    assert (config.cluster.world_size, config.run.reference, config.run.start_steps) == (1, False, 0)

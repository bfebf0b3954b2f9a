"""Rewards by a function of the user's: its arguments, and every way in which it can be wrong, each with its prompt."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from terrace.base.errors import ConfigError, TrainingError
from terrace.rl.sort_task import END, SortTokenizer
from terrace.rl.values.prompts import Prompt, Sample, rows_of
from terrace.rl.values.ragged import Ragged
from terrace.rl.values.rows import Rows
from terrace.rl.workers.reward_function import RewardFunction, load_function

HERE = __name__


def graded(samples: Sequence[Sample]) -> list[float]:
    return [each.data["grade"] + len(each.response) + (each.finish == "stop") for each in samples]


def short(samples: Sequence[Sample]) -> list[float]:
    return [0.0]


def never_a_number(samples: Sequence[Sample]) -> list[float]:
    return [1.0, float("nan")]


def words(samples: Sequence[Sample]) -> list[str]:
    return ["good", "bad"]


def beyond_fp32(samples: Sequence[Sample]) -> list[float]:
    return [1.0, 1e39]


def beyond_fp64(samples: Sequence[Sample]) -> list[int]:
    return [1, 10**400]


def of_numpy(samples: Sequence[Sample]) -> list[np.float32]:
    return [np.float32(0.5), np.float32(2.0)]


def endless(samples: Sequence[Sample]) -> Iterator[float]:
    while True:
        yield 1.0


def broken(samples: Sequence[Sample]) -> Iterator[float]:
    yield 1.0
    raise KeyError("answer")


def stuck(samples: Sequence[Sample]) -> Iterator[float]:
    yield 1.0
    time.sleep(30)
    yield 1.0


def rows() -> Rows:
    prompts = rows_of([Prompt("31>", (3, 1, 10), {"grade": 5.0}), Prompt("72>", (7, 2, 10), {"grade": 7.0})])
    responses = Ragged.of([torch.tensor([1, 3, END]), torch.tensor([2])])
    return prompts | Rows({"responses": responses, "finish": ("stop", "length")})


def rewards(function: str, deadline_s: float = 10.0) -> Rows:
    worker = RewardFunction(None, function=f"{HERE}:{function}", tokenizer=SortTokenizer(), deadline_s=deadline_s)
    return worker.rewards(rows())


def test_a_function_sees_prompts_texts_ends_and_data() -> None:
    assert rewards("graded").tensor("reward").tolist() == [5 + 2 + 1, 7 + 1 + 0]


def test_numbers_of_numpy_are_numbers() -> None:
    assert rewards("of_numpy").tensor("reward").tolist() == [0.5, 2.0]


def test_a_share_without_rows_does_not_call_the_function() -> None:
    worker = RewardFunction(None, function=f"{HERE}:broken", tokenizer=SortTokenizer())
    found = worker.rewards(rows().part(0, 0)).tensor("reward")
    assert (found.shape, found.dtype) == ((0,), torch.float32)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("short", r"gave 1 number for 2 responses, the first to '31>': give one for each"),
        ("beyond_fp32", r"gave 1e\+39 for the response to '72>': give a finite number, which fp32 can hold"),
        ("beyond_fp64", r"gave 1000.*000 for the response to '72>': give a finite number"),
        ("endless", r"gave more than 2 numbers for 2 responses, the first to '31>': give one for each"),
        ("never_a_number", r"gave nan for the response to '72>': give a finite number"),
        ("words", r"gave 'good' for the response to '31>'"),
        ("broken", r"raised KeyError: 'answer', in line \d+ of .*\.py, at the response to '72>'"),
    ],
)
def test_a_wrong_result_names_its_prompt(function: str, message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        rewards(function)


def test_a_function_that_hangs_ends_the_call_with_its_prompt() -> None:
    begin_s = time.monotonic()
    with pytest.raises(TrainingError, match=r"took longer than 0.2 s for 2 responses; it has given 1, .* to '72>'"):
        rewards("stuck", deadline_s=0.2)
    assert time.monotonic() - begin_s < 10


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("graded", "must be module:function"),
        ("no_such_module:f", "cannot be imported: ModuleNotFoundError"),
        (f"{HERE}:grades", "no function of .*; did you mean 'graded'"),
    ],
)
def test_a_function_that_cannot_be_imported_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_function(name, str(Path.cwd()))

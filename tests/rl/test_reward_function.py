"""Rewards by a function of the user's: its arguments, and every way in which it can be wrong, each with its prompt."""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from terrace.base.errors import ConfigError, TrainingError
from terrace.rl.sort_task import END, SortTokenizer
from terrace.rl.values.prompts import Prompt, Sample, rows_of
from terrace.rl.values.ragged import Ragged
from terrace.rl.values.rows import Rows
from terrace.rl.workers.reward_forms import check_columns
from terrace.rl.workers.reward_function import RewardFunction, load_function

HERE = __name__
GRADES = (5.0, 7.0)


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


def bools(samples: Sequence[Sample]) -> list[bool | np.bool_]:
    return [True, np.bool_(False)]


def tensors(samples: Sequence[Sample]) -> list[torch.Tensor]:
    return [torch.tensor(0.5, requires_grad=True), torch.tensor(2)]


def tensor_of_the_batch(samples: Sequence[Sample]) -> torch.Tensor:
    return torch.tensor([0.5, 2.0])


def array_of_the_batch(samples: Sequence[Sample]) -> "np.ndarray[Any, Any]":
    return np.array([0.5, 2.0], dtype=np.float16)


def column(samples: Sequence[Sample]) -> torch.Tensor:
    return torch.tensor([[0.5], [2.0]])


def one_number(samples: Sequence[Sample]) -> Any:
    return torch.tensor(0.5)


def nothing(samples: Sequence[Sample]) -> None:
    return None


def by_number(samples: Sequence[Sample]) -> dict[int, float]:
    return {0: 0.5, 1: 2.0}


def of_a_set(samples: Sequence[Sample]) -> set[float]:
    return {0.5, 2.0}


def emptied(samples: list[Sample]) -> list[float]:
    found = [0.5 for _ in samples]
    samples.clear()
    return found


def leaves(samples: Sequence[Sample]) -> list[float]:
    sys.exit(3)


class WordlessError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def wordless(samples: Sequence[Sample]) -> list[float]:
    raise WordlessError


class Shy:
    def __repr__(self) -> str:
        raise RuntimeError("no words")


class Leaver:
    def __repr__(self) -> str:
        sys.exit(3)


class NoFloat(float):
    def __float__(self) -> float:
        raise RuntimeError("no number")


def leaver(samples: Sequence[Sample]) -> list[Any]:
    return [Leaver(), 1.0]


def without_values(samples: Sequence[Sample]) -> torch.Tensor:
    return torch.ones(2, device="meta")


def masked(samples: Sequence[Sample]) -> Any:
    return np.ma.array([0.5, 2.0], mask=[False, True])


def no_float(samples: Sequence[Sample]) -> list[float]:
    return [1.0, NoFloat(2.0)]


def shy(samples: Sequence[Sample]) -> list[Any]:
    return [Shy(), 1.0]


def talks(samples: Sequence[Sample]) -> list[float]:
    for _ in range(3000):
        print("x" * 100)
    return [0.5, 2.0]


async def later(samples: Sequence[Sample]) -> list[float]:
    return [0.5, 2.0]


def of_two(one: object, two: object) -> list[float]:
    return []


def trl(completions: list[str], grade: list[float], **columns: Any) -> list[float]:
    assert columns["prompts"] == ["31>", "72>"]
    assert columns["completion_ids"] == [[1, 3, END], [2]]
    return [len(text) + each for text, each in zip(completions, grade, strict=True)]


def trl_alone(prompts: list[str], completions: list[str]) -> list[float]:
    return [float(len(prompt) + len(text)) for prompt, text in zip(prompts, completions, strict=True)]


def trl_of_names(**columns: Any) -> list[float]:
    return [float(len(text)) for text in columns["completions"]]


def trl_by_place(completions: list[str], /) -> list[float]:
    return []


def by_name_alone(*, samples: Sequence[Sample]) -> list[float]:
    return []


def trl_in_want(completions: list[str], answer: list[str]) -> list[float]:
    return [0.0, 0.0]


def verl(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float | dict[str, float]:
    assert (data_source, extra_info) == ("digits", {"index": 1})
    return {"score": float(len(solution_str))} if solution_str == ground_truth else -1.0


def verl_more(data_source: str, solution_str: str, ground_truth: str) -> dict[str, float]:
    return {"score": 1.0, "acc": 1.0}


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


OF_TERRACE = ({"grade": 5.0}, {"grade": 7.0})
OF_VERL = tuple(
    {"data_source": "digits", "reward_model": {"style": "rule", "ground_truth": text}, "extra_info": {"index": 1}}
    for text in ("13", "27")
)


def rows(lines: Sequence[Mapping[str, Any]] = OF_TERRACE) -> Rows:
    prompts = rows_of([Prompt("31>", (3, 1, 10), lines[0]), Prompt("72>", (7, 2, 10), lines[1])])
    responses = Ragged.of([torch.tensor([1, 3, END]), torch.tensor([2])])
    return prompts | Rows({"responses": responses, "finish": ("stop", "length")})


def rewards(function: str, deadline_s: float = 10.0, lines: Sequence[Mapping[str, Any]] = OF_TERRACE) -> Rows:
    worker = RewardFunction(None, function=f"{HERE}:{function}", tokenizer=SortTokenizer(), deadline_s=deadline_s)
    return worker.rewards(rows(lines))


def test_a_function_sees_prompts_texts_ends_and_data() -> None:
    assert rewards("graded").tensor("reward").tolist() == [5 + 2 + 1, 7 + 1 + 0]


@pytest.mark.parametrize("function", ["of_numpy", "tensors", "tensor_of_the_batch", "array_of_the_batch", "talks"])
def test_numbers_are_numbers_whoever_made_them(function: str) -> None:
    assert rewards(function).tensor("reward").tolist() == [0.5, 2.0]


def test_truth_is_a_number() -> None:
    assert rewards("bools").tensor("reward").tolist() == [1.0, 0.0]


def test_a_function_that_empties_its_list_gives_what_it_gives() -> None:
    assert rewards("emptied").tensor("reward").tolist() == [0.5, 0.5]


def test_functions_of_trl_and_verl_are_known_by_their_parameters() -> None:
    assert rewards("trl").tensor("reward").tolist() == [2 + 5, 1 + 7]
    assert rewards("trl_alone").tensor("reward").tolist() == [5, 4]
    assert rewards("trl_of_names").tensor("reward").tolist() == [2, 1]
    assert rewards("verl", lines=OF_VERL).tensor("reward").tolist() == [2.0, -1.0]
    flat = [{**line, "ground_truth": "2"} for line in OF_VERL]
    assert rewards("verl", lines=flat).tensor("reward").tolist() == [-1.0, 1.0]


def test_columns_that_a_function_needs_are_asked_for_before_a_run() -> None:
    check_columns(trl, "trl", ["grade"])
    check_columns(graded, "graded", [])
    check_columns(verl, "verl", ["data_source", "reward_model"])
    with pytest.raises(ConfigError, match="'trl_in_want' needs 'answer', and lines of prompts have grade beside"):
        check_columns(trl_in_want, "trl_in_want", ["grade"])
    with pytest.raises(ConfigError, match="needs 'ground_truth'"):
        check_columns(verl, "verl", ["data_source", "extra_info"])


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
        ("column", r"gave an array of shape \(1,\) for the response to '31>'"),
        ("one_number", r"it gave tensor\(0.5000\), which is no list: give a number for each response"),
        ("nothing", r"it gave None, which is no list"),
        ("by_number", r"it gave \{0: 0.5, 1: 2.0\}, which is no list"),
        ("of_a_set", r"it gave \{0.5, 2.0\}, which is no list"),
        ("leaves", r"called sys.exit\(3\), in line \d+ of .*\.py, at the response to '31>'"),
        ("wordless", r"raised WordlessError, in line \d+ of .*\.py, at the response to '31>'"),
        ("shy", r"gave (a Shy|<Shy instance at .*>) for the response to '31>'"),
        ("leaver", r"gave a Leaver for the response to '31>'"),
        ("without_values", r"gave tensor\(.*\) for the response to '31>'"),
        ("masked", r"gave masked for the response to '72>'"),
        ("no_float", r"gave 2.0 for the response to '72>': give a finite number"),
        ("trl_in_want", r"needs 'answer', and the line of the prompt '31>' has grade beside it: add 'answer'"),
        ("broken", r"raised KeyError: 'answer', in line \d+ of .*\.py, at the response to '72>'"),
    ],
)
def test_a_wrong_result_names_its_prompt(function: str, message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        rewards(function)


def test_keys_of_a_table_that_have_no_effect_are_refused() -> None:
    with pytest.raises(TrainingError, match=r"gave a table with the key 'acc', which has no effect, for .* '31>'"):
        rewards("verl_more", lines=OF_VERL)


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
        (f"{HERE}:GRADES", "no function of (?!.*GRADES')"),
        ("my_rewards.py:graded", "give the module without its folder and without .py"),
        ("./my_rewards:graded", "give the module without its folder and without .py"),
        (f"{HERE}:trl_by_place", r"takes \(completions\) by place alone: give them names"),
        (f"{HERE}:by_name_alone", r"takes \(samples\): give it the parameters \(samples\)"),
        (f"{HERE}:later", "is async, .*: write def"),
        (f"{HERE}:of_two", r"takes \(one, two\): give it the parameters \(samples\), \(completions, ...\) as of TRL"),
    ],
)
def test_a_function_that_cannot_be_imported_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_function(name, str(Path.cwd()))


def test_a_module_that_leaves_is_refused(tmp_path: Path) -> None:
    (tmp_path / "leaving_rewards.py").write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(ConfigError, match=r"'leaving_rewards:f' cannot be imported: called sys.exit\(3\)"):
        load_function("leaving_rewards:f", str(tmp_path))


def test_a_reward_stands_for_no_installed_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "wave.py").write_text("def score(samples):\n    return [1.0 for each in samples]\n")
    with pytest.raises(ConfigError, match=r"wave\.py has the name of an installed module .*: rename the file"):
        load_function("wave:score", str(tmp_path))
    (tmp_path / "my_own_wave.py").write_text("import wave\ndef score(samples):\n    return [wave.open]\n")
    import wave

    found: list[object] = list(load_function("my_own_wave:score", str(tmp_path))([]))
    assert found == [wave.open]
    assert sys.path[-1] == str(tmp_path)

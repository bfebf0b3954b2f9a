"""What learning from feedback tells the core of itself: its sections, and how commands use its runs."""

from dataclasses import fields
from pathlib import Path

import pytest

from terrace.base.errors import ConfigError
from terrace.data.ends import ends_of
from terrace.data.tokenizer import load_tokenizer
from terrace.rl.commands.run import _stops
from terrace.rl.config import RlConfig
from terrace.rl.folder import FeedbackFolder, run_folder
from terrace.rl.product import PRODUCT
from terrace.train.config import RunConfig, parse_sections
from terrace.train.runs import command_of
from tests.support.chats import CHATML, write_tokenizer


def test_its_sections_are_those_that_a_run_of_train_has_not() -> None:
    known, of_feedback = ({item.name for item in fields(each)} for each in (RunConfig, RlConfig))
    (kind,) = PRODUCT.runs
    assert set(kind.sections) == of_feedback - known
    with pytest.raises(ConfigError, match=r"unknown section 'pool'; that is a section of terrace rl"):
        parse_sections({"pool": []})


def test_its_runs_are_told_by_their_settings() -> None:
    assert command_of({"run": {}}) == "rl"
    assert command_of({"run": {}, "train": {}}) == command_of({"train": {}}) == command_of({}) == "train"


def test_the_rate_of_its_runs_rises_and_stays() -> None:
    run = {"max_prompt": 3, "max_response": 5, "warmup_steps": 4}
    found = run_folder(Path("run"), {"run": run, "optimizer": {"lr": 1.0}})
    assert isinstance(found, FeedbackFolder)
    assert (found.context, found.saves) == (8, Path("run/actor"))
    assert [found.rate_after(step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    with pytest.raises(ConfigError, match=r"lacks whole numbers for run\.max_prompt"):
        run_folder(Path("run"), {"run": {"max_prompt": "3"}})


def test_a_response_ends_as_generated_text_does(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    write_tokenizer(tmp_path, CHATML)
    tokenizer = load_tokenizer(tmp_path)
    assert _stops(tokenizer, str(tmp_path)) == set(ends_of(tokenizer, tmp_path, folder=tmp_path)) != set()

"""Loaded weights train at a rate for loaded weights; one that would destroy them is refused."""

from dataclasses import replace
from typing import Any

import pytest

from terrace.base.errors import ConfigError
from terrace.train.config import RunConfig
from terrace.train.rates import check_rate, rate_words
from terrace.train.resolve import resolve


def resolved(config: str | None = None, **sections: Any) -> RunConfig:
    sections["train"] = {"weights": "folder", **sections.get("train", {})}
    return resolve(config, {}, {"data": {"tokenizer": "bytes"}, **sections})


@pytest.mark.parametrize(
    ("sections", "rate"),
    [
        ({}, 2e-5),
        ({"lora": {"rank": 8}}, 2e-4),
        ({"optimizer": {"name": "lion"}}, 4e-6),
        ({"optimizer": {"name": "muon"}}, 2e-5),
        ({"optimizer": {"name": "muon"}, "lora": {"rank": 2}}, 2e-4),
        ({"optimizer": {"name": "sgd"}}, 2.5e-3),
        ({"train": {"weights": ""}}, 2.5e-3),
        ({"optimizer": {"lr": 1e-4}}, 1e-4),
        ({"train": {"objective": "reward"}, "data": {"format": "pairs", "tokenizer": "bytes"}}, 1e-5),
        ({"train": {"objective": "dpo"}, "data": {"format": "pairs", "tokenizer": "bytes"}}, 1e-6),
    ],
)
def test_default_rates(sections: dict[str, Any], rate: float) -> None:
    run = resolved(**sections)
    assert run.optimizer.lr == rate
    check_rate(run)


def test_a_rate_of_the_file_counts(tmp_path: Any) -> None:
    (tmp_path / "run.toml").write_text("[optimizer]\nlr = 3e-5\n")
    assert resolved(str(tmp_path / "run.toml")).optimizer.lr == 3e-5
    (tmp_path / "run.toml").write_text("[optimizer]\nweight_decay = 0.0\n")
    assert resolved(str(tmp_path / "run.toml")).optimizer.lr == 2e-5


@pytest.mark.parametrize(
    ("sections", "most"),
    [({}, 1e-3), ({"lora": {"rank": 8}}, 1e-2), ({"optimizer": {"name": "lion"}}, 2e-4)],
)
def test_a_destroying_rate_is_refused_unless_asked_for(sections: dict[str, Any], most: float) -> None:
    run = resolved(**sections)
    with_rate = replace(run, optimizer=replace(run.optimizer, lr=most))
    check_rate(with_rate)
    assert "50 times the usual" in rate_words(with_rate)
    assert "may undo what they have learned" in rate_words(with_rate)
    too_high = replace(run, optimizer=replace(run.optimizer, lr=1.01 * most))
    with pytest.raises(ConfigError, match=r"would destroy the loaded weights.* --train.high_lr true"):
        check_rate(too_high)
    check_rate(replace(too_high, train=replace(too_high.train, high_lr=True)))
    check_rate(replace(too_high, train=replace(too_high.train, weights="")))


def test_the_key_without_effect_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"high_lr = true has no effect: optimizer.lr = 2e-05 is not high"):
        check_rate(resolved(train={"high_lr": True}))
    with pytest.raises(ConfigError, match=r"high_lr = true has no effect: no weights are loaded"):
        check_rate(resolved(train={"high_lr": True, "weights": ""}))


def test_words() -> None:
    assert rate_words(resolved()).startswith("peak learning rate 2e-05, usual for loaded weights under adamw (")
    assert "undo" not in rate_words(resolved(optimizer={"lr": 6e-5}))
    assert rate_words(resolved(train={"weights": ""})) == ""

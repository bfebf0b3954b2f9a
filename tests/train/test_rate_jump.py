"""A resumed run whose schedule has changed says how its rate jumps, as a rate."""

from dataclasses import replace
from typing import Any

import pytest

from terrace.base.schema import dump
from terrace.train.config import RunConfig
from terrace.train.prepare import _changes
from terrace.train.resolve import resolve
from terrace.train.schedule import learning_rate, rate_jump

RUN = resolve(None, {}, {"train": {"steps": 6, "warmup_steps": 2, "schedule": "cosine", "final_lr_fraction": 0.1}})


def table_of(run: RunConfig) -> dict[str, Any]:
    return {"train": dump(run.train), "optimizer": dump(run.optimizer)}


def jump(step: int, lr: float | None = None, **train: Any) -> str:
    """The words on a run of six steps that goes on after `step` of them with other settings."""
    optimizer = RUN.optimizer if lr is None else replace(RUN.optimizer, lr=lr)
    return rate_jump(step, table_of(RUN), replace(RUN.train, **train), optimizer)


def test_more_steps_raise_a_rate_that_had_fallen() -> None:
    longer = replace(RUN.train, steps=12)
    last, now = learning_rate(5, RUN.train, RUN.optimizer), learning_rate(6, longer, RUN.optimizer)
    ended = 0.1 * RUN.optimizer.lr
    assert now > 2.5 * last
    assert jump(6, steps=12) == (
        f"learning rate {last:.3g} -> {now:.3g} in one step, where the earlier settings have {ended:.3g},"
    )
    said = _changes(6, table_of(RUN), replace(RUN, train=longer))
    assert said[0] == "train.steps 6 -> 12"
    assert said[-1] == jump(6, steps=12)


@pytest.mark.parametrize(
    ("step", "given"), [(4, {"lr": 1e-5}), (3, {"schedule": "constant"}), (5, {"final_lr_fraction": 1.0})]
)
def test_any_key_of_the_schedule_counts(step: int, given: dict[str, Any]) -> None:
    assert jump(step, **given).startswith("learning rate ")


def test_what_changes_no_rate_says_nothing() -> None:
    assert jump(3) == ""
    assert jump(3, log_every=7) == ""
    constant = replace(RUN.train, schedule="constant")
    at = table_of(replace(RUN, train=constant))
    assert rate_jump(6, at, replace(constant, steps=12), RUN.optimizer) == ""
    assert rate_jump(6, {}, RUN.train, RUN.optimizer) == rate_jump(6, None, RUN.train, RUN.optimizer) == ""
    assert rate_jump(6, {"train": {"unknown": 1}}, RUN.train, RUN.optimizer) == ""

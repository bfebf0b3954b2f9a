"""The parts of a plan that `Trainer` adds to those that a user gives."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import terrace
from terrace.base.errors import ConfigError, PlanError
from terrace.model.blocks import block_specs
from terrace.plan.plan import Plan
from terrace.plan.presets import preset
from terrace.train.joining import read_cluster, read_optimizer, read_plan, resolved_plan
from tests.support.mixtures import mixture
from tests.support.toys import cluster_of

CLUSTER = cluster_of(2, 2)
CHUNKS = {"forward": 2, "backward": 4, "ahead": 1}


def resolved(activation: tuple[int, int] | None, **changes: Any) -> tuple[Plan, str]:
    plan = replace(preset("zero3", CLUSTER), **{"experts": {"node": {"expert": 2}}, **changes})
    return resolved_plan(CLUSTER, plan, block_specs(mixture()), 1, activation)


def test_chunks_are_chosen_from_the_activation_or_said_to_be_one() -> None:
    plan, note = resolved((16, 64))
    assert plan.expert_chunks.keys() == CHUNKS.keys()
    assert not note
    plan, note = resolved(None)
    assert not plan.expert_chunks
    assert note.startswith("expert_chunks is left out and counts as 1; give activation=(sequence, hidden)")
    assert resolved(None, expert_chunks={"forward": 2})[1].startswith("expert_chunks.backward is left out ")
    assert not resolved(None, expert_chunks=CHUNKS)[1]
    assert not resolved(None, experts={})[1]


def test_shares_that_a_command_would_find_are_refused_in_words_of_their_own() -> None:
    for activation in (None, (16, 64)):
        with pytest.raises(PlanError, match='expert_gaps = "auto" is for commands: give a Trainer the shares'):
            resolved(activation, expert_gaps="auto")


def test_python_names_are_those_of_the_command_line() -> None:
    """Names of optimizers are taken; plans of other trainers are answered, and what a user needs is listed."""
    assert read_optimizer("muon", 1e-3) == read_optimizer({"name": "muon"}, 1e-3)
    with pytest.raises(ConfigError, match=r"optimizer\.name = 'moun' .*did you mean 'muon'"):
        read_optimizer("moun", 1e-3)
    weights = [torch.nn.Parameter(torch.zeros(2))]
    with pytest.raises(ConfigError, match=r"optimizer must be a name, .*, not AdamW: the states of"):
        read_optimizer(torch.optim.AdamW(weights), 1e-3)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="no plan preset or file 'fsdp'; did you mean 'zero3'"):
        read_plan("fsdp", read_cluster("local", 1, ()), {torch.float32})
    assert set(terrace.__all__) <= set(dir(terrace))
    for name in terrace.__all__:
        assert getattr(terrace, name) is not None

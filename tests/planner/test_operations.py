"""`--recompute`: the operations that a search takes, and what it refuses."""

import re
from dataclasses import replace

import pytest

from terrace.base.errors import PlanError
from terrace.plan.plan import AXES
from terrace.planner.operations import parse_operations
from terrace.planner.pins import parse_axes
from tests.support.mixtures import GROUPED, mixture
from tests.support.planner_cases import CLUSTERS, small_task

TASK = small_task(CLUSTERS["dgx 2x3"], batch=6)
MIXED = replace(TASK, model=mixture(GROUPED))


@pytest.mark.parametrize(
    ("text", "axes", "is_mixture", "said"),
    [
        ("attn", "all", False, "names 'attn'; known are"),
        ("mlp,layers", "data", False, "names 'layers'; known are attention, mlp, norms"),
        ("mlp,attention", "data,context", False, "attention cannot be recomputed alone with ranks on the context axis"),
        ("norms", "data,tensor", False, "norms cannot be recomputed alone with ranks on the tensor axis"),
        ("mlp", "data", True, "layers.0 is a mixture of experts"),
    ],
)
def test_operations_that_no_search_takes(text: str, axes: str, is_mixture: bool, said: str) -> None:
    with pytest.raises(PlanError, match=re.escape(said)):
        parse_operations(text, MIXED if is_mixture else TASK, parse_axes(axes))


def test_operations_of_a_search() -> None:
    assert parse_operations("norms, attention", TASK, ("data", "pipeline")) == ("attention", "norms")
    assert parse_operations(None, TASK, AXES) == parse_operations("layers", TASK, AXES) == ()
    assert parse_operations("attention", MIXED, ("data", "tensor")) == ("attention",)

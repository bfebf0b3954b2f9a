"""`--recompute`: the operations that a search takes or refuses, and that it finds the best of all."""

import re
from dataclasses import replace

import pytest

from terrace.base.errors import PlanError
from terrace.plan.mesh import Mesh
from terrace.plan.plan import AXES
from terrace.planner.evaluate import step_of
from terrace.planner.operations import parse_operations
from terrace.planner.pins import parse_axes
from terrace.planner.stages import SERIAL
from terrace.planner.task import Candidate, Placement, plan_of
from terrace.simulate.step import predict_step
from tests.support.mixtures import GROUPED, SHARED, mixture
from tests.support.planner_cases import CLUSTERS, SMALL, evaluator_of, small_task

TASK = small_task(CLUSTERS["dgx 2x3"], batch=6)
MIXED = replace(TASK, model=mixture(GROUPED))


@pytest.mark.parametrize(
    ("text", "axes", "is_mixture", "said"),
    [
        ("attn", "all", False, "names 'attn', which is no operation of a layer: give attention, mlp, norms joined by"),
        ("mlp,layers", "data", False, "names 'layers', which is no operation of a layer: give attention, mlp, norms"),
        ("mlp,attention", "data,context", False, "attention cannot be recomputed alone with ranks on the context axis"),
        ("norms", "data,tensor", False, "norms cannot be recomputed alone with ranks on the tensor axis"),
        ("mlp", "data", True, "layers.0 is a mixture of experts"),
    ],
)
def test_operations_that_no_search_takes(text: str, axes: str, is_mixture: bool, said: str) -> None:
    with pytest.raises(PlanError, match=re.escape(said)):
        parse_operations(text, (MIXED if is_mixture else TASK).blocks, parse_axes(axes))


def test_operations_of_a_search() -> None:
    assert parse_operations("norms, attention", TASK.blocks, ("data", "pipeline")) == ("attention", "norms")
    assert parse_operations(None, TASK.blocks, AXES) is None
    assert parse_operations("layers", TASK.blocks, AXES) == ()
    assert parse_operations("attention", MIXED.blocks, ("data", "tensor")) == ("attention",)


MODELS = {
    "alike": SMALL,
    "experts": mixture(GROUPED),
    "experts after a dense layer": mixture(GROUPED, dense_layers=(0,), hidden_size=256),
    "experts before dense layers": mixture(SHARED, dense_layers=(2, 3), intermediate_size=512),
}


@pytest.mark.parametrize("mapping", [{}, {"pipeline": (1, 2)}, {"rows": (1, 2)}], ids=str)
def test_operations_are_priced_as_their_plan_is(mapping: dict[str, tuple[int, ...]]) -> None:
    """Seconds and memory of the predicted step of the plan that a candidate is, and less of both than whole layers."""
    whole = small_task(CLUSTERS["ethernet 2x2"], batch=8)
    task = replace(whole, operations=("attention", "mlp"))
    mesh = Mesh.build(2, data=(2, 1), **mapping) if mapping else Mesh.build(2, data=(2, 2))
    schedule = "1f1b" if "pipeline" in mapping else SERIAL
    none, some = (Candidate(again, 1, schedule, 1, 1, Placement(-1, -1, -1), mesh) for again in (0, 1))
    kept, again, layers = (
        evaluator_of(each).played(candidate) for each, candidate in ((task, none), (task, some), (whole, some))
    )
    assert kept.step_s < again.step_s < layers.step_s
    assert kept.needed_bytes > again.needed_bytes > layers.needed_bytes
    plan = plan_of(task, some)
    assert plan.recompute == ("layers.*: attention, mlp",)
    predicted = predict_step(step_of(task, replace(plan, stages=again.stages)))
    assert again.step_s == pytest.approx(predicted.step_s)
    # Prices are as close as without recomputation.
    price_s, of_kept_s = (evaluator_of(task).prices.step_s(candidate) for candidate in (some, none))
    assert price_s / of_kept_s == pytest.approx(again.step_s / kept.step_s, rel=0.02)

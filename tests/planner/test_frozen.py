"""Models of which a part is frozen: the search prices them as their programs are, and bounds them from below."""

from dataclasses import replace

import pytest

from terrace.model.blocks import block_specs
from terrace.model.spec import freeze
from terrace.planner.space import Space
from terrace.planner.stages import SERIAL
from terrace.planner.task import Candidate, Placement, Task
from tests.support.exhaustive import meshes
from tests.support.mixtures import GROUPED, SHARED, mixture
from tests.support.nightly import nightly
from tests.support.planner_cases import CLUSTERS, SMALL, adapted, evaluator_of, small_task

MODELS = {
    "alike": SMALL,  # its head is tied
    "experts": mixture(GROUPED),
    "differing": mixture(SHARED, dense_layers=(2, 3), intermediate_size=512),
}
EMBEDDING, LAYERS, ROUTED = ("embedding.*",), ("layers.*",), ("layers.*.mlp.*",)
SOME_LAYERS = ("embedding.*", "layers.[01].*")
CODED = ("nf4",)  # in place of patterns: adapters over a base in codes


def frozen_task(model: str, patterns: tuple[str, ...], cluster: str = "dgx 2x3", batch: int = 12) -> Task:
    """Adapters alone train without patterns; with them, the parameters that match none."""
    task = small_task(CLUSTERS[cluster], batch=batch, model=MODELS[model])
    if patterns == CODED:
        return adapted(task, "nf4")
    return replace(task, declared=freeze(block_specs(task.model), patterns)) if patterns else adapted(task)


@pytest.mark.parametrize(
    ("model", "patterns"),
    [
        ("alike", CODED),
        ("alike", SOME_LAYERS),
        ("experts", ROUTED),
        ("differing", ()),
        *nightly(("alike", ()), ("alike", EMBEDDING), ("alike", LAYERS), ("experts", ())),
    ],
)
def test_a_search_prices_frozen_matrices_as_their_program_does(model: str, patterns: tuple[str, ...]) -> None:
    """The step is as long as the plan's, and shorter than if all trained."""
    task, within = (
        frozen_task(model, patterns),
        0.015 if patterns == CODED else 0.03,
    )  # without decoding it is 0.025 off
    evaluator, of_whole = evaluator_of(task), evaluator_of(replace(task, declared=()))
    for mesh in meshes(Space(task=task, axes=("data", "tensor"))):
        for placement in (Placement(-1, -1, -1), Placement(1, 1, 1)):
            candidate = Candidate(0, 1, SERIAL, 1, 1, placement, mesh)
            played_s = evaluator.played(candidate).step_s
            assert evaluator.prices.step_s(candidate) == pytest.approx(played_s, rel=within)
            assert played_s < of_whole.played(candidate).step_s

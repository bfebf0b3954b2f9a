"""Models whose blocks differ: the search over them, its bounds, and the memory it counts."""

from dataclasses import replace

import pytest

from terrace.model.blocks import block_specs
from terrace.model.config import ModelConfig, parse_model
from terrace.model.spec import BlockSpec
from terrace.plan.plan import AXES
from terrace.plan.slices import slice_blocks
from terrace.planner.evaluate import step_of
from terrace.planner.stages import SERIAL
from terrace.planner.task import Candidate, Placement, Task, num_micros, plan_of
from terrace.simulate.step import predict_step
from tests.support.differing import differing, undeclared
from tests.support.exhaustive import check_search
from tests.support.nightly import every, nightly
from tests.support.planner_cases import CLUSTERS, SMALL, evaluator_of, mesh_of, small_task
from tests.support.state_formula import model_state_bytes

NAMES = (
    "dense first layer",
    "two kinds in turn",
    "no logits",
    "two look-ups",
    "parameters alone",
    "one block of parameters alone",
)
TIED = parse_model(
    {
        "model_type": "llama",
        "vocab_size": 1000,
        "hidden_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 1024,
        "tie_word_embeddings": True,
    }
)


def models(model: ModelConfig) -> dict[str, tuple[BlockSpec, ...]]:
    return dict(zip(NAMES, (*differing(model), *undeclared(model)), strict=True))


def task_of(name: str, cluster: str, batch: int) -> Task:
    return replace(small_task(CLUSTERS[cluster], batch=batch), declared=models(SMALL)[name])


ALL_AXES, TWO_AXES = ("frontier 2x1x2", AXES), ("frontier 2x2x2", ("data", "pipeline"))
OFTEN = {("two look-ups", TWO_AXES), ("parameters alone", ALL_AXES)}
CASES = [(name, space) for name in NAMES for space in (ALL_AXES, TWO_AXES)]


@pytest.mark.parametrize(
    ("name", "cluster", "axes"),
    [
        *((name, *space) for name, space in CASES if (name, space) in OFTEN),
        *nightly(*((name, *space) for name, space in CASES if (name, space) not in OFTEN)),
    ],
)
def test_the_search_is_near_trying_everything(name: str, cluster: str, axes: tuple[str, ...]) -> None:
    task = task_of(name, cluster, 4)
    everything, evaluator = check_search(task, axes), evaluator_of(task)
    assert any(each.candidate.schedule != SERIAL for each in everything)
    for each in everything[:2]:
        shown = evaluator.played(each.candidate)
        assert shown.step_s == predict_step(step_of(task, plan_of(task, each.candidate))).step_s


@pytest.mark.parametrize("schedule", every(2, [SERIAL, "1f1b", "zb-h1", "zbv", "interleaved"]))
@pytest.mark.parametrize("blocks", [block_specs(TIED), *models(TIED).values()], ids=["equal layers", *NAMES])
def test_the_memory_of_a_plan_is_the_exact_account_of_its_fullest_stage(
    blocks: tuple[BlockSpec, ...], schedule: str
) -> None:
    """The states of a stage. The whole is of the worst moment, and the account has the worst of each category."""
    task = replace(small_task(CLUSTERS["frontier 2x2x2"], batch=16, model=TIED), declared=blocks)
    evaluator = evaluator_of(task)
    stages = 1 if schedule == SERIAL else 2
    chunks = 2 if schedule in ("zbv", "interleaved") else 1
    for placement in (Placement(-1, -1, -1), Placement(-1, 1, 2), Placement(0, 1, 2)):
        mesh = mesh_of((2, 1, 1, 1), (2, 1, 1, 1), (2 // stages, 1, 1, stages))
        candidate = Candidate(0, 1, schedule, chunks, 1, placement, mesh)
        plan, shown, micros = plan_of(task, candidate), evaluator.played(candidate), num_micros(task, candidate)
        programs = predict_step(step_of(task, plan)).programs
        states = [
            model_state_bytes(task.cluster, each.plan, slice_blocks(blocks, each.mesh), micros, 256, each.stage)
            for each in programs
        ]
        names = ("params", "secondary", "grads", "optimizer")
        exact = [{name: state[name] for name in names if state[name]} for state in states]
        found = {name: size for name, size in shown.memory_bytes.items() if name in names}
        assert found in exact

"""One truth for a step: whatever validates is predicted, and every command predicts the same number."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from terrace.base.errors import TerraceError
from terrace.cluster.cluster import Cluster
from terrace.model.block_operations import layer_operations
from terrace.model.config import ModelConfig
from terrace.plan.kinds import Kinds
from terrace.plan.plan import Plan
from terrace.plan.presets import preset
from terrace.plan.update import Update, parse_update
from terrace.plan.validate import validate
from terrace.plan.wire import FORMATS
from terrace.planner.evaluate import step_of as task_step
from terrace.planner.scaling import evaluate_plan
from terrace.planner.task import Candidate, Placement, Task
from terrace.program.lowering import build_stages
from terrace.program.program import Program
from terrace.program.schedules.registry import schedule_names
from terrace.report.step_view import StepView
from terrace.runtime.settings import OptimizerConfig
from terrace.simulate.cost import step_costs
from terrace.simulate.events import simulate as play_one
from terrace.simulate.footprint import footprint, work_of
from terrace.simulate.fullest import Job, fullest_stage
from terrace.simulate.stages import simulate_stages
from terrace.simulate.step import predict_step
from terrace.train.config import RunConfig
from terrace.train.keys import TrainConfig
from terrace.train.prediction import predict, resolved_run
from tests.support.mixtures import GROUPED, SHARED, mixture
from tests.support.planner_cases import CLUSTERS, evaluator_of, gpt, mesh_of, small_task
from tests.support.strategies import expert_tables
from tests.support.totals import verify_stages

MODELS = {
    "4 layers": gpt(4, 64, 4, vocab=96, positions=64),
    "7 layers": gpt(7, 64, 4, vocab=1000, positions=64),
    "two kinds of layers": mixture(SHARED, layers=5, dense_layers=(0,)),
    "frozen bias": mixture(GROUPED),
}
SEQUENCE = 64
OPERATIONS = [("layers.*: attention",), ("layers.* every 2: attention, mlp, norms", "layers.1")]
NUMBERED = {"interleaved": ("", ":1", ":2", ":3"), "breadth-first": (":1", ":2"), "zeropp": (":1", ":2")}


@st.composite
def mappings(draw: st.DrawFn, cluster: Cluster) -> dict[str, dict[str, object]]:
    """A row for some of the tiers, whose degrees multiply to its size."""
    table: dict[str, dict[str, object]] = {}
    for tier in cluster.tiers:
        left, row = tier.size, dict[str, object]()
        for axis in draw(st.permutations(["pipeline", "tensor", "context"])):
            degree = draw(st.sampled_from([each for each in (1, 2, 4) if left % each == 0]))
            left //= degree
            if degree > 1 and axis == "tensor":
                row[axis] = draw(st.sampled_from([degree, {"columns": degree}, {"rows": degree}]))
            elif degree > 1 and axis == "context":
                row[axis] = draw(st.sampled_from([degree, {"ulysses": degree}]))
            elif degree > 1:
                row[axis] = degree
        if row:
            table[tier.name] = row | {"data": left}
    return table


@st.composite
def plans(draw: st.DrawFn, cluster: Cluster, model: ModelConfig) -> Plan:
    """Any axes, placements, schedule, recomputed parts, prefetch, unit, parts of messages and stages."""
    places = ["device", *(tier.name for tier in cluster.tiers)]
    params, grads, optimizer = sorted(draw(st.tuples(*[st.integers(0, len(places) - 1)] * 3)))
    mapping = draw(mappings(cluster))
    pipelined = any("pipeline" in row for row in mapping.values())
    name = draw(st.sampled_from(schedule_names()))
    number = draw(st.sampled_from(NUMBERED.get(name, (":3",) if name == "zb-auto" else ("",))))
    tables = [{}, {"node": {"expert": 2}}, draw(expert_tables(cluster))] if model.experts is not None else [{}]
    experts = draw(st.sampled_from(tables))
    rounded = {tier: draw(st.sampled_from(["bf16", "fp8"])) for tier in experts}
    lossy = draw(st.sets(st.sampled_from(["dispatch", "combine"]))) if experts else set[str]()
    plan = Plan(
        experts=experts,
        wire=dict.fromkeys(sorted(lossy), rounded),
        params=places[params],
        grads=places[grads],
        optimizer=places[optimizer],
        mapping=mapping,  # type: ignore[arg-type]
        compute=draw(st.sampled_from(["bf16", "fp32"])),
        micro_batch=draw(st.sampled_from([1, 2])),
        recompute=draw(st.sampled_from([(), ("layers.*",), ("layers.1", "head"), ("embedding",), *OPERATIONS])),
        unit=draw(st.sampled_from([1, 1, 2, 4])),
        prefetch=draw(st.integers(0, 3)),
        balance=draw(st.sampled_from(["tokens", "tokens", "cost"])),
        sequence_parallel=draw(st.booleans()),
        tensor_chunks=draw(st.sampled_from([1, 1, 2])),
        schedule=f"{name}{number}" if pipelined else None,
        update=draw(st.sampled_from(["adamw", "adamw", "lion", "muon", "galore:2", "lsp:4:2", "sgd", "sgd+momentum"])),
    )
    return plan


def _optimizer(update: Update) -> OptimizerConfig:
    if update == "sgd" or update == "sgd+momentum":
        return OptimizerConfig(name="sgd", momentum=0.9 if update == "sgd+momentum" else None)
    rule = parse_update(update)
    table: dict[str, Any] = {"name": rule.name, "rank": rule.rank, "density": rule.density}
    return OptimizerConfig(**{key: value for key, value in table.items() if value})


@st.composite
def runs(draw: st.DrawFn) -> RunConfig:
    """A run whose plan validates."""
    cluster = CLUSTERS[draw(st.sampled_from(sorted(CLUSTERS)))]
    model = MODELS[draw(st.sampled_from(sorted(MODELS)))]
    run = RunConfig(
        model=model,
        cluster=cluster,
        plan=(plan := draw(plans(cluster, model))),
        optimizer=_optimizer(plan.update),
        train=TrainConfig(steps=1, batch=draw(st.sampled_from([24, 48, 384])), sequence=SEQUENCE),
    )
    try:
        validate(cluster, run.plan, run.blocks())
        programs = build_stages(cluster, run.plan, run.blocks(), run.num_micros(), SEQUENCE)
    except TerraceError:
        assume(False)
    if len(programs) > 1 and draw(st.booleans()):  # by hand, as even in number as they can be
        virtual, num = sum(len(program.stage.chunks) for program in programs), len(run.blocks())
        by_hand = tuple(num // virtual + (index < num % virtual) for index in range(virtual))
        run = replace(run, plan=replace(run.plan, stages=by_hand))
    return run


@settings(deadline=None, max_examples=24)
@given(runs())
def test_every_command_predicts_the_same_step(run: RunConfig) -> None:
    """plan and scale (a task), simulate and explain (a view), train (a prediction, and the programs it runs)."""
    check_step(run)


@pytest.mark.parametrize("row", [{"data": 2}, {"pipeline": 2}, {"tensor": 2}, {"tensor": {"columns": 2}}])
def test_they_do_for_a_head_of_values(row: dict[str, int | dict[str, int]]) -> None:
    model, cluster = replace(MODELS["4 layers"], scalar_head=True), CLUSTERS["lab 2x2x2"]
    plan = replace(preset("zero2", cluster), mapping={"node": row}, micro_batch=2)
    check_step(
        RunConfig(model=model, cluster=cluster, plan=plan, train=TrainConfig(steps=1, batch=48, sequence=SEQUENCE))
    )


def check_step(run: RunConfig) -> None:
    resolved = resolved_run(run)
    trained = predict(resolved, resolved.cluster)
    programs = build_stages(run.cluster, resolved.plan, run.blocks(), run.num_micros(), SEQUENCE)
    verify_stages(programs)
    view = StepView(resolved, programs)
    task = Task(
        model=run.model,
        cluster=run.cluster,
        batch=run.train.batch,
        sequence=SEQUENCE,
        compute=run.plan.compute,
        master=run.plan.master,
    )
    planned = predict_step(task_step(task, run.plan))
    scaled = evaluate_plan(task, run.plan)
    assert trained.step_s == view.predicted.step_s == view.recorded.step_s == planned.step_s == scaled.step_s
    assert trained.step.plan == view.predicted.step.plan == planned.step.plan == resolved.plan
    assert [each.sent_bytes for each in trained.reports] == [each.sent_bytes for each in planned.reports]
    # What runs is what was predicted: the programs that a run builds, played whole.
    costs = [
        step_costs(
            each,
            work_of(
                run.cluster,
                run.plan,
                layer_operations(run.model),
                SEQUENCE,
                documents=run.has_documents,
            ),
        )
        for each in programs
    ]
    whole = [play_one(programs[0], costs[0])] if len(programs) == 1 else simulate_stages(programs, costs).reports
    assert trained.step_s == pytest.approx(whole[0].step_s, rel=1e-12 if trained.is_whole else 5e-3)
    assert trained.step_s > 0
    check_memory(resolved, programs)


def check_memory(run: RunConfig, programs: Sequence[Program]) -> None:
    """The account behind the memory of plan, scale and advice has the buffers of the fullest stage's program."""
    job = Job(cluster=run.cluster, plan=run.plan, num_micros=run.num_micros())
    stage, account = fullest_stage(job, run.blocks(), SEQUENCE)
    held = programs[stage].state_bytes
    for category in ("params", "secondary", "grads", "optimizer", "outer", "feedback"):
        assert account.get(category, 0) == held.get(category, 0), category
    # Activations on their way between stages: one out and one in, in each direction.
    item = FORMATS[run.plan.compute].element_bytes
    between_stages = 4 * programs[stage].model.edge.numel * item if len(programs) > 1 else 0
    updating = footprint(
        run.cluster,
        run.plan,
        Kinds.of(run.blocks()),
        SEQUENCE,
        run.num_micros(),
        held=programs[stage].stage.own,
        phase="update",
    )
    assert updating["buffers"] == held["buffers"] + between_stages
    # Whole matrices are there during the update alone.
    assert account["buffers"] <= updating["buffers"]
    assert account["buffers"] == updating["buffers"] or parse_update(run.plan.update).takes_whole
    # Peaks of the step in the program; in the account those of its fullest moment.
    assert account.get("gathered", 0) <= held["gathered"]
    assert account.get("grads_full", 0) <= held["grads_full"]


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("gpipe", 1), ("zb-h1", 1), ("breadth-first", 2)])
@pytest.mark.parametrize("placement", [Placement(-1, -1, -1), Placement(1, 1, 1)])
def test_pipelines_are_priced_by_the_pace_of_a_slow_link(schedule: str, chunks: int, placement: Placement) -> None:
    """Messages between stages that take longer than computing: a price is near the step that is shown."""
    evaluator = evaluator_of(small_task(CLUSTERS["ethernet 2x2"], batch=64))
    mesh = mesh_of((2, 1, 1, 1), (1, 1, 1, 2))
    candidate = Candidate(0, 1, schedule, chunks, 1, placement, mesh)
    assert evaluator.prices.step_s(candidate) == pytest.approx(evaluator.played(candidate).step_s, rel=0.1)

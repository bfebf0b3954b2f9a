"""The planner against published runs: a 20 B GPT on 384 GCDs of Frontier, and Megatron-LM's table.

Frontier (arXiv 2501.04266, abstract): throughputs of ZeRO-3 : ZeRO++ : three-level are 1 : 1.405 : 2.398, and 0.94 is
kept up to 384 GCDs. The batch and the recomputation are not known; `docs/planning.md` has the assumptions and where the
prediction falls short.
"""

from dataclasses import replace

import pytest

from bench.validation import megatron
from bench.validation.rows import read_rows
from bench.validation.software import ExposedEvaluator, MegatronEstimator, MegatronEvaluator
from terrace.cluster.cluster import Cluster
from terrace.cluster.presets import load_cluster
from terrace.plan.mesh import Mesh
from terrace.plan.presets import preset
from terrace.planner.estimate import Estimator
from terrace.planner.scaling import curve, evaluate_plan
from terrace.planner.task import Task, num_micros
from tests.support.planner_cases import gpt

# GB/s per GCD of a pair, of 4 such pairs, and across nodes with 8 groups on the adapters: Singh et al. 2502.08145, the
# table of effective bandwidths in their code (branch gordon-bell-perlmutter of Megatron-AxoNN, comm_model.py).
MEASURED = (129e9, 72e9, 5e9)


def frontier(*bandwidths: float) -> Cluster:
    """48 nodes, with other bandwidths where they are given."""
    cluster = load_cluster("frontier").resized(48)
    if not bandwidths:
        return cluster
    tiers = (
        replace(tier, bandwidth_bytes_per_s=rate, efficiency=1.0, links=(), by_degree=())
        for tier, rate in zip(cluster.tiers, bandwidths, strict=True)
    )
    return replace(cluster, tiers=tuple(tiers))


def task_on(cluster: Cluster, num_micros: int) -> Task:
    model = gpt(32, 7168, 56)
    return Task(model=model, cluster=cluster, batch=384 * num_micros, sequence=2048)


def ratios(cluster: Cluster, num_micros: int) -> tuple[float, float]:
    """Throughput of ZeRO++ and of three-level over that of ZeRO-3, one sequence a micro-batch."""
    task = task_on(cluster, num_micros)
    steps = {}
    for name in ("zero3", "zero++", "three-level"):
        estimate = evaluate_plan(task, replace(preset(name, cluster), compute="bf16"))
        assert estimate.needed_bytes <= cluster.device.memory_bytes
        steps[name] = estimate.step_s
    return steps["zero3"] / steps["zero++"], steps["zero3"] / steps["three-level"]


@pytest.mark.parametrize(
    ("bandwidths", "num_micros", "predicted"),
    [((), 8, (1.06, 1.07)), (MEASURED, 8, (1.55, 1.54)), (MEASURED, 1, (1.57, 1.39))],
)
def test_gains_over_zero3_are_those_of_the_page(
    bandwidths: tuple[float, ...], num_micros: int, predicted: tuple[float, float]
) -> None:
    found = ratios(frontier(*bandwidths), num_micros)
    assert found == pytest.approx(predicted, abs=0.02)
    # Both gain, as published; that three-level gains 1.7 times as much as ZeRO++ is not predicted.
    assert min(found) > 1.04
    assert max(found) < 2.398


@pytest.mark.parametrize(("num_micros", "kept"), [(8, 0.987), (1, 0.960)])
def test_throughput_kept_up_to_384_gcds(num_micros: int, kept: float) -> None:
    cluster = frontier(*MEASURED)
    plan = replace(preset("three-level", cluster), compute="bf16", recompute=("layers.*",))
    few, many = curve(task_on(cluster, num_micros), plan, (8, 48), "weak")
    assert many.per_device / few.per_device == pytest.approx(kept, abs=0.01)
    assert many.per_device / few.per_device > 0.94


def test_steps_of_megatron_are_near_the_published() -> None:
    """Every row of Table 1 by the planner's own evaluation; `docs/planning.md` has these figures."""
    errors = [abs(row.error) for row in megatron.table().rows]
    assert sum(errors) / len(errors) == pytest.approx(0.017, abs=0.001)
    assert max(errors) == pytest.approx(0.051, abs=0.001)


class _Asynchronous(MegatronEstimator):
    """Sends that run beside computing, as this project's do."""

    def boundary_s(self, mesh: Mesh, micro_batch: int) -> float:
        return Estimator.boundary_s(self, mesh, micro_batch)

    def sending_s(self, mesh: Mesh, micro_batch: int) -> float:
        return Estimator.sending_s(self, mesh, micro_batch)


def test_blocking_sends_and_late_sums_make_a_pipeline_longer() -> None:
    """A stage that waits for its exchanges loses at least as much as one message a micro-batch of its chunks."""
    line = next(line for line in read_rows("megatron_table1.csv") if line["model"] == "530B")
    task, choice = megatron.setting(line)
    evaluator = ExposedEvaluator(task, _Asynchronous(task))
    base_s, edge_s = evaluator.evaluate(choice).step_s, evaluator.stages(choice)[0].edge_s
    blocked_s = ExposedEvaluator(task, MegatronEstimator(task)).evaluate(choice).step_s
    assert blocked_s - base_s > 0.9 * edge_s * choice.chunks * num_micros(task, choice)
    estimate = MegatronEvaluator(task, MegatronEstimator(task)).evaluate(choice)
    assert estimate.step_s > blocked_s
    assert estimate.step_s == pytest.approx(sum(estimate.time_s.values()))

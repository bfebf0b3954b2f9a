"""The planner against published runs: a 20 B GPT on 384 GCDs of Frontier, and Megatron-LM's table.

Frontier (arXiv 2501.04266, abstract): throughputs of ZeRO-3 : ZeRO++ : three-level are 1 : 1.405 : 2.398, and 0.94 is
kept up to 384 GCDs. The batch and the recomputation are not known; `docs/planning.md` has the assumptions and where the
prediction falls short.
"""

from dataclasses import replace

import pytest

from bench.validation import megatron
from bench.validation.rows import read_rows
from terrace.cluster.cluster import Cluster
from terrace.cluster.presets import load_cluster
from terrace.plan.presets import preset
from terrace.planner.scaling import curve, evaluate_plan
from terrace.planner.task import Task
from terrace.program.instruction import Op
from terrace.simulate.step import predict_step
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


def test_blocking_sends_and_late_sums_make_a_pipeline_longer() -> None:
    """A stage that waits for its sends loses most of a message a micro-batch, and late sums come on top."""
    line = next(line for line in read_rows("megatron_table1.csv") if line["model"] == "39B")
    step, _ = megatron.step_of_row(line)
    late = step.cluster.device.software
    sends = replace(late, messages=replace(late.messages, exposed=late.messages.exposed - {"sync"}))
    beside = replace(late, messages=replace(late.messages, exposed=frozenset(("tensor",))))
    summed_late, waiting, free = (
        predict_step(replace(step, cluster=replace(step.cluster, device=replace(step.cluster.device, software=each))))
        for each in (late, sends, beside)
    )
    sent = waiting.costs[0].point_to_point(
        next(each for each in waiting.programs[0].instructions if each.op is Op.SEND)
    )
    assert sent[1] == 1.0
    assert waiting.step_s - free.step_s > 0.7 * sent[0] * step.num_micros
    assert summed_late.step_s > waiting.step_s

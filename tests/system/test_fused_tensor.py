"""Tensor messages that are one operation with their products: the same numbers, bytes and order of messages."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from bench.common import decoder
from bench.gpu_parts.fused import steps
from terrace.base.errors import PlanError
from terrace.cluster.cluster import Cluster
from terrace.launch.start import LocalPool, World
from terrace.plan.plan import Plan
from tests.support.fused import fallbacks, on_cuda, shared, train, train_wrongly
from tests.support.parity import TOLERANCE, Case, check, deviation, engine_of, exact, reference, run
from tests.support.state_formula import model_state_bytes
from tests.support.toys import cluster_of

pytestmark = pytest.mark.timeout(240)


def fused(cluster: Cluster, name: str, rows: dict[str, Any], **changes: object) -> Plan:
    return exact(name, cluster, mapping={"package": {"tensor": rows}}, tensor_chunks="fused", **changes)


def test_two_rows_equal_one_process(pool: LocalPool) -> None:
    """Six tokens on two rows; regions of one, two and three products, biases, tied and recomputed blocks."""
    cluster = on_cuda(cluster_of(2))
    cases = [
        Case(fused(cluster, "ddp", {"rows": 2}), num_micros=2, model="wide llama, 2 kv heads"),
        Case(fused(cluster, "zero3", {"rows": 2}, recompute=("block.1",)), model="wide gpt2"),
        Case(fused(cluster, "ddp", {"rows": 2}), model="wide llama, 1 kv head", lane="lazy"),
    ]
    check(pool, cluster, cases, train)


def test_four_ranks_equal_one_process(pool: LocalPool) -> None:
    """Padding of tokens; key-value heads that all rows hold; columns, and rows of which stages have two."""
    cluster = on_cuda(cluster_of(4))
    staged = exact(
        "ddp", cluster, mapping={"package": {"tensor": 2, "pipeline": 2}}, tensor_chunks="fused", schedule="zb-h1"
    )
    cases = [
        Case(fused(cluster, "zero3", {"rows": 4}), model="wide llama, 1 kv head"),
        Case(fused(cluster, "ddp", {"rows": 2, "columns": 2}), model="wide gpt_neox"),
        Case(staged, num_micros=2, model="wide llama, 2 kv heads"),
    ]
    check(pool, cluster, cases, train)


def test_products_of_other_tokens_show(pool: LocalPool) -> None:
    cluster = on_cuda(cluster_of(2))
    case = Case(fused(cluster, "ddp", {"rows": 2}), model="wide gpt2")
    (outcomes,) = run(pool, cluster, [case], train_wrongly)
    assert max(deviation(outcomes, reference(cluster, case)).values()) > 1e6 * TOLERANCE


def refused(world: World, cluster: Cluster, case: Case) -> str:
    try:
        engine_of(world, cluster, case)
    except PlanError as error:
        return str(error)
    return "ran"


def test_a_cpu_is_refused_before_anything_is_allocated(pool: LocalPool) -> None:
    cluster = on_cuda(cluster_of(2))
    case = Case(fused(cluster, "ddp", {"rows": 2}), model="wide gpt2")
    found = pool.run(2, refused, cluster, case, timeout_s=60.0)
    expected = (
        "tensor_chunks = 'fused' needs CUDA: a CPU has no symmetric memory; write a number of parts instead, "
        "plan.tensor_chunks = 4"
    )
    assert found == [expected] * 2


def buffers(world: World, cluster: Cluster, case: Case) -> tuple[int, int, list[int]]:
    """Measured and predicted bytes of buffers, and those that the ranks of the rows share."""
    shared.clear()
    with fallbacks():
        engine = engine_of(world, cluster, case)
    for step in range(2):
        engine.step(case.batches(engine, case, step), 1e-3)
    engine.drain()
    measured, program = engine.comm.meter.peak()["buffers"], engine.program
    engine.close()
    predicted = model_state_bytes(cluster, case.plan, program.blocks, case.num_micros, case.rows.sequence)
    return measured, predicted["buffers"], [num_bytes for _, num_bytes in shared]


def test_memory_that_ranks_share_is_counted(pool: LocalPool) -> None:
    """Two parts of the residual stream of six tokens on two rows: three tokens of 16 features of 8 bytes each."""
    cluster = on_cuda(cluster_of(2))
    plan = fused(cluster, "ddp", {"rows": 2})
    for each in (replace(plan, tensor_chunks=1), plan):
        case = Case(each, model="wide gpt2")
        for measured, predicted, found in pool.run(2, buffers, cluster, case, timeout_s=60.0):
            assert measured == predicted
            assert found == ([2 * 3 * 16 * 8] if each.fuses_tensor else [])


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_symmetric_memory_gives_the_numbers_of_whole_messages(pool: LocalPool) -> None:
    """In fp64, with an uneven number of tokens, on two devices."""
    cluster, config = on_cuda(cluster_of(2)), decoder(64, 2)
    found = []
    for plan in (fused(cluster, "ddp", {"rows": 2}), exact("ddp", cluster, mapping={"package": {"tensor": 2}})):
        arguments = (True, config, cluster, replace(plan, micro_batch=3), (3, 33), 3)
        losses, norms, _ = pool.call(2, steps, arguments, 120.0, "nccl")[0]
        found.append([*losses, *norms])
    assert found[0] == pytest.approx(found[1], rel=TOLERANCE)

"""Evaluation on ranks: a program of forwards alone finds the loss of the step, and leaves training as it was."""

from collections.abc import Mapping

import pytest

from terrace.cluster.cluster import Cluster
from terrace.launch.start import LocalPool, World
from terrace.plan.wire import MessageClass
from tests.support.nightly import nightly
from tests.support.parity import ADAMW, TOLERANCE, Case, engine_of, exact, run_case
from tests.support.pipelines import ALONE, OUTER, pipelined
from tests.support.token_layouts import dealt_out
from tests.support.toys import Rows, cluster_of

TENSOR, RING = {"package": {"tensor": 2}}, {"node": {"context": {"ring": 2}}}
WIDE, DOCUMENTS = "wide llama, 1 kv head", Rows(23, ((5, 1, 17), (23,), (4, 4, 4, 11)))
CASES: dict[str, tuple[tuple[int, ...], Case]] = {
    "zero3": ((2, 2), Case(exact("zero3", cluster_of(2, 2)), num_micros=2, model="llama tied")),
    "another loss": ((2, 2), Case(exact("zero++", cluster_of(2, 2)), num_micros=2)),
    "tensor": ((2, 2), Case(exact("zero3", cluster_of(2, 2), mapping=TENSOR), model="deep llama tied")),
    "interleaved": ((4,), Case(pipelined("ddp", ALONE, "interleaved:2"), num_micros=4, model="deep gpt2")),
    "context": ((2, 2), Case(exact("zero3", cluster_of(2, 2), mapping=RING), model=WIDE, rows=DOCUMENTS)),
    "context, recomputed, documents dealt out": (
        (2, 2),
        Case(
            exact("zero2", cluster_of(2, 2), mapping=RING, balance="cost", recompute=("block.1",)),
            num_micros=2,
            model=WIDE,
            rows=DOCUMENTS,
            batches=dealt_out,
        ),
    ),
    "1f1b, sharded": ((2, 2), Case(pipelined("zero3", OUTER, "1f1b"), num_micros=3, model="deep llama tied")),
}


def evaluated(world: World, cluster: Cluster, case: Case) -> tuple[list[tuple[float, float, int]], bool, bool]:
    """(evaluated loss, loss, tokens) of each step; whether training went as without; whether the bytes agree."""
    engine = engine_of(world, cluster, case)
    found, results = [], []
    for step in range(2):
        batches = case.batches(engine, case, step)
        before = engine.evaluate(batches)
        assert before.grad_norm == 0
        results.append(engine.step(batches, ADAMW.lr))
        assert before.num_tokens == results[-1].num_tokens
        found.append((before.loss, results[-1].loss, before.num_tokens))
    engine.check_bytes()
    steps = engine.report({}).sent_bytes
    engine.close()
    plain = run_case(world, cluster, case)
    same = list(zip(plain.losses, plain.norms, strict=True))[:2] == [(each.loss, each.grad_norm) for each in results]
    # Bytes of documents dealt out differ from step to step: a second engine, which only trains, says what they are.
    return found, same, steps == trained_bytes(world, cluster, case)


def trained_bytes(world: World, cluster: Cluster, case: Case) -> Mapping[tuple[MessageClass, str], int]:
    """Bytes of a mean step of two, without evaluations."""
    engine = engine_of(world, cluster, case)
    for step in range(2):
        engine.step(case.batches(engine, case, step), ADAMW.lr)
    engine.check_bytes()
    sent = engine.report({}).sent_bytes
    engine.close()
    return sent


SELDOM = ("zero3", "interleaved", "context")


@pytest.mark.parametrize("name", [*(name for name in CASES if name not in SELDOM), *nightly(*SELDOM)])
def test_an_evaluation_finds_the_loss_of_the_step_and_changes_nothing(pool: LocalPool, name: str) -> None:
    sizes, case = CASES[name]
    outcomes = pool.run(cluster_of(*sizes).world_size, evaluated, cluster_of(*sizes), case, timeout_s=120.0)
    for found, same, counted in outcomes:
        assert same
        assert counted
        for evaluated_loss, loss, num_tokens in found:
            assert evaluated_loss == pytest.approx(loss, rel=TOLERANCE)
            assert num_tokens > 0

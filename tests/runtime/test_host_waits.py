"""How often the host waits for a device in a step, counted on the virtual one: the table is in docs/cuda.md."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from terrace.cluster.cluster import Cluster
from terrace.launch.start import LocalPool, World
from terrace.runtime.batch import Batch
from terrace.runtime.clock import StreamClock, wait_for
from tests.support.parity import Case, engine_of, exact
from tests.support.toys import MODELS, WHOLE_ROWS, Rows, cluster_of
from tests.virtual_cuda.rehearsal import rehearsed

DEVICE = torch.device("cuda", 0)
CLIP, EXPERTS = "terrace/runtime/step_sums.py", "terrace/model/grouped.py"
DEEP, WIDE = "deep llama tied", "wide llama, 2 kv heads"
PACKED = Rows(12, ((5, 1, 6), (12,), (1, 1, 3, 7), (7, 5)))
STAGES: dict[str, Any] = {"mapping": {"package": {"pipeline": 2}}, "schedule": "1f1b"}
CONTEXT: dict[str, Any] = {"mapping": {"package": {"context": 2}}, "recompute": ("*",)}


def case(plan: str, model: str, micros: int, rows: Rows = WHOLE_ROWS, **changes: Any) -> Case:
    cluster = cluster_of(2)
    return Case(replace(exact(plan, cluster), **changes), model=model, num_micros=micros, num_steps=2, rows=rows)


def waits(world: World, cluster: Cluster, cases: Sequence[Case]) -> list[dict[str, int]]:
    """Waits of this rank in the second step of each case, by file."""
    return [_waits(world, cluster, each) for each in cases]


def _waits(world: World, cluster: Cluster, case: Case) -> dict[str, int]:
    cluster = replace(cluster, device=replace(cluster.device, backend="cuda"))
    with rehearsed() as rehearsal:
        engine = engine_of(world, cluster, case, MODELS[case.model].blocks(torch.float64), device=DEVICE)
        for step in range(case.num_steps):
            before = Counter(rehearsal.findings.waits)
            engine.step([_pinned(batch).to(DEVICE) for batch in case.batches(engine, case, step)], case.optimizer.lr)
        found = Counter[str]()
        for (_, place), number in (Counter(rehearsal.findings.waits) - before).items():
            found[place.partition(":")[0]] += number
        engine.drain()
        engine.close()
    return dict(found)


def _pinned(batch: Batch) -> Batch:
    named = ((each.name, getattr(batch, each.name)) for each in fields(batch))
    locked: dict[str, Any] = {name: value.pin_memory() for name, value in named if isinstance(value, Tensor)}
    return replace(batch, **locked)


DENSE = {
    "placed": case("zero3", "toy", 2),
    "kept": case("ddp", "gpt2", 2),
    "stages": case("ddp", DEEP, 4, **STAGES),
    "rows": case("ddp", WIDE, 2, mapping={"package": {"tensor": 2}}),
    "packed": case("zero3", "wide llama, window", 1, PACKED, **CONTEXT),
}


@pytest.mark.timeout(300)
def test_a_dense_step_waits_once_and_a_mixture_once_a_layer(pool: LocalPool) -> None:
    """In a pipeline the one wait is at CLIP, after its last backward."""
    mixture = case("zero2", "experts, noisy", 2)
    found = pool.run(2, waits, cluster_of(2), [*DENSE.values(), mixture], timeout_s=250.0)
    for of_rank in found:
        assert dict(zip(DENSE, of_rank, strict=False)) == {name: {CLIP: 1} for name in DENSE}
        # Two layers of two micro-batches, of which nothing is computed again.
        assert of_rank[-1] == {CLIP: 1, EXPERTS: 4}


def test_a_wait_that_is_put_in_is_counted(pool: LocalPool) -> None:
    assert pool.run(2, spoiled, cluster_of(2), timeout_s=100.0) == [{CLIP: 1, "terrace/runtime/clock.py": 1}] * 2


def spoiled(world: World, cluster: Cluster) -> dict[str, int]:
    totals = StreamClock.totals

    def waiting(clock: StreamClock) -> dict[str, float]:
        wait_for(DEVICE)
        return totals(clock)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StreamClock, "totals", waiting)
        return _waits(world, cluster, DENSE["placed"])

"""Islands on ranks against a simulation of them in one process, which shares no code with the runtime."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from terrace.cluster.cluster import Cluster
from terrace.launch.start import LocalPool, World
from terrace.plan.layout import Layout
from terrace.plan.outer import Outer
from terrace.plan.plan import Plan
from terrace.plan.wire import MessageClass
from terrace.program.cycle import cycle
from terrace.runtime.engine import Engine
from tests.support.outer_reference import Micro, OuterLoop, OuterReference
from tests.support.parity import TOLERANCE, Case, engine_of, exact, gathered
from tests.support.toys import MODELS, cluster_of

AVERAGE = Outer(tier="node", every=1, optimizer="average")


def island_plan(name: str, outer: Outer, **changes: object) -> Plan:
    """A preset in fp64 on two tiers of two, whose states lie inside the islands of `outer`."""
    made = exact(name, cluster_of(2, 2), outer=outer, **changes)
    inside = {"node": "package", "package": "device"}[outer.tier]
    kept = {state: inside for state in ("params", "grads", "optimizer") if getattr(made, state) != "device"}
    return replace(made, **kept)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Found:
    """(loss, norm) of every step, of this rank's island; parameters after the run; bytes and memory as predicted."""

    figures: list[tuple[float, float]]
    parameters: Tensor
    outer_bytes: dict[str, int]  # of all steps, by tier
    cycle_bytes: dict[str, int]  # of the steady cycle
    held: int
    applied: list[tuple[int, int, float]]  # step, fragment, loss of every exchange


FAULTS: dict[str, Callable[[Engine], None]] = {}


def trained(world: World, cluster: Cluster, case: Case) -> Found:
    """Train a case to its end on this rank."""
    blocks = MODELS[case.model].blocks(torch.float64)
    engine = engine_of(world, cluster, case, blocks)
    if case.sabotage:
        FAULTS[case.sabotage](engine)
    figures, applied = [], []
    for step in range(case.num_steps):
        result = engine.step(case.batches(engine, case, step), case.optimizer.lr)
        figures.append((result.loss, result.grad_norm))
        applied += [(step, each.fragment, each.loss) for each in result.outer]
    engine.finish()
    engine.check_bytes()
    held = engine.comm.meter.peak()["outer"]
    assert held == engine.program.state_bytes["outer"]
    sent = engine.comm.ledger.total()
    period = cycle([engine.program])
    tiers = [tier.name for tier in cluster.tiers]
    outer = {tier: sent.get((MessageClass.OUTER, tier), 0) for tier in tiers}
    of_cycle = {tier: period.sent_bytes().get((MessageClass.OUTER, tier), 0) for tier in tiers}
    found = Found(figures, gathered(engine, blocks), outer, of_cycle, held, applied)
    engine.close()
    return found


def islands_of(case: Case, cluster: Cluster) -> list[list[int]]:
    """Rows of the global batch by island: a micro-batch has one row for each data rank, the inner tiers fastest."""
    layout = Layout.of(cluster, case.plan)
    ranks, num = layout.data_degree, layout.num_islands
    inside = ranks // num
    places = [range(island * inside, (island + 1) * inside) for island in range(num)]
    return [[micro * ranks + place for micro in range(case.num_micros) for place in own] for own in places]


def simulated(case: Case, cluster: Cluster, **more: Any) -> tuple[OuterReference, list[list[tuple[float, float]]]]:
    """The reference after all steps of a case; (loss, norm) by island of every step."""
    model, outer, rows_of = MODELS[case.model], case.plan.outer, islands_of(case, cluster)
    assert outer is not None
    table = asdict(outer) | {"lr": outer.rate, "momentum": outer.beta}
    del table["tier"]
    reference = OuterReference(
        model.blocks(torch.float64), model.objective, len(rows_of), asdict(case.optimizer), OuterLoop(**table), **more
    )
    figures = []
    for step in range(case.num_steps):
        batch = case.rows.batch(step, sum(map(len, rows_of)))
        micros: list[Sequence[Micro]] = [
            [(batch.inputs[rows], batch.labels[rows], None)] for rows in (list(rows) for rows in rows_of)
        ]
        found = reference.step(micros, case.optimizer.lr, last=step == case.num_steps - 1)
        figures.append(list(zip(found.island_losses, found.norms, strict=True)))
    return reference, figures


def check(pool: LocalPool, cluster: Cluster, cases: Sequence[Case], **more: Any) -> list[list[Found]]:
    """Every case equals its reference on all ranks; what ranks found, by case."""
    found = [pool.run(cluster.world_size, trained, cluster, case, timeout_s=120.0) for case in cases]
    for case, outcomes in zip(cases, found, strict=True):
        reference, figures = simulated(case, cluster, **more)
        ranks = cluster.world_size // len(figures[0])
        for rank, outcome in enumerate(outcomes):
            island = rank // ranks
            expected = torch.tensor([step[island] for step in figures], dtype=torch.float64)
            assert torch.tensor(outcome.figures, dtype=torch.float64).sub(expected).abs().max() < TOLERANCE, case
            assert outcome.parameters.sub(reference.parameters(island)).abs().max() < TOLERANCE, case
    return found


LOOPS = {
    "average": Outer(tier="node", every=3, optimizer="average"),
    "nesterov": Outer(tier="node", every=3),
    "momentum, clipped": Outer(tier="node", every=3, optimizer="momentum", momentum=0.5, clip=0.01),
    "in turns": Outer(tier="node", every=3, fragments=3),
    "late": Outer(tier="node", every=3, delay=1),
    "late in turns": Outer(tier="node", every=6, fragments=3, delay=3, keep=0.5),
    "a cycle late": Outer(tier="node", every=3, delay=3),
    "CO2": Outer(tier="node", every=3, delay=3, optimizer="momentum", keep=0.0, penalty=True, clip=0.02),
    "a cycle late in turns": Outer(tier="node", every=3, fragments=3, delay=3, keep=0.5, penalty=True),
    "every step late": Outer(tier="node", every=1, delay=1, optimizer="average"),
}


def case_of(outer: Outer, name: str = "zero3", **changes: object) -> Case:
    more = {key: changes.pop(key) for key in ("model", "optimizer", "num_steps", "num_micros") if key in changes}
    steps = {"num_steps": 3 * outer.every + 1, "num_micros": 2} | more
    return Case(island_plan(name, outer, **changes), **steps)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_equals_its_simulation(pool: LocalPool, name: str) -> None:
    outer, cluster = LOOPS[name], cluster_of(2, 2)
    (outcomes,) = check(pool, cluster, [case_of(outer)])
    for found in outcomes:
        assert found.held > 0
        # The cycle sends each fragment once, and a run of three cycles and a step four times.
        assert found.outer_bytes["node"] == 4 * found.cycle_bytes["node"] > 0

"""Runs of islands on ranks, with faults on purpose, and the same in one process without code of the runtime."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from terrace.cluster.cluster import Cluster
from terrace.comm import codecs
from terrace.launch.start import LocalPool, World
from terrace.plan.layout import Layout
from terrace.plan.wire import MessageClass, parse_format
from terrace.program.cycle import cycle
from terrace.runtime.engine import Engine
from terrace.runtime.outer_state import OuterState
from tests.support.outer_reference import Micro, OuterLoop, OuterReference
from tests.support.parity import TOLERANCE, Case, engine_of, gathered
from tests.support.shares import micros_of
from tests.support.toys import MODELS


@dataclass(frozen=True)
class Found:
    """(loss, norm) of every step, of this rank's island; parameters after the run; bytes and memory as predicted."""

    figures: list[tuple[float, float]]
    parameters: Tensor
    outer_bytes: dict[str, int]  # of all steps, by tier
    cycle_bytes: dict[str, int]  # of the steady cycle
    held: int
    applied: list[tuple[int, int, float]]  # step, fragment, loss of every exchange


def _changed(**changes: Any) -> Callable[[Engine], None]:
    """A fault: every state's loop has other values than the plan says, for `apply` alone."""

    def spoil(engine: Engine) -> None:
        for flat in engine.state:
            if flat.spec.trainable:
                flat.outer_state.outer = replace(flat.outer_state.outer, **changes)

    return spoil


def equal_weights(engine: Engine) -> None:
    """Islands count alike, however many tokens they have."""
    numbers = engine.state.outer_numbers
    assert numbers is not None
    share = torch.tensor(1 / numbers.num_islands, dtype=torch.float64)
    numbers.weight = lambda fragment: share  # type: ignore[method-assign]


def without_penalty(engine: Engine) -> None:
    """The mean of an exchange is not divided."""
    numbers = engine.state.outer_numbers
    assert numbers is not None
    numbers.stretch = lambda fragment: torch.ones((), dtype=torch.float64)  # type: ignore[method-assign]


def start_that_stays(engine: Engine) -> None:
    """Parameters at the start of an exchange are those of the first."""
    for flat in engine.state:
        if flat.spec.trainable:
            flat.outer_state.take = _staying(flat.outer_state)  # type: ignore[method-assign]


def _staying(state: OuterState) -> Callable[[], Tensor]:
    take = state.take

    def taken() -> Tensor:
        assert state.start is not None
        before = state.start.clone()
        found = take()
        state.start.copy_(before)
        return found

    return taken


FAULTS: dict[str, Callable[[Engine], None]] = {
    "equal weights": equal_weights,
    "another rate": _changed(lr=0.9),
    "another momentum": _changed(momentum=0.3),
    "another clip": _changed(clip=1e-4),
    "another keep": _changed(keep=1.0),
    "another form": _changed(optimizer="nesterov"),
    "no penalty": without_penalty,
    "a start that stays": start_that_stays,
}


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
    if case.plan.shares:
        dealt, inside = micros_of(cluster.world_size, case.plan.shares), cluster.world_size // layout.num_islands
        return [
            [row for rank in range(first, first + inside) for row in dealt[rank]]
            for first in range(0, cluster.world_size, inside)
        ]
    ranks, num = layout.data_degree, layout.num_islands
    inside = ranks // num
    places = [range(island * inside, (island + 1) * inside) for island in range(num)]
    return [[micro * ranks + place for micro in range(case.num_micros) for place in own] for own in places]


def simulated(case: Case, cluster: Cluster, **more: Any) -> tuple[OuterReference, list[list[tuple[float, float]]]]:
    """The reference after all steps of a case; (loss, norm) by island of every step."""
    model, outer, rows_of = MODELS[case.model], case.plan.outer, islands_of(case, cluster)
    table = asdict(outer) | {"lr": outer.rate, "momentum": outer.beta}
    del table["tier"]
    optimizer = {key: value for key, value in asdict(case.optimizer).items() if value is not None}
    reference = OuterReference(
        model.blocks(torch.float64), model.objective, len(rows_of), optimizer, OuterLoop(**table), **more
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
    """Assert that every case equals its reference on all ranks; the results of the ranks, by case."""
    found = [pool.run(cluster.world_size, trained, cluster, case, timeout_s=120.0) for case in cases]
    for case, outcomes in zip(cases, found, strict=True):
        compare(case, cluster, outcomes, **more)
    return found


def compare(case: Case, cluster: Cluster, outcomes: Sequence[Found], **more: Any) -> None:
    """Assert that a case's results of the ranks equal its reference."""
    reference, figures = simulated(case, cluster, **more)
    ranks = cluster.world_size // len(figures[0])
    for rank, outcome in enumerate(outcomes):
        island = rank // ranks
        expected = torch.tensor([step[island] for step in figures], dtype=torch.float64)
        assert torch.tensor(outcome.figures, dtype=torch.float64).sub(expected).abs().max() < TOLERANCE, case
        assert outcome.parameters.sub(reference.parameters(island)).abs().max() < TOLERANCE, case


def as_it_arrives(name: str) -> Callable[[Tensor], Tensor]:
    """The code of a wire format: a row as it is after coding and decoding."""
    wire = parse_format(name)

    def code(row: Tensor) -> Tensor:
        if not row.numel():
            return row
        coded = torch.empty(1, wire.message_bytes(row.numel()), dtype=torch.uint8)
        found = torch.empty(1, row.numel(), dtype=row.dtype)
        codecs.encode(row.view(1, -1), wire, coded)
        codecs.decode(coded, wire, found)
        return found[0]

    return code

"""Periods on ranks: islands that agree every k-th step do local SGD as plain torch does; evaluations take turns.

The reference trains one copy of the model per island, each on the rows of its ranks, and averages parameters after
every k-th step. It shares no code with the runtime.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from terrace.base.errors import ProgramError
from terrace.cluster.cluster import Cluster
from terrace.comm.collectives import Collectives
from terrace.launch.start import LocalPool, World
from terrace.plan.layout import Layout
from terrace.plan.wire import MessageClass
from terrace.program.lowering import forward_programs, outer_program
from terrace.program.message import Transfer
from terrace.program.period import Period, Turn
from terrace.runtime.batch import Batch
from terrace.runtime.engine import Engine
from terrace.runtime.optimizer import make_optimizer
from terrace.runtime.settings import OptimizerConfig
from terrace.runtime.state_part import StatePart
from tests.support.parity import ADAMW, TOLERANCE, Case, engine_of, exact, flatten, gathered, make_adamw, trainable
from tests.support.pipelines import INNER, pipelined
from tests.support.toys import MODELS, Rows, cluster_of, count_tokens, make_batch, run_blocks

RATE = 0.05


@dataclass(frozen=True)
class WholeRows(Rows):
    """Rows whose labels all count, so that islands have equally many."""

    def batch(self, step: int, num_rows: int) -> Batch:
        tokens, _ = make_batch(step, num_rows, self.sequence)
        return Batch(tokens, tokens.roll(-1, dims=1))


class PlainSGD:
    """Gradient descent, which the runtime has not: with it local steps can equal synchronous ones."""

    def __init__(self, master: Tensor, gradient: Tensor, *_: object) -> None:
        self.master, self._gradient, self.num_steps, self.nbytes = master, gradient, 0, 0
        self.parts: list[StatePart] = []

    def update(self, lr: float, muon_momentum: Tensor | None = None) -> None:
        self.master.sub_(self._gradient, alpha=lr)
        self.num_steps += 1


def island_case(plan: str, **more: object) -> Case:
    cluster = cluster_of(2, 2)
    made = exact(plan, cluster, island="package", **more)
    inside = {state: "package" for state in ("params", "grads", "optimizer") if getattr(made, state) == "node"}
    return Case(replace(made, **inside), num_micros=2)  # type: ignore[arg-type]


CASES = {
    "replicated": island_case("ddp"),
    "optimizer sharded": island_case("zero1"),
    "all sharded": island_case("zero3"),
    "tied and frozen": replace(island_case("zero3"), model="llama, frozen layer"),
    "tensor inside": replace(island_case("ddp", mapping={"package": {"tensor": 2}}), model="deep llama tied"),
    "pipeline inside": Case(
        replace(pipelined("ddp", INNER, "1f1b"), island="package"), num_micros=3, model="deep llama tied"
    ),
    "every rank an island": Case(exact("ddp", cluster_of(2, 2), island="device"), num_micros=2),
}


@dataclass(frozen=True)
class Found:
    """A rank's results: (loss, norm) of every step, its island's parameters, bytes of a step, memory, its period's."""

    figures: list[tuple[float, float]]
    parameters: Tensor
    sent_bytes: dict[tuple[MessageClass, str], int]
    memory_bytes: dict[str, int]
    period_bytes: dict[str, int]
    flats: list[tuple[int, tuple[int, ...]]]  # of every trained buffer: padded elements, holders by tier


def exchanging(engine: Engine, every: int) -> Period:
    steps = tuple(engine.stage_programs())
    return Period((Turn(steps, every), Turn(tuple(map(outer_program, steps)))))


def lost_change(engine: Engine) -> None:
    """Send as usual, but lose what the islands learned of one block."""
    (flat,) = engine.state.trainable(2)
    inner = flat.exchange_change

    def lost(collectives: Collectives, transfer: Transfer) -> None:
        inner(collectives, transfer)
        flat.owned.zero_()

    flat.exchange_change = lost  # type: ignore[method-assign]


def half_applied(engine: Engine) -> None:
    """Keep the parameters of one block that islands last agreed on."""
    (flat,) = engine.state.trainable(2)
    flat.apply_change = lambda: None  # type: ignore[method-assign]


FAULTS = {"lost_change": lost_change, "half_applied": half_applied}


def trained(world: World, cluster: Cluster, case: Case, every: int, periods: int, sgd: bool) -> Found:
    """Train `periods` periods of `every` steps on this rank."""
    with mock.patch("terrace.runtime.flat_param.make_optimizer", PlainSGD if sgd else make_optimizer):
        blocks = MODELS[case.model].blocks(torch.float64)
        engine = engine_of(world, cluster, case, blocks)
    if case.sabotage:
        FAULTS[case.sabotage](engine)
    period = exchanging(engine, every)
    figures = []
    for number in range(periods):
        steps = range(number * every, (number + 1) * every)
        batches = [case.batches(engine, case, step) for step in steps]
        results = engine.run_period(period, batches, RATE if sgd else case.optimizer.lr)
        figures += [(result.loss, result.grad_norm) for result in results]
    engine.check_bytes()
    memory = engine.comm.meter.peak()  # before parameters are gathered
    found = Found(
        figures,
        gathered(engine, blocks),
        dict(engine.report({}).sent_bytes),
        memory,
        period.state_bytes(engine.program.stage.index),
        [(flat.padded, flat.layout.degrees) for flat in engine.state if flat.spec.trainable],
    )
    engine.close()
    return found


def reference(
    case: Case,
    rows_of: Sequence[Sequence[int]],
    every: int,
    num_steps: int,
    optimizer: Callable[..., torch.optim.Optimizer],
) -> tuple[list[list[tuple[float, float]]], Tensor]:
    """(By island, loss and norm of every step; parameters after the last), from plain torch.

    `rows_of` names the rows of the global batch that each island trains on.
    """
    model, clip = MODELS[case.model], case.optimizer.clip
    islands = [model.blocks(torch.float64) for _ in rows_of]
    trained = [trainable(blocks) for blocks in islands]
    optimizers = [optimizer(parameters) for parameters in trained]
    figures: list[list[tuple[float, float]]] = [[] for _ in islands]
    for step in range(num_steps):
        batch = case.rows.batch(step, sum(map(len, rows_of)))
        for island, (blocks, rows) in enumerate(zip(islands, rows_of, strict=True)):
            tokens, labels = batch.inputs[list(rows)], batch.labels[list(rows)]
            optimizers[island].zero_grad()
            loss = model.objective(run_blocks(blocks, tokens), labels) / count_tokens(labels)
            torch.autograd.backward(loss)
            norm = nn.utils.get_total_norm([p.grad for p in trained[island] if p.grad is not None])
            if clip:
                nn.utils.clip_grad_norm_(trained[island], clip)
            optimizers[island].step()
            figures[island].append((float(loss.detach()), float(norm)))
        if (step + 1) % every == 0:
            with torch.no_grad():
                for copies in zip(*trained, strict=True):
                    mean = torch.stack([copy.detach() for copy in copies]).mean(0)
                    for copy in copies:
                        copy.copy_(mean)
    return figures, flatten(islands[0])


def sgd(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE)


def rows_by_island(case: Case, num_islands: int) -> list[list[int]]:
    """Rows of the global batch by island: a micro-batch has one row for each data rank, the inner tiers fastest."""
    ranks = Layout.of(cluster_of(2, 2), case.plan).data_degree
    inside = ranks // num_islands
    places = [range(island * inside, (island + 1) * inside) for island in range(num_islands)]
    return [[micro * ranks + place for micro in range(case.num_micros) for place in own] for own in places]


def check(outcomes: Sequence[Found], figures: list[list[tuple[float, float]]], parameters: Tensor) -> None:
    ranks = len(outcomes) // len(figures)  # of an island: ranks are numbered innermost tier first
    for rank, found in enumerate(outcomes):
        expected = torch.tensor(figures[rank // ranks], dtype=torch.float64)
        assert torch.tensor(found.figures, dtype=torch.float64).sub(expected).abs().max() < TOLERANCE
        assert found.parameters.sub(parameters).abs().max() < TOLERANCE


def exchanged_bytes(case: Case, flats: Sequence[tuple[int, tuple[int, ...]]]) -> dict[str, int]:
    """Bytes of one exchange by tier, by hand: an all-reduce outside of islands, and a gather among replicas inside."""
    names = ["device", "package", "node"]
    total = dict.fromkeys(names[1:], 0)
    for padded, degrees in flats:
        part = padded * 8
        for tier, degree in zip(names[1:], degrees, strict=True):
            part //= degree
            if names.index(tier) > names.index(case.plan.island or "node"):
                total[tier] += 2 * (degree - 1) * part
            elif names.index(tier) > names.index(case.plan.optimizer):
                total[tier] += (degree - 1) * part
    return {tier: size for tier, size in total.items() if size}


@pytest.mark.parametrize("name", CASES)
def test_three_local_steps_of_adamw_and_an_average_equal_plain_torch(pool: LocalPool, name: str) -> None:
    case, cluster = CASES[name], cluster_of(2, 2)
    outcomes = pool.run(cluster.world_size, trained, cluster, case, 3, 2, False, timeout_s=120.0)
    rows = rows_by_island(case, 4 if case.plan.island == "device" else 2)
    figures, parameters = reference(case, rows, 3, 6, make_adamw)
    check(outcomes, figures, parameters)
    # Islands learn from rows of their own, and an average at other steps gives other parameters.
    assert figures[0] != figures[1]
    assert reference(case, rows, 2, 6, make_adamw)[1].sub(parameters).abs().max() > 1e-6
    for found in outcomes:
        of_outer = {
            tier: size for (message, tier), size in found.sent_bytes.items() if message is MessageClass.OUTER and size
        }
        # A step's share of an exchange; nothing else leaves the island.
        expected = exchanged_bytes(case, found.flats)
        assert of_outer == {tier: size // 3 for tier, size in expected.items()}
        left = {message for (message, tier), size in found.sent_bytes.items() if tier == "node" and size}
        assert left == {MessageClass.OUTER}
        held = found.memory_bytes
        assert held == {key: size for key, size in found.period_bytes.items() if key in held}
        assert sum(held.values()) == sum(found.period_bytes.values())
        assert found.memory_bytes["outer"] > 0


@pytest.mark.parametrize("name", ["replicated", "optimizer sharded", "all sharded"])
def test_one_local_step_of_sgd_and_an_average_is_data_parallel(pool: LocalPool, name: str) -> None:
    unclipped = OptimizerConfig(clip=0.0)
    case, cluster = replace(CASES[name], rows=WholeRows(), optimizer=unclipped), cluster_of(2, 2)
    outcomes = pool.run(cluster.world_size, trained, cluster, case, 1, 4, True, timeout_s=120.0)
    # One model on all rows: plain data parallel.
    _, parameters = reference(case, [range(8)], 1, 4, sgd)
    for found in outcomes:
        assert found.parameters.sub(parameters).abs().max() < TOLERANCE


def test_three_local_steps_of_sgd_equal_plain_torch(pool: LocalPool) -> None:
    case, cluster = replace(CASES["all sharded"], optimizer=OptimizerConfig(clip=0.0)), cluster_of(2, 2)
    outcomes = pool.run(cluster.world_size, trained, cluster, case, 3, 2, True, timeout_s=120.0)
    check(outcomes, *reference(case, rows_by_island(case, 2), 3, 6, sgd))


@pytest.mark.parametrize("fault", FAULTS)
def test_an_exchange_that_goes_wrong_is_seen(pool: LocalPool, fault: str) -> None:
    case, cluster = replace(CASES["optimizer sharded"], sabotage=fault), cluster_of(2, 2)
    outcomes = pool.run(cluster.world_size, trained, cluster, case, 3, 2, False, timeout_s=120.0)
    figures, parameters = reference(case, rows_by_island(case, 2), 3, 6, make_adamw)
    with pytest.raises(AssertionError):
        check(outcomes, figures, parameters)


def evaluated(world: World, cluster: Cluster, case: Case) -> tuple[list[float], list[float], bool, str]:
    """(Losses of evaluations, of the steps that follow on the same batches, whether bytes agree, errors)."""
    engine = engine_of(world, cluster, case)
    steps = tuple(engine.stage_programs())
    forwards, outer = tuple(forward_programs(steps)), tuple(map(outer_program, steps))
    period = Period((Turn(forwards), Turn(steps, 2), Turn(outer), Turn(forwards), Turn(steps), Turn(outer)))
    batches = [case.batches(engine, case, step) for step in (0, 0, 1, 2, 2)]
    errors = ""
    for call in (
        lambda: engine.step(batches[0], ADAMW.lr),
        lambda: engine.run_period(Period((Turn(steps, 3), Turn(forwards))), batches, ADAMW.lr),
    ):
        try:
            call()
        except ProgramError as error:
            errors += str(error)
    results = engine.run_period(period, batches, ADAMW.lr)
    engine.check_bytes()
    # Evaluations are no part of a mean step.
    sent = engine.report({}).sent_bytes
    of_stage = engine.program.stage.index
    total = {
        key: 3 * steps[of_stage].sent_bytes.get(key, 0) + 2 * outer[of_stage].sent_bytes.get(key, 0) for key in sent
    }
    engine.close()
    losses = [result.loss for result in results]
    return [losses[0], losses[3]], [losses[1], losses[4]], sent == {key: total[key] // 3 for key in sent}, errors


@pytest.mark.parametrize("name", ["all sharded", "pipeline inside"])
def test_evaluations_take_turns_with_steps_and_exchanges(pool: LocalPool, name: str) -> None:
    case, cluster = CASES[name], cluster_of(2, 2)
    for before, losses, equal, errors in pool.run(cluster.world_size, evaluated, cluster, case, timeout_s=120.0):
        assert before == pytest.approx(losses, rel=TOLERANCE)
        assert equal
        assert "drift apart: run a period" in errors
        assert "never exchange their changes" in errors

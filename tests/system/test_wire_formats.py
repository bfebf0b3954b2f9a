"""Block formats through the whole runtime: replicas, bytes, bounds, error feedback, inf and nan, the measured error."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
from torch import nn

from terrace.base.errors import TrainingError
from terrace.cluster.cluster import Cluster
from terrace.comm.collectives import Collectives
from terrace.comm.groups import TierGroups
from terrace.comm.ledger import Ledger, Meter
from terrace.comm.rounding import Origin
from terrace.launch.start import LocalPool, World
from terrace.plan.plan import Plan
from terrace.plan.presets import preset
from terrace.plan.validate import validate
from terrace.plan.wire import MessageClass
from terrace.program.resolve import flat_transfer
from terrace.runtime.batch import Batch
from terrace.runtime.engine import Engine
from terrace.runtime.finite import NonFiniteError
from terrace.runtime.setup import Blocks, RankSetup, Workload
from tests.support.nightly import nightly
from tests.support.parity import Case, Outcome, deviation, reference, run
from tests.support.toys import MODELS, cluster_of, make_batch, with_wires

Sizes = tuple[int, ...]

# Largest deviation of a loss near 2.5 from the exact one within two steps, by format of every message.
LOSS_BOUND = {"int8": 0.02, "int8:16": 0.02, "fp8:32": 0.05, "int4:16": 0.15, "int4": 0.4}

pytestmark = pytest.mark.timeout(360)


def rounded(name: str, sizes: Sizes, wire: str) -> Plan:
    """A preset whose every message travels in this format."""
    cluster = cluster_of(*sizes)
    return with_wires(cluster, preset(name, cluster), wire)


def num_distinct(outcomes: list[Outcome]) -> int:
    return len({outcome.parameters.numpy().tobytes() for outcome in outcomes})


# Every format crosses every kind of message: those of three levels are five, on four ranks over one tier each.
WORLDS = [
    ("three-level", (2, 1, 2), ("fp8:32", "int4:16")),
    ("ddp", (3,), ("int8", "fp8:32")),
    *nightly(
        ("three-level", (2, 1, 2), ("int8", "int8:16")),
        ("three-level", (2, 2, 2), ("int4",)),
        ("zero++", (1, 4), ("int8:16", "int4:16")),
        ("zero1", (2, 2, 2), ("int8",)),
        ("three-level", (2, 2, 2), ("int8", "int8:16", "fp8:32", "int4:16")),
        ("zero++", (2, 2, 2), ("int8", "int4")),
        ("zero3", (2, 2, 2), ("fp8:32", "int4:16")),
        ("hsdp", (2, 2, 2), ("int8:16",)),
        ("ddp", (2, 2, 2), ("int4:16",)),
        ("three-level", (3, 2), ("int8", "int4")),
        ("three-level", (2, 3), ("int8:16", "fp8:32")),
    ),
]


@pytest.mark.parametrize(("name", "sizes", "wires"), WORLDS)
def test_replicas_are_identical_and_close_in_every_format(
    pool: LocalPool, name: str, sizes: Sizes, wires: tuple[str, ...]
) -> None:
    """The first format of a world also adds up two micro-batches."""
    cases = [Case(rounded(name, sizes, wire), num_micros=2 if wire == wires[0] else 1) for wire in wires]
    for wire, case, outcomes in zip(wires, cases, run(pool, cluster_of(*sizes), cases), strict=True):
        assert num_distinct(outcomes) == 1, wire
        assert not any(outcome.complaint for outcome in outcomes), outcomes[0].complaint
        found = deviation(outcomes, reference(cluster_of(*sizes), case))
        assert 0 < found["loss"] < LOSS_BOUND[wire], (wire, found)


@pytest.mark.parametrize("name", ["three-level", *nightly("ddp", "zero3")])
def test_comparison_sees_a_rank_that_keeps_its_own_part_unrounded(pool: LocalPool, name: str) -> None:
    plan = rounded(name, (2, 1, 2), "int8")
    (outcomes,) = run(pool, cluster_of(2, 1, 2), [Case(plan, sabotage="unrounded_own_part")])
    assert num_distinct(outcomes) > 1


@pytest.mark.parametrize("name", ["three-level-compressed", *nightly("zero++")])
@pytest.mark.parametrize("sizes", [(2, 3), *nightly(((2, 2, 2),), ((1, 2, 3),))], ids=str)
def test_compressed_presets_train_in_bf16_on_odd_worlds(pool: LocalPool, name: str, sizes: Sizes) -> None:
    plan = replace(preset(name, cluster_of(*sizes)), compute="bf16")
    case = Case(plan, num_micros=2, model="llama tied")
    (outcomes,) = run(pool, cluster_of(*sizes), [case])
    assert num_distinct(outcomes) == 1
    assert not outcomes[0].complaint
    assert deviation(outcomes, reference(cluster_of(*sizes), case))["loss"] < 0.1


NUM_ROUNDS = 40


def repeated(world: World, cluster: Cluster, wires: Sequence[str]) -> list[float]:
    """Sum the same gradient again and again; the error of the mean result, relative to one result's step."""
    errors = []
    for wire in wires:
        plan = replace(preset("hsdp", cluster), wire={"sync": {"system": wire}})
        layout = validate(cluster, plan, [])
        transfer = flat_transfer(MessageClass.SYNC, 1, layout, plan, 640)
        groups = TierGroups([transfer], world.rank, timedelta(seconds=30))
        collectives = Collectives(groups, layout, plan, Ledger(), Meter(), torch.device("cpu"))
        origin = Origin("block", torch.device("cpu"), Meter())
        gradient = torch.randn(640, generator=torch.Generator().manual_seed(world.rank))
        exact = sum(torch.randn(640, generator=torch.Generator().manual_seed(rank)) for rank in range(4))
        assert isinstance(exact, torch.Tensor)
        total = torch.zeros(640 // 4)
        for _ in range(NUM_ROUNDS):
            total += collectives.reduce(transfer, gradient, origin)
        part = layout.slice(1, cluster.coordinates(world.rank), 640)
        errors.append(float((total / NUM_ROUNDS - exact[part]).abs().max()))
    return errors


def test_error_feedback_makes_the_mean_exact(pool: LocalPool) -> None:
    cluster = cluster_of(4, 1)
    cluster = replace(cluster, tiers=(replace(cluster.tiers[1], name="node", size=1), cluster.tiers[0]))
    cluster = replace(cluster, tiers=(cluster.tiers[0], replace(cluster.tiers[1], name="system")))
    step = 3.5 / 7  # an int4 step of a block whose largest element is about 3.5
    for plain, fed_back in pool.run(4, repeated, cluster, ["int4", "int4+feedback"], timeout_s=200.0):
        assert plain > step / 8, "without feedback the same error comes every time"
        assert fed_back < 6 * step / NUM_ROUNDS


def errors_of(world: World, cluster: Cluster, plan: Plan, spoil: int) -> list[dict[str, float]] | str:
    """The measured rounding error of three steps, or the engine's error when rank `spoil` holds an inf."""
    model = MODELS["toy"]
    engine = Engine(
        Blocks(model.blocks(torch.float32), names=["embedding", "layers.0", "layers.1", "layers.2", "head"]),
        Workload(cluster=cluster, plan=plan, num_micros=1),
        model.objective if world.rank != spoil else lambda output, labels: (output * float("inf")).sum(),
        setup=RankSetup(rank=world.rank),
    )
    try:
        found = []
        for step in range(3):
            tokens, labels = make_batch(step, world.world_size)
            row = slice(world.rank, world.rank + 1)
            found.append(engine.step([Batch(tokens[row], labels[row])], 1e-3).quantisation_error)
        return found
    except TrainingError as error:
        return str(error)
    finally:
        if spoil < 0:
            engine.close()


def test_measured_error_is_there_for_block_formats_and_nothing_else(pool: LocalPool) -> None:
    cluster = cluster_of(2, 2)
    plan = preset("three-level", cluster)
    assert pool.run(4, errors_of, cluster, plan, -1) == [[{}, {}, {}]] * 4
    plan = replace(plan, wire={"reduce": {"node": "int4:32"}, "refresh": {"node": "int8"}})
    everyone = pool.run(4, errors_of, cluster, plan, -1)
    assert all(found == everyone[0] for found in everyone), "every rank knows the same figure"
    for found in everyone[0]:
        # Rounding to steps of size 2/(2q+1) of the largest element, uniform inside: far below, never zero.
        assert 0.02 < found["reduce"] < 0.2
        assert 0.001 < found["refresh"] < 0.02


def test_error_shrinks_as_the_format_widens(pool: LocalPool) -> None:
    cluster = cluster_of(2)
    found = []
    for wire in ("int4:128", "fp8:16", "int8:128"):
        plan = replace(preset("zero2", cluster), wire={"reduce": {"package": wire}})
        found.append(pool.run(2, errors_of, cluster, plan, -1)[0][1]["reduce"])
    assert found == sorted(found, reverse=True)


def test_inf_in_a_gradient_that_travels_in_a_block_format_names_rank_and_block(pool: LocalPool) -> None:
    cluster = cluster_of(2)
    plan = replace(preset("zero2", cluster), wire={"reduce": {"package": "int8"}})
    with pytest.raises(TrainingError, match=r"the loss of block 'head' is not finite, on rank 1 in micro-batch 0"):
        pool.run(2, errors_of_or_raise, cluster, plan, 1)


def errors_of_or_raise(world: World, cluster: Cluster, plan: Plan, spoil: int) -> None:
    said = errors_of(world, cluster, plan, spoil)
    if isinstance(said, str):
        raise TrainingError(said)


@pytest.mark.parametrize("how", ["loss", "gradient"])
def test_what_is_not_finite_without_block_formats_is_raised_with_its_figures(how: str) -> None:
    """Rank 0 alone: the error has the loss and the norm as they are, and the token count stays a number."""
    model, cluster = MODELS["toy"], cluster_of(1)

    def objective(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        total = model.objective(output, labels)
        return total * float("inf") if how == "loss" else total + (output - output.detach()).sum() * 1e39

    engine = Engine(
        Blocks(model.blocks(torch.float32)),
        Workload(cluster=cluster, plan=preset("ddp", cluster), num_micros=1),
        objective,
    )
    tokens, labels = make_batch(0, 1)
    with pytest.raises(NonFiniteError, match=r"on rank 0 in micro-batch 0; nothing was updated") as caught:
        engine.step([Batch(tokens, labels)], 1e-3)
    engine.close()
    result = caught.value.result
    assert result is not None
    assert result.num_tokens == int((labels != -100).sum())
    assert not (abs(result.loss) < float("inf") and abs(result.grad_norm) < float("inf"))


def test_later_forwards_of_zero_plus_plus_read_what_the_first_one_read() -> None:
    cluster = cluster_of(2, 2, 2)
    plan = preset("zero++", cluster)
    assert plan.wire["gather"] == {"system": "int8"}, "the copy on the node is rounded already"
    assert "gather_backward" not in plan.wire
    flat = preset("zero++", cluster_of(4))
    assert flat.wire["gather"] == flat.wire["gather_backward"] == {"package": "int8"}


def test_a_module_of_one_element_travels(pool: LocalPool) -> None:
    for said in pool.run(3, one_element, cluster_of(3)):
        assert said == pytest.approx(3.0, rel=1e-2)


def one_element(world: World, cluster: Cluster) -> float:
    """The gradient norm of a model of one parameter under int4, which is its own largest element: exact."""

    class Scalar(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight * x

    plan = replace(preset("zero2", cluster), wire={"reduce": {"package": "int4"}, "refresh": {"package": "int8"}})
    engine = Engine(
        Blocks([Scalar()]),
        Workload(cluster=cluster, plan=plan, num_micros=1),
        lambda output, labels: output.sum() * 3.0,
        setup=RankSetup(rank=world.rank),
    )
    result = engine.step([Batch(torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int64))], 1e-3)
    engine.check_bytes()
    engine.close()
    return result.grad_norm

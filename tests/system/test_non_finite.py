"""A step with inf or nan: an error on every rank that names rank, micro-batch and block, and nothing updated."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import terrace
from terrace.base.errors import TrainingError
from terrace.checkpoint.parts import parts_of, slices_of
from terrace.cluster.cluster import Cluster
from terrace.launch.start import LocalPool, World
from terrace.plan.outer import Outer
from terrace.plan.presets import preset
from terrace.runtime.engine import Engine
from terrace.runtime.finite import NonFiniteError
from terrace.runtime.settings import OptimizerConfig
from tests.support.nightly import nightly
from tests.support.parity import Case, engine_of, exact
from tests.support.pipelines import OUTER, pipelined
from tests.support.toys import cluster_of

pytestmark = pytest.mark.timeout(360)

MUON = OptimizerConfig(name="muon", lr=3e-3)


@dataclass(frozen=True)
class Spoiled:
    """A case, and where one of its steps goes wrong: in the forward, or in the backward alone."""

    case: Case
    rank: int
    micro: int
    block: int
    backward: bool = False


def spoil(engine: Engine, spoiled: Spoiled) -> Callable[[], None]:
    """Make a block's output nan, or its gradient inf, on one rank and micro-batch; returns its undoing."""
    module = engine.state.modules.get(spoiled.block)
    if engine.rank != spoiled.rank or module is None:
        return lambda: None

    def wrong(_: nn.Module, __: object, output: Tensor) -> Tensor | None:
        messages = engine.runner.messages
        if messages.now.micro != spoiled.micro:
            return None
        if not spoiled.backward:
            return output * float("nan")
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * float("inf"))  # type: ignore[no-untyped-call]
        return None

    return module.register_forward_hook(wrong).remove


def state_of(engine: Engine) -> list[Tensor]:
    """All that a rank keeps from step to step."""
    engine.drain()
    kept = [
        value
        for _, part in parts_of(engine.state, slices_of(engine.program.mesh, engine.rank))
        for value in part.values.values()
    ]
    for origin in engine.state.edges.values():
        kept += origin.residuals.values()
    for flat in engine.state:
        kept += [flat.shard, *([flat.secondary] if flat.secondary is not None else [])]
        kept += flat.origin.residuals.values()
        if flat.spec.trainable:
            kept.append(torch.tensor(flat.optimizer.num_steps))
    return [value.clone() for value in kept]


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def goes_on(world: World, cluster: Cluster, cases: Sequence[Spoiled]) -> list[str]:
    """The error of every case, on this rank."""
    said = []
    for spoiled in cases:
        case = spoiled.case
        straight = engine_of(world, cluster, case)
        wanted = [straight.step(case.batches(straight, case, step), 3e-3) for step in range(4)]
        at_the_end = state_of(straight)
        straight.close()
        engine = engine_of(world, cluster, case)
        found = [engine.step(case.batches(engine, case, step), 3e-3) for step in range(2)]
        before, mend = state_of(engine), spoil(engine, spoiled)
        with pytest.raises(NonFiniteError) as caught:
            engine.step(case.batches(engine, case, 2), 3e-3)
        said.append(str(caught.value))
        assert same(before, state_of(engine)), "nothing was updated"
        mend()
        found += [engine.step(case.batches(engine, case, step), 3e-3) for step in (2, 3)]
        assert [(each.loss, each.grad_norm) for each in found] == [(each.loss, each.grad_norm) for each in wanted]
        assert same(at_the_end, state_of(engine)), "as if the step had never been"
        engine.check_bytes()
        engine.close()
    return said


CLUSTER = cluster_of(2, 2)
FED_BACK = replace(
    replace(preset("three-level", CLUSTER), grads="package"),
    wire={"reduce": {"package": "int8:16+feedback"}, "sync": {"node": "int4:16+feedback"}},
)
PIPELINED = replace(pipelined("zero1", OUTER, "1f1b"), wire={"pipeline_backward": {"node": "int4:16+feedback"}})
CASES = {
    "ddp": Spoiled(Case(exact("ddp", CLUSTER), num_micros=2), 3, 1, 2),
    "feedback": Spoiled(Case(FED_BACK, num_micros=2), 1, 1, 3),
    "feedback, backward": Spoiled(Case(FED_BACK, num_micros=2), 2, 1, 2, backward=True),
    "recomputed": Spoiled(Case(exact("zero3", CLUSTER, recompute=("*",)), num_micros=2), 2, 0, 1, backward=True),
    "muon, chunked head": Spoiled(
        Case(exact("zero1", CLUSTER), num_micros=2, model="llama tied", optimizer=MUON), 0, 1, 1
    ),
    "pipeline": Spoiled(Case(PIPELINED, num_micros=3, model="deep llama tied"), 2, 1, 4),
    "zero bubble": Spoiled(
        Case(pipelined("zero3", OUTER, "zb-h1"), num_micros=3, model="deep llama tied"), 0, 2, 1, True
    ),
    "tensor": Spoiled(
        Case(exact("zero1", CLUSTER, mapping={"package": {"tensor": 2}}), num_micros=2, model="deep llama tied"),
        3,
        0,
        2,
    ),
    "context": Spoiled(
        Case(
            exact("zero1", CLUSTER, mapping={"package": {"context": {"ring": 2}}}),
            num_micros=2,
            model="deep llama tied",
        ),
        1,
        1,
        2,
    ),
}


OFTEN = ("pipeline",)


@pytest.mark.parametrize("names", [OFTEN, *nightly((tuple(name for name in CASES if name not in OFTEN),))], ids=len)
def test_every_rank_says_where_it_began_and_goes_on_as_if_it_had_not_been(
    pool: LocalPool, names: tuple[str, ...]
) -> None:
    cases = {name: CASES[name] for name in names}
    by_rank = pool.run(4, goes_on, CLUSTER, list(cases.values()), timeout_s=300.0)
    for (name, spoiled), *said in zip(cases.items(), *by_rank, strict=True):
        assert len(set(said)) == 1, (name, said)
        place = f"on rank {spoiled.rank} in micro-batch {spoiled.micro}; nothing was updated"
        assert place in said[0], (name, said[0])
        assert "\n" not in said[0]
        wrong = "parameter" if spoiled.backward else f"the output of block 'block.{spoiled.block}' is not finite"
        assert wrong in said[0], (name, said[0])


def islands_agree(world: World) -> str:
    """A step of the second island is not finite: its ranks say so, and the first has nothing to do with it."""
    outer = Outer(tier="node", every=2)
    plan = replace(exact("ddp", CLUSTER), outer=outer, params="package", grads="package", optimizer="package")
    case = Case(plan)
    engine = engine_of(world, CLUSTER, case)
    spoil(engine, Spoiled(case, 3, 0, 2))
    said = ""
    try:
        engine.step(case.batches(engine, case, 0), 3e-3)
    except NonFiniteError as error:
        said = str(error)
    engine.close()
    return said


def test_an_island_alone_gives_its_step_up(pool: LocalPool) -> None:
    first, second, *others = pool.run(4, islands_agree)
    assert first == second == ""
    assert len(set(others)) == 1
    assert "block 'block.2' is not finite, on rank 3 in micro-batch 0" in others[0]
    assert "gradient norm nan on island 1: " in others[0]


def trainer_of(loss: nn.Module | Callable[[Tensor, Tensor], Tensor], said: list[str]) -> "terrace.Trainer":
    torch.manual_seed(1)
    blocks = [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5)]
    return terrace.Trainer(
        [block.double() for block in blocks],
        plan="ddp",
        loss=loss,
        lr=0.1,
        cluster=cluster_of(1),
        predict=False,
        say=said.append,
    )


LABELS = torch.tensor([0, 3, 0, 2])
INPUTS = torch.randn(4, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def test_a_trainer_refuses_inf_in_its_batch_and_then_trains_on() -> None:
    with trainer_of(nn.CrossEntropyLoss(reduction="sum"), []) as trainer:
        before = trainer.state_dict()
        bad = INPUTS.clone()
        bad[2, 1] = float("inf")
        with pytest.raises(
            TrainingError, match=r"the input of block 'block.0' is not finite, on rank 0 in micro-batch 0"
        ):
            trainer.step(bad, LABELS)
        assert trainer.num_steps == 0
        assert same(list(before.values()), list(trainer.state_dict().values()))
        assert trainer.step(INPUTS, LABELS).num_tokens == 4
        assert trainer.num_steps == 1


def test_a_norm_that_overflows_alone_is_said_to() -> None:
    torch.manual_seed(1)
    with terrace.Trainer(
        [nn.Linear(3, 4), nn.Linear(4, 5)],
        plan="ddp",
        loss=lambda output, labels: (1e25 * output).sum(),
        lr=0.1,
        cluster=cluster_of(1),
        predict=False,
    ) as trainer:
        with pytest.raises(TrainingError, match=r"gradient norm inf: all that blocks compute is finite, but the norm"):
            trainer.step(INPUTS.float(), LABELS)
        with pytest.raises(TrainingError, match=r"gradient norm inf"):  # again, bytes still agree
            trainer.step(INPUTS.float(), LABELS)
        trainer.engine.check_bytes()


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(reduction="sum", ignore_index=0),
        partial(F.cross_entropy, reduction="sum", ignore_index=0),
    ],
)
def test_the_ignored_label_of_a_loss_does_not_count(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    said: list[str] = []
    with trainer_of(loss, said) as trainer:
        result = trainer.step(INPUTS, LABELS)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5))
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5)).double()
        assert result.loss == pytest.approx(F.cross_entropy(model(INPUTS), LABELS, ignore_index=0).item(), rel=1e-12)
        assert result.num_tokens == 2
        assert not said
        nothing = trainer.step(INPUTS, torch.zeros(4, dtype=torch.int64))
        assert (nothing.num_tokens, nothing.loss) == (0, 0.0)
        assert said == ["step 2 has no label that counts: all are 0, and its gradient is zero"]

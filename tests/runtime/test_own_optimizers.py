"""A user's torch optimizer: the numbers of the class itself under any plan, equal bits after a resume, refusals."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from terrace.base.errors import CheckpointError, ConfigError, PlanError
from terrace.checkpoint.reading import Checkpoint, resume
from terrace.checkpoint.writing import save
from terrace.launch.start import LocalPool, World
from terrace.plan.keep import Keep
from terrace.plan.update import parse_update
from terrace.program.lowering import build
from terrace.runtime.own_rule import check_own, own_config
from terrace.runtime.settings import OptimizerConfig
from terrace.train.joining import read_optimizer
from tests.support.checkpoints import contents, make, train
from tests.support.optimizer_reference import NUM_STEPS, serial
from tests.support.parity import TOLERANCE, Case, case_words, deviation, exact, num_rows, run
from tests.support.pipelines import OUTER, pipelined
from tests.support.toys import MODELS, cluster_of

ALONE = World(0, 1, 0, 1, None)  # type: ignore[arg-type]  # no store: nobody to meet
Sizes = tuple[int, ...]

# A number of a parameter that is no count of steps, a state that begins above zero, and none at all.
NADAM = OptimizerConfig(
    name="torch.optim:NAdam",
    lr=3e-3,
    arguments={"weight_decay": 0.1, "decoupled_weight_decay": True},
    states=("exp_avg", "exp_avg_sq", "mu_product"),
)
ADAGRAD = OptimizerConfig(
    name="torch.optim:Adagrad", lr=3e-3, arguments={"initial_accumulator_value": 0.1}, states=("sum",)
)
SGD = OptimizerConfig(name="torch.optim:SGD", lr=3e-2)

CASES: list[tuple[Sizes, Case]] = [
    ((2, 2), Case(exact("zero3", cluster_of(2, 2)), num_micros=2, model="llama tied", optimizer=NADAM)),
    ((2, 2), Case(pipelined("zero1", OUTER, "1f1b"), num_micros=2, model="llama tied", optimizer=ADAGRAD)),
]
MORE: list[tuple[Sizes, Case]] = [
    (
        (2, 2),
        Case(
            exact("zero1", cluster_of(2, 2), mapping={"package": {"tensor": 2}}),
            model="wide llama, 1 kv head",
            optimizer=NADAM,
        ),
    ),
    ((2, 2), Case(exact("three-level", cluster_of(2, 2)), model="stacks", optimizer=SGD)),
]


@pytest.mark.parametrize(
    "row", [*CASES, *(pytest.param(row, marks=pytest.mark.nightly) for row in MORE)], ids=case_words
)
def test_every_plan_equals_the_class_in_one_process(pool: LocalPool, row: tuple[Sizes, Case]) -> None:
    sizes, case = row
    cluster, case = cluster_of(*sizes), replace(case, num_steps=NUM_STEPS)
    (outcomes,) = run(pool, cluster, [case])
    found = deviation(outcomes, serial(case.model, num_rows(cluster, case), case.optimizer))
    assert max(found.values()) < TOLERANCE, found
    assert not any(outcome.complaint for outcome in outcomes), outcomes[0].complaint


def continue_here(world: World, folder: Path) -> tuple[list[float], list[float], bool]:
    """Losses of six steps, with a save after three; of the last three after a resume; whether all bits are equal."""
    straight = make(world, (2, 2), "three-level", optimizer=NADAM)
    losses = train(straight, 0, 3)
    saved = save(straight, folder, 3, {}, keep=1)
    losses += train(straight, 3, 6)
    other = make(world, (2, 2), "three-level", scale=2.0, optimizer=NADAM)
    resume(other, Checkpoint(saved))
    again, flats = train(other, 3, 6), zip(straight.state, other.state, strict=True)
    return losses, again, all(torch.equal(one.optimizer.master, two.optimizer.master) for one, two in flats)


def test_a_resume_has_the_same_bits_and_any_plan_reads_the_states(pool: LocalPool, tmp_path: Path) -> None:
    for losses, again, is_equal in pool.run(4, continue_here, tmp_path):
        assert (again, is_equal) == (losses[3:], True)
    checkpoint = Checkpoint(tmp_path / "checkpoints" / "step-00000003")
    assert {name.rpartition("/")[2] for name in contents(checkpoint.folder)} == {"master", "frozen", *NADAM.states}
    alone = make(ALONE, (1,), "ddp", scale=2.0, optimizer=NADAM)
    resume(alone, checkpoint)
    assert train(alone, 3, 6) == pytest.approx(losses[3:], abs=1e-10, rel=0)
    with pytest.raises(CheckpointError, match="use the model, optimizer and"):
        resume(make(ALONE, (1,), "ddp", optimizer=SGD), checkpoint)


class Own(Optimizer):
    """Base of classes that cannot be sharded."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        self.num_steps += 1
        for group in self.param_groups:
            for param in group["params"]:
                assert param.grad is not None
                self.update(param, param.grad, group, self.state[param])

    def update(self, param: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        raise NotImplementedError


class TrustRatio(Own):
    def update(self, param: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        param.sub_(gradient * param.norm(), alpha=group["lr"])


class RareNorm(Own):
    """Clips each parameter's gradient, which most gradients are too small for."""

    def update(self, param: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        param.sub_(gradient * min(1.0, 20.0 / (float(gradient.norm()) + 1e-6)), alpha=group["lr"])


class Attribute(Own):
    """Decays its rate by a counter that no state has."""

    def update(self, param: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        param.sub_(gradient, alpha=group["lr"] / self.num_steps)


class InGroups(Own):
    def update(self, param: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        group["seen"] = group.get("seen", 0) + 1


class Late(Own):
    def update(self, param: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        state["step"] = state.get("step", 0) + 1
        if state["step"] == 3:
            state["late"] = torch.zeros_like(param)


class Master(Own):
    def update(self, param: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        state["master"] = torch.zeros_like(param)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (TrustRatio, "is not element by element: a small matrix and a vector that it updates in pieces differ by"),
        (RareNorm, "is not element by element"),
        (Attribute, "is not element by element"),
        (InGroups, "changes its groups of parameters in a step"),
        (Late, "has other states in later steps than in its first"),
        (Master, "its state 'master' needs another name"),
        (torch.optim.Adafactor, r"its state 'row_var' of a parameter of shape \(4, 6\) is torch.float64 of shape"),
        (torch.optim.LBFGS, "a step on small tensors raised ValueError: LBFGS doesn't support per-parameter"),
        (partial(torch.optim.SGD, nesterov=True), "a step on small tensors raised ValueError: Nesterov momentum"),
        (partial(torch.optim.SGD, lr=1.0), "optimizer.arguments has an lr: write optimizer.lr"),
        (torch.optim.SGD([nn.Parameter(torch.ones(1))]), "optimizer must be a name, .*, not SGD: the states of"),
        (nn.Linear, "optimizer must be a name"),
    ],
)
def test_what_no_rank_could_update_alone_is_refused(kind: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_optimizer(kind, 1e-3)


def test_the_states_are_found_by_trying_and_those_of_a_file_are_compared() -> None:
    for config in (NADAM, ADAGRAD, SGD):
        kind = getattr(torch.optim, config.name.partition(":")[2])
        assert own_config(partial(kind, **config.arguments), 1e-3).states == config.states
        check_own(config)
        assert parse_update(config.update).states == config.states
    with pytest.raises(
        ConfigError, match=r"and torch.optim:NAdam has .*: write states = \[\"exp_avg\", \"exp_avg_sq\""
    ):
        check_own(replace(NADAM, states=()))
    with pytest.raises(ConfigError, match="cannot be imported: ModuleNotFoundError"):
        check_own(OptimizerConfig(name="not_there:Sign"))
    with pytest.raises(ConfigError, match=r"weight_decay = 0.5 has no effect .* or write it into optimizer.arguments"):
        replace(NADAM, weight_decay=0.5)


def test_narrow_states_and_states_below_the_device_are_refused() -> None:
    plan = exact("zero1", cluster_of(2), update=NADAM.update)
    with pytest.raises(
        PlanError, match=r"optimizer_states = 'int8' rounds the states of 'own:torch\.optim\.NAdam:exp_avg"
    ):
        build(cluster_of(2), replace(plan, optimizer_states="int8"), MODELS["llama tied"].declared, 1)
    with pytest.raises(PlanError, match=r"keep.optimizer = 'disk' with optimizer 'own:torch\.optim\.NAdam"):
        build(cluster_of(2), replace(plan, keep=Keep(optimizer="disk")), MODELS["llama tied"].declared, 1)

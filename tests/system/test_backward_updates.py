"""Updates on the host's cores in the backward, each behind the SYNC of its block: no bit changes without clipping."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from terrace.base.errors import PlanError
from terrace.launch.start import LocalPool, World
from terrace.plan.keep import Keep
from terrace.plan.presets import preset
from terrace.runtime.finite import NonFiniteError
from terrace.runtime.settings import OptimizerConfig
from tests.support.kept import check_same_bits
from tests.support.nightly import in_turns, nightly
from tests.support.parity import Case, check, engine_of, exact
from tests.support.toys import cluster_of

CLUSTER = cluster_of(2, 2)
BACKWARD = Keep(optimizer="disk", update="host", order="backward", piece=128, ring=3)
NO_CLIP = OptimizerConfig(lr=3e-3, clip=0.0)


@pytest.mark.parametrize(
    ("placement", "model", "changes", "keep"),
    in_turns(
        17,
        ("ddp", "zero1", "zero3", "three-level"),
        ("llama tied", "llama, frozen layer"),
        ({}, {"unit": 2}, {"compute": "bf16"}, {"recompute": ("*",)}),
        (BACKWARD, replace(BACKWARD, params="disk")),
    ),
)
def test_updates_in_the_backward_change_no_bit(
    pool: LocalPool, placement: str, model: str, changes: dict[str, Any], keep: Keep
) -> None:
    plan = replace(preset(placement, CLUSTER), **changes)
    check_same_bits(pool, CLUSTER, Case(plan, num_steps=3, model=model, optimizer=NO_CLIP, num_micros=2), keep)


AXES: list[Any] = [
    {"mapping": {"package": {"tensor": 2}}},
    *nightly({"mapping": {"node": {"context": {"ring": 2}}}}, {"experts": {"node": {"expert": 2}}}),
]


@pytest.mark.parametrize("changes", AXES, ids=str)
def test_axes_equal_one_process(pool: LocalPool, changes: dict[str, Any]) -> None:
    model = "experts" if "experts" in changes else "llama tied"
    plan = exact("zero1", CLUSTER, keep=BACKWARD, **changes)
    check(pool, CLUSTER, [Case(plan, model=model, num_micros=2, optimizer=NO_CLIP)])


class InfWeight(torch.autograd.Function):
    """Passes a tensor on; the gradient of `weight` is inf, and no other is."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (weight,) = ctx.saved_tensors
        return gradient, torch.full_like(weight, torch.inf)


def inf_output(_: nn.Module, output: Tensor) -> Tensor:
    output.register_hook(lambda gradient: gradient * float("inf"))  # type: ignore[no-untyped-call]
    return output


def inf_weight(module: nn.Module, output: Tensor) -> Tensor:
    vector = next(each for each in module.parameters() if each.dim() == 1)
    return cast(Tensor, InfWeight.apply(output, vector))  # type: ignore[no-untyped-call]


def given_up(world: World, block: int, wrong: Callable[[nn.Module, Tensor], Tensor]) -> tuple[str, list[bool]]:
    """A step in which a gradient of a block is inf on rank 1: the error, and the blocks that changed."""
    cluster = cluster_of(2)
    plan = replace(preset("zero1", cluster), keep=BACKWARD)
    engine = engine_of(world, cluster, case := Case(plan, model="deep llama tied", optimizer=NO_CLIP))
    engine.step(case.batches(engine, case, 0), 1e-3)
    engine.drain()
    before = [flat.working.values.clone() for flat in engine.state]

    def after(module: nn.Module, _: object, output: Tensor) -> Tensor:
        return wrong(module, output) if world.rank == 1 and output.requires_grad else output

    hook = engine.state.modules[block].register_forward_hook(after)
    error = ""
    try:
        engine.step(case.batches(engine, case, 1), 1e-3)
    except NonFiniteError as found:
        error = str(found)
    hook.remove()
    engine.drain()
    changed = [not torch.equal(flat.working.values, one) for flat, one in zip(engine.state, before, strict=True)]
    engine.step(case.batches(engine, case, 2), 1e-3)
    engine.drain()
    finite = all(bool(flat.working.values.isfinite().all()) for flat in engine.state)
    engine.check_bytes()
    engine.close()
    return error if finite else "parameters are not finite", changed


@pytest.mark.parametrize(("wrong", "left"), [(inf_output, range(4)), (inf_weight, [3])])
def test_a_block_whose_gradient_is_not_finite_on_one_rank_is_updated_on_none(
    pool: LocalPool, wrong: Callable[[nn.Module, Tensor], Tensor], left: Sequence[int]
) -> None:
    """Others are, on all ranks alike; the error names the block, and what to do. Steps may follow."""
    one, other = pool.run(2, given_up, 3, wrong, timeout_s=60.0)
    assert one == other
    error, changed = one
    assert "block.3" in error
    assert "; blocks whose gradients are finite were updated: resume from the last checkpoint" in error
    assert changed == [block not in left for block in range(len(changed))]


def clipped(world: World) -> str:
    plan = replace(preset("ddp", cluster_of(1)), keep=BACKWARD)
    with pytest.raises(PlanError) as found:
        engine_of(world, cluster_of(1), Case(plan, model="toy", optimizer=replace(NO_CLIP, clip=1.0)))
    return str(found.value)


def test_a_clipped_update_waits_for_the_whole_model(pool: LocalPool) -> None:
    ((words),) = pool.run(1, clipped, timeout_s=60.0)
    assert "keep.order = 'backward' with optimizer.clip = 1: a clipped update needs the norm" in words

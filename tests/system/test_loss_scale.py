"""fp16 with a scaled loss: the steps of plain PyTorch, skipped alike on all ranks, and resumed with the same bits."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from terrace.base.errors import PlanError
from terrace.checkpoint.parts import parts_of, slices_of
from terrace.checkpoint.reading import Checkpoint, resume
from terrace.checkpoint.writing import save
from terrace.cluster.cluster import Cluster
from terrace.launch.start import LocalPool, World
from terrace.plan.outer import Outer
from terrace.plan.plan import Plan
from terrace.plan.validate import validate
from terrace.runtime.engine import Engine
from terrace.runtime.finite import NonFiniteError
from terrace.runtime.loss_scale import FIRST, INTERVAL, LossScale
from terrace.train.metrics import read_metrics
from tests.support.parity import ADAMW, Case, engine_of, exact, make_adamw, trainable
from tests.support.pipelines import OUTER, pipelined
from tests.support.tiny_runs import terrace, write_run
from tests.support.toys import MODELS, cluster_of, count_tokens, make_batch, run_blocks

pytestmark = pytest.mark.timeout(240)
WORLD: Any = SimpleNamespace(rank=0, world_size=1)


def case(name: str, sizes: tuple[int, ...], model: str = "llama tied", micros: int = 2, **more: Any) -> Case:
    return half(exact(name, cluster_of(*sizes), **more), model, micros)


def half(plan: Plan, model: str, micros: int) -> Case:
    return Case(replace(plan, compute="fp16", master="fp32"), micros, model)


def scale_of(engine: Engine) -> LossScale:
    return engine.state.loss_scale


def state_of(engine: Engine) -> list[Tensor]:
    engine.drain()
    parts = parts_of(engine.state, slices_of(engine.program.mesh, engine.rank))
    return [value.clone() for _, part in parts for value in part.values.values()]


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) > 0 and all(map(torch.equal, one, other))


def test_the_rule() -> None:
    """Doubled after 2,000 finite steps in a row, halved by one that is not; too low a scale, or a loss, is an error."""
    scale = LossScale()
    for _ in range(INTERVAL - 1):
        scale.stepped()
    assert (scale.value, scale.finite) == (FIRST, INTERVAL - 1)
    assert scale.skips(2.5)
    assert scale == LossScale(FIRST / 2, 0, 1)
    for _ in range(INTERVAL):
        scale.stepped()
    assert scale == LossScale(FIRST, 0, 1)
    assert LossScale.parse(json.loads(json.dumps(scale.table))) == scale
    assert not scale.skips(float("nan"))
    assert scale == LossScale(FIRST, 0, 1)
    times = 0
    while scale.skips(2.5):
        times += 1
    assert (times, scale.value) == (34, 2.0**-24)
    for wrong in ({"value": 3.0}, {"value": 0.0}, {"value": float("inf")}, {"finite": -1}, {"finite": INTERVAL}):
        with pytest.raises(ValueError, match="loss_scale"):
            LossScale.parse(LossScale().table | wrong)


def reference(model_name: str, num_steps: int) -> tuple[list[float], list[float]]:
    """Losses and norms of plain PyTorch in fp16 over masters in fp32, the loss scaled and whole."""
    model = MODELS[model_name]
    blocks, masters = model.blocks(torch.float16), trainable(model.blocks(torch.float32))
    optimizer, losses, norms = make_adamw(masters), list[float](), list[float]()
    for step in range(num_steps):
        total, count = 0.0, 0
        for tokens, labels in zip(*(each.unsqueeze(1) for each in make_batch(step, 2)), strict=True):
            loss = model.objective(run_blocks(blocks, tokens), labels)
            torch.autograd.backward(loss * 2.0**10)
            total, count = total + float(loss.detach()), count + int(count_tokens(labels))
        for master, working in zip(masters, trainable(blocks), strict=True):
            assert working.grad is not None
            master.grad, working.grad = working.grad.float() / 2.0**10 / count, None
        norms.append(float(nn.utils.clip_grad_norm_(masters, ADAMW.clip)))
        optimizer.step()
        for master, working in zip(masters, trainable(blocks), strict=True):
            working.data.copy_(master.data)
        losses.append(total / count)
    return losses, norms


@pytest.mark.parametrize("model", ["gpt2", "toy", "llama tied"])
def test_steps_of_plain_pytorch(model: str) -> None:
    each = case("ddp", (1,), model)
    engine = engine_of(WORLD, cluster_of(1), each)
    found = [engine.step(each.batches(engine, each, step), ADAMW.lr) for step in range(3)]
    losses, norms = reference(model, 3)
    assert [one.loss for one in found] == pytest.approx(losses, rel=5e-3)
    assert [one.grad_norm for one in found] == pytest.approx(norms, rel=2e-2)
    assert found[0].grad_norm == pytest.approx(norms[0], rel=2e-3)
    assert [(one.loss_scale, one.skipped) for one in found] == [(FIRST, False)] * 3
    assert scale_of(engine).finite == 3
    engine.close()


@pytest.mark.parametrize("model", ["llama tied", "toy"])
def test_backwards_begin_with_the_scale(model: str) -> None:
    """A head in chunks and any loss: gradients that a scale makes too small for fp16 are zero."""
    each, norms = case("ddp", (1,), model), []
    for value in (FIRST, 2.0**6, 2.0**-22):
        engine = engine_of(WORLD, cluster_of(1), each)
        scale_of(engine).value = value
        norms.append(engine.step(each.batches(engine, each, 0), ADAMW.lr).grad_norm)
        engine.close()
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)
    assert abs(norms[2] / norms[0] - 1) > 0.05


def skipping(world: World, cluster: Cluster, cases: Sequence[Case]) -> list[tuple[int, float, bool, bool]]:
    """Of each case: steps skipped from a scale that is too large, the scale then, and whether the bits are right."""
    outcomes = []
    for each in cases:
        engine = engine_of(world, cluster, each)
        scale_of(engine).value = 2.0**20
        before, batches, unchanged = state_of(engine), each.batches(engine, each, 0), True
        while (result := engine.step(batches, ADAMW.lr)).skipped:
            unchanged &= same(before, state_of(engine))
            assert result.loss == pytest.approx(2.6, abs=1.0)
        while engine.step(each.batches(engine, each, 1), ADAMW.lr).skipped:
            pass
        engine.check_bytes()
        scale = scale_of(engine)
        straight = engine_of(world, cluster, each)
        scale_of(straight).value = scale.value
        for step in range(2):
            assert not straight.step(each.batches(straight, each, step), ADAMW.lr).skipped
        outcomes.append((scale.skipped, scale.value, unchanged, same(state_of(engine), state_of(straight))))
        assert not same(before, state_of(engine))
        for one in (engine, straight):
            one.close()
    return outcomes


CASES: dict[tuple[int, ...], list[Case]] = {
    (2,): [
        case("ddp", (2,)),
        case("zero3", (2,), "gpt2", recompute=("*",)),
        case("zero1", (2,), "llama tied", optimizer_states="int8"),
        case("zero1", (2,), "wide llama, 2 kv heads", mapping={"package": {"tensor": 2}}),
        case("zero1", (2,), "llama tied", mapping={"package": {"context": {"ring": 2}}}),
    ],
    (2, 1, 2): [case("three-level", (2, 1, 2), "gpt2")],
    (2, 2): [half(pipelined("zero3", OUTER, "zb-h1"), "deep llama tied", 4)],
}


@pytest.mark.parametrize("sizes", CASES, ids=str)
def test_all_ranks_skip_a_step_that_overflows(pool: LocalPool, sizes: tuple[int, ...]) -> None:
    """Nothing is updated, the scale is halved until a step is finite, and the run is as if it had begun with that."""
    cluster = cluster_of(*sizes)
    for each, outcomes in zip(
        CASES[sizes],
        zip(*pool.run(cluster.world_size, skipping, cluster, CASES[sizes], timeout_s=200.0), strict=True),
        strict=True,
    ):
        assert len(set(outcomes)) == 1, (each, outcomes)
        skipped, value, unchanged, bits = outcomes[0]
        assert skipped >= 2, each
        assert value == 2.0**20 / 2**skipped
        assert unchanged, each
        assert bits, each


def test_a_loss_that_is_not_finite_is_an_error() -> None:
    each = case("ddp", (1,))
    engine = engine_of(WORLD, cluster_of(1), each)
    engine.state.modules[1].register_forward_hook(lambda _, __, output: output * float("nan"))
    with pytest.raises(NonFiniteError, match=r"the output of block 'block\.1' is not finite"):
        engine.step(each.batches(engine, each, 0), ADAMW.lr)
    assert scale_of(engine) == LossScale()
    engine.close()


def test_a_checkpoint_has_the_scale(tmp_path: Path) -> None:
    """A resumed run skips the same steps as the first, and has its bits; one that skipped all steps can be resumed."""
    each = case("zero1", (1,), "gpt2")
    engine, resumed = (engine_of(WORLD, cluster_of(1), each) for _ in range(2))
    scale_of(engine).value = 2.0**22
    assert engine.step(each.batches(engine, each, 0), ADAMW.lr).skipped
    resume(resumed, Checkpoint(save(engine, tmp_path, 1, {}, 5)))
    assert scale_of(resumed) == scale_of(engine) == LossScale(2.0**21, 0, 1)
    for step in range(1, 12):
        one, other = (run.step(each.batches(run, each, step), ADAMW.lr) for run in (engine, resumed))
        assert str(replace(one, time_s={})) == str(replace(other, time_s={}))  # a norm may be nan
    assert scale_of(resumed) == scale_of(engine)
    assert 0 < scale_of(engine).finite < 11
    assert same(state_of(engine), state_of(resumed))
    plain = engine_of(WORLD, cluster_of(1), replace(each, plan=replace(each.plan, compute="fp32")))
    resume(plain, Checkpoint(save(engine, tmp_path, 12, {}, 5)))
    assert plain.state.loss_scale == LossScale.one()
    for run in (engine, resumed, plain):
        run.close()


def test_a_run_and_its_metrics(tmp_path: Path) -> None:
    """`terrace train` in fp16, resumed from its third step: the same lines as without a break."""
    run = write_run(tmp_path, 2, plan="zero3", steps=6, checkpoint_every=3, keep_checkpoints=3)
    words = ("train", "--config", run, "--plan.compute", "fp16")
    assert terrace(*words, "--folder", "a", cwd=tmp_path).returncode == 0
    whole = read_metrics(tmp_path / "a" / "metrics.jsonl")
    assert [each.loss_scale for each in whole] == [FIRST] * 6
    assert not any(each.skipped for each in whole)

    def saved(step: int) -> dict[str, Any]:
        file = tmp_path / "a" / "checkpoints" / f"step-{step:08d}" / "manifest.json"
        found: dict[str, Any] = json.loads(file.read_text())["loss_scale"]
        return found

    assert saved(3) == {"value": FIRST, "finite": 3, "skipped": 0}
    shutil.rmtree(tmp_path / "a" / "checkpoints" / "step-00000006")
    again = terrace("train", "--resume", tmp_path / "a", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert saved(6) == {"value": FIRST, "finite": 6, "skipped": 0}
    after = read_metrics(tmp_path / "a" / "metrics.jsonl")
    assert [(each.loss, each.grad_norm) for each in after] == [(each.loss, each.grad_norm) for each in whole]


REFUSED = [
    ({"master": "bf16"}, "llama tied", "with master = 'bf16', which is less precise: use master = 'fp32'"),
    ({"messages": "bf16"}, "llama tied", "with messages = 'bf16'"),
    ({"wire": {"sync": {"package": "int8"}}}, "llama tied", "with formats for sync"),
    ({"products": "fp8"}, "llama of sixteens", "devices with 8-bit floats have bf16"),
    ({"outer": Outer(tier="package", every=2)}, "llama tied", "with islands"),
    ({}, "mixture tied", "losses of its routers are not scaled"),
]


@pytest.mark.parametrize(("changes", "model", "words"), REFUSED)
def test_plans_that_are_refused(changes: dict[str, Any], model: str, words: str) -> None:
    plan = Plan(params="device", grads="device", optimizer="device", compute="fp16", **changes)
    with pytest.raises(PlanError, match=words):
        validate(cluster_of(2), plan, MODELS[model].declared)


def test_no_message_is_in_fp16_without_a_scale() -> None:
    plan = Plan(params="device", grads="device", optimizer="device", wire={"sync": {"package": "fp16"}})
    with pytest.raises(PlanError, match=r"gradients beyond 65504 would be infinite; write 'bf16'"):
        validate(cluster_of(2), plan, MODELS["llama tied"].declared)

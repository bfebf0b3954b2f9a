"""Gathers in fp8 that share the scales of products: matrices are held as the codes that their products take.

A code is the one that a gather in the compute dtype, quantised afterwards, would have. So a step has the bits of the
same plan without the format, and the forwards of one process, whatever ranks, tiers and axes.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from terrace.base.errors import PlanError
from terrace.checkpoint.reading import Checkpoint, resume
from terrace.checkpoint.writing import save
from terrace.cluster.cluster import Cluster
from terrace.launch.start import LocalPool, World
from terrace.plan.outer import Outer
from terrace.plan.plan import Plan
from terrace.plan.validate import validate
from terrace.plan.wire import MessageClass
from terrace.program.lowering import build
from terrace.program.text import program_text
from terrace.report.tables import wire_words
from terrace.runtime.scaled_products import quantise
from terrace.runtime.settings import OptimizerConfig
from terrace.train.user_blocks import whole_values
from tests.support.byte_formula import step_bytes
from tests.support.nightly import nightly
from tests.support.parity import ADAMW as CLIPPED_ADAMW
from tests.support.parity import Case, Outcome, engine_of, exact, run
from tests.support.scaled_reference import NUM_STEPS
from tests.support.scaled_reference import SGD as CLIPPED_SGD
from tests.support.toys import MODELS, Rows, cluster_of

pytestmark = pytest.mark.timeout(240)

WORLD: Any = SimpleNamespace(rank=0, world_size=1)
ROWS = Rows(20)
# A norm is added up by buffers, of which there are more with codes: clipped gradients would differ in their last bit.
SGD, ADAMW = replace(CLIPPED_SGD, clip=0.0), replace(CLIPPED_ADAMW, clip=0.0)
MUON = OptimizerConfig(name="muon", lr=1e-3, clip=0.0)


def case(name: str, sizes: tuple[int, ...], micros: int, **more: Any) -> Case:
    """A plan that does not share scales; `shared` makes it one that does."""
    model, optimizer = more.pop("model", "llama of sixteens"), more.pop("optimizer", SGD)
    changes = {"products": "fp8", "compute": "fp32", "master": "fp32"} | more
    return Case(
        replace(exact(name, cluster_of(*sizes)), **changes),
        micros,
        model,
        rows=ROWS,
        optimizer=optimizer,
        num_steps=NUM_STEPS,
    )


def shared(case: Case, *tiers: str, message: str = "") -> Case:
    """The same plan with codes; where parameters stay on a rank they are refreshed and never gathered."""
    message = message or ("refresh" if case.plan.params == "device" else "gather")
    return replace(case, plan=replace(case.plan, wire={message: dict.fromkeys(tiers, "fp8")}))


def masters(world: World, cluster: Cluster, cases: Sequence[Case]) -> list[Outcome]:
    """Train every case on this rank; parameters are the masters."""
    return [trained(world, cluster, each) for each in cases]


def trained(world: World, cluster: Cluster, case: Case) -> Outcome:
    engine = engine_of(world, cluster, case)
    results = [engine.step(case.batches(engine, case, step), case.optimizer.lr) for step in range(case.num_steps)]
    engine.check_bytes()
    said, found = engine.program.state_bytes, engine.report({}).memory_bytes
    complaint = "" if all(found.get(name, 0) <= size for name, size in said.items()) else f"{found} of {said}"
    kept = ("params", "secondary", "grads", "buffers")  # Muon's moments differ by rank, and blocks come late
    complaint += "".join(f" {name} {found.get(name)} {said[name]}" for name in kept if found.get(name, 0) != said[name])
    rows = torch.cat([value.double().reshape(-1) for _, _, value in whole_values(engine)])
    engine.close()
    return Outcome([each.loss for each in results], [each.grad_norm for each in results], rows, complaint)


PIPELINE: dict[str, Any] = {"model": "deep llama of sixteens", "mapping": {"node": {"pipeline": 2}}}
TWO: dict[str, Any] = {"mapping": {"package": {"tensor": 2}}}
Pair = tuple[Case, tuple[str, ...]]
GRIDS: dict[tuple[int, ...], list[Pair]] = {
    (2,): [
        (case("zero3", (2,), 2), ("package",)),
        (case("zero3", (2,), 2, compute="bf16", optimizer=ADAMW, recompute=("*",), unit=2), ("package",)),
        (case("zero1", (2,), 2, compute="bf16", optimizer=ADAMW), ("package",)),
    ],
    (2, 2): [
        (case("three-level", (2, 2), 2, compute="bf16", optimizer=ADAMW), ("package",)),
        (case("zero3", (2, 2), 2, compute="bf16", **TWO), ("node",)),
    ],
}
MORE: list[Pair] = [
    (case("zero3", (2, 2), 2, params_backward="package"), ("node",)),
    (case("zero3", (2, 2), 4, schedule="zb-h1", **PIPELINE), ("package",)),
    (case("zero3", (2, 2), 1, compute="bf16", master="bf16", optimizer=ADAMW), ("package",)),
    (case("zero3", (2, 2), 1, optimizer=MUON, products="fp8+e4m3"), ("node", "package")),
    (case("zero3", (2, 2), 2, mapping={"node": {"context": 2}}), ("node",)),
    (case("zero2", (2, 2), 2, mapping={"node": {"context": 2}}), ("package",)),
    (case("zero3", (2, 2), 2, params_backward="package", prefetch=2), ("node",)),
]


@pytest.mark.parametrize(("sizes", "at"), [((2, 2), 0), *nightly(((2, 2), 1), *(((2,), at) for at in range(3)))])
def test_steps_have_the_bits_of_a_gather_in_the_compute_dtype(pool: LocalPool, sizes: tuple[int, ...], at: int) -> None:
    """Losses, and masters after updates."""
    compare(pool, sizes, GRIDS[sizes][at : at + 1])


@pytest.mark.nightly
def test_other_optimizers_and_axes_too(pool: LocalPool) -> None:
    compare(pool, (2, 2), MORE)


def compare(pool: LocalPool, sizes: tuple[int, ...], grid: Sequence[Pair]) -> None:
    pairs = [(each, shared(each, *tiers)) for each, tiers in grid]
    found = run(pool, cluster_of(*sizes), [each for pair in pairs for each in pair], masters)
    for number, (plain, coded) in enumerate(pairs):
        assert coded.plan.shares_scales
        assert not plain.plan.shares_scales
        for before, after in zip(found[2 * number], found[2 * number + 1], strict=True):
            assert (before.complaint, after.complaint) == ("", ""), coded.plan
            assert after.losses == before.losses, coded.plan
            assert after.norms == pytest.approx(before.norms, rel=1e-6), coded.plan
            assert torch.equal(after.parameters, before.parameters), coded.plan


def test_ranks_have_the_forward_of_one_process(pool: LocalPool) -> None:
    each = shared(case("zero3", (2, 2), 1), "node")
    alone = Plan(params="device", grads="device", optimizer="device", products="fp8")
    wanted = trained(WORLD, cluster_of(1), replace(each, plan=alone, num_micros=4))
    for (outcome,) in zip(*run(pool, cluster_of(2, 2), [each], masters), strict=True):
        assert outcome.losses[0] == pytest.approx(wanted.losses[0], rel=1e-12)
        assert outcome.norms[0] == pytest.approx(wanted.norms[0], rel=1e-6)
        assert outcome.losses[1] == pytest.approx(wanted.losses[1], rel=1e-2)


def test_one_rank_has_them_too() -> None:
    """A plan that is valid on many ranks is valid on one, which keeps codes as well."""
    plain = case("zero3", (1,), 2, compute="bf16", optimizer=ADAMW)
    before, after = (trained(WORLD, cluster_of(1), each) for each in (plain, shared(plain, "package")))
    assert (after.losses, after.complaint) == (before.losses, "")
    assert torch.equal(after.parameters, before.parameters)


@pytest.mark.parametrize("compute", ["bf16", *nightly("fp32")])
def test_codes_are_those_of_the_whole_matrix(pool: LocalPool, compute: Any) -> None:
    """After a step that moved them: of the masters in the compute dtype, by the definition of products."""
    each = shared(case("zero3", (2, 2), 1, compute=compute), "node")
    for found in pool.run(4, codes_of, each, timeout_s=60.0):
        assert len(found) == 2 * 7
        for codes, scale, master in found.values():
            wanted, scale_of_whole = quantise(master.to(getattr(torch, WIDE[compute])), torch.float8_e4m3fn, False)
            assert torch.equal(codes, wanted.view(torch.uint8))
            assert torch.equal(scale, scale_of_whole)


WIDE = {"fp32": "float32", "bf16": "bfloat16"}


def codes_of(world: World, case: Case) -> dict[tuple[str, str], tuple[Tensor, Tensor, Tensor]]:
    engine = engine_of(world, cluster_of(2, 2), case)
    engine.step(case.batches(engine, case, 0), 1.0)
    whole = {(block, name): value for block, name, value in whole_values(engine)}
    engine.state.gather(engine.comm.collectives)
    found = {}
    for flat in engine.state:
        for (name, parameter), scale in zip(
            flat.named_parameters(), flat.codes.scales if flat.codes else (), strict=False
        ):
            codes = parameter.detach().view(torch.uint8).clone()
            found[flat.name, name] = codes, scale.clone(), whole[flat.name, name]
    engine.close()
    return found


def test_islands_code_what_they_agree_on(pool: LocalPool) -> None:
    outer = Outer(tier="node", every=1, optimizer="average")
    plain = case("zero3", (2, 2), 1, params="package", grads="package", outer=outer)
    plain = replace(plain, plan=replace(plain.plan, optimizer="package"))
    before, after = run(pool, cluster_of(2, 2), [plain, shared(plain, "package")], masters)
    for one, other in zip(before, after, strict=True):
        assert one.losses == other.losses
        assert torch.equal(one.parameters, other.parameters)


def test_a_resumed_run_has_the_same_bits(pool: LocalPool, tmp_path: Path) -> None:
    each = shared(case("three-level", (2, 2), 1, compute="bf16", optimizer=ADAMW), "package")
    for straight, again, said in pool.run(4, resumed, tmp_path, each, timeout_s=60.0):
        assert (straight, "") == (again, said)


def resumed(world: World, folder: Path, case: Case) -> tuple[list[float], list[float], str]:
    engine, other = (engine_of(world, cluster_of(2, 2), case) for _ in range(2))
    engine.step(case.batches(engine, case, 0), case.optimizer.lr)
    saved = save(engine, folder, 1, {}, keep=1)
    said = resume(other, Checkpoint(saved))
    losses = []
    for each in (engine, other):
        losses.append([each.step(case.batches(each, case, step), case.optimizer.lr).loss for step in (1, 2)])
        each.drain()  # both have the groups of the world
    for each in (engine, other):
        each.close()
    return losses[0], losses[1], said


def test_bytes_and_memory_by_hand() -> None:
    """A llama of sixteens has 7 matrices a layer: a byte an element where they are gathered, and fp32 numbers first."""
    cluster, blocks = cluster_of(2, 2), MODELS["llama of sixteens"].declared
    plan = replace(exact("zero3", cluster), products="fp8", compute="bf16", master="fp32")
    coded = replace(plan, wire={"gather": {"node": "fp8"}})
    matrices = sum(math.prod(param.shape) for param in blocks[1].params if param.is_matrix)
    layers = sum(block.attends for block in blocks)
    before, after = (step_bytes(cluster, each, blocks, 1) for each in (plan, coded))
    for message in (MessageClass.GATHER, MessageClass.GATHER_BACKWARD):
        for tier, part in (("node", 4), ("package", 2)):
            assert before[message, tier] - after[message, tier] == layers * matrices // part, (message, tier)
    assert {key: size for key, size in after.items() if key[0] is MessageClass.REFRESH} == {
        (MessageClass.REFRESH, "node"): layers * 7 * 4,
        (MessageClass.REFRESH, "package"): layers * 7 * 4,
    }
    assert not any(key[0] is MessageClass.REFRESH for key in before)
    held, less = (build(cluster, each, blocks, 1, 20).state_bytes for each in (plan, coded))
    assert held["params"] - less["params"] == layers * matrices // 4
    assert held["optimizer"] == less["optimizer"]
    wide, narrow = (build(cluster, replace(each, prefetch=0), blocks, 1, 20).state_bytes for each in (plan, coded))
    assert wide["gathered"] > narrow["gathered"]


def test_programs_and_tables_name_the_codes() -> None:
    cluster, blocks = cluster_of(2, 2), MODELS["llama of sixteens"].declared
    plan = replace(exact("three-level", cluster), products="fp8", compute="bf16", master="fp32")
    plan = replace(plan, wire={"gather": {"package": "fp8"}})
    lines = program_text(build(cluster, plan, blocks, 1, 20)).splitlines()
    assert any("GATHER b1" in line and line.endswith("package (fp8, bf16)") for line in lines)
    assert any("REFRESH b1" in line and line.endswith("node (fp32, fp8, bf16), package (fp32)") for line in lines)
    assert any("GATHER b0" in line and line.endswith("package (bf16)") for line in lines)  # the embedding
    assert "products of layers in fp8, whose matrices travel as the codes" in wire_words(plan)


def test_plans_without_gathers_by_hand() -> None:
    """Under zero1 a refresh carries a byte an element of these matrices, and ranks hold one."""
    cluster, blocks = cluster_of(2), MODELS["llama of sixteens"].declared
    plan = replace(exact("zero1", cluster), products="fp8", compute="bf16", master="fp32")
    coded = replace(plan, wire={"refresh": {"package": "fp8"}})
    matrices = sum(
        math.prod(param.shape) for block in blocks if block.attends for param in block.params if param.is_matrix
    )
    scales = 4 * 7 * sum(block.attends for block in blocks)
    before, after = (step_bytes(cluster, each, blocks, 2)[MessageClass.REFRESH, "package"] for each in (plan, coded))
    assert before - after == matrices // 2 - scales
    held, less = (build(cluster, each, blocks, 2, 20).state_bytes["params"] for each in (plan, coded))
    assert held - less == matrices
    assert coded.shares_scales
    assert not replace(coded, products="fp8:row").shares_scales
    assert not replace(coded, wire={"refresh": {"package": "fp8:128"}}).shares_scales
    wide = replace(exact("zero1", cluster_of(2, 2)), products="fp8", compute="bf16", master="fp32")
    mixed = replace(wide, wire={"refresh": {"node": "fp8", "package": "int8"}})
    with pytest.raises(PlanError, match=r"wire\.refresh\.package = 'int8' with wire\.refresh\.node = 'fp8'"):
        validate(cluster_of(2, 2), mixed, blocks)


REFUSED = [
    ({"gather": {"package": "int8", "node": "fp8"}}, "wire.gather.package = 'int8' with wire.gather.node = 'fp8'"),
    ({"gather": {"node": "fp8"}, "gather_backward": {"node": "bf16"}}, "wire.gather_backward.node = 'bf16' with"),
    ({"gather": {"node": "fp8"}, "gather_backward": {"node": "fp8:64"}}, "write 'fp8' or leave it out"),
]


@pytest.mark.parametrize(("wire", "words"), REFUSED)
def test_other_formats_of_the_same_parameters_are_refused(wire: Any, words: str) -> None:
    cluster, blocks = cluster_of(2, 2), MODELS["llama of sixteens"].declared
    plan = replace(exact("zero3", cluster, products="fp8"), compute="bf16", master="fp32", wire=wire)
    with pytest.raises(PlanError, match=re.escape(words)):
        validate(cluster, plan, blocks)
    validate(cluster, replace(plan, products="fp8:row"), blocks)  # blocks with scales of their own


@pytest.mark.parametrize(("products", "name"), [("fp8:row", "fp8"), ("fp8", "fp8:128"), (None, "fp8")])
def test_blocks_of_128_stay_where_scales_are_not_shared(products: str | None, name: str) -> None:
    cluster, blocks = cluster_of(2, 2), MODELS["llama of sixteens"].declared
    plan = replace(exact("zero3", cluster), compute="bf16", master="fp32", products=products)
    plan = replace(plan, wire={"gather": {"node": name}})
    assert not plan.shares_scales
    program = build(cluster, plan, blocks, 1, 20)
    assert not any(flat.is_coded for flats in program.model.flats for flat in flats)
    wires = {hop.wire for message in program.messages for hop in message.hops if hop.wire.bits == 8}
    assert {wire.block for wire in wires} == {128}


def test_another_use_of_codes_is_an_error() -> None:
    each = shared(case("zero3", (1,), 1), "package")
    engine = engine_of(WORLD, cluster_of(1), each)
    engine.state.gather(engine.comm.collectives)
    codes = next(p for flat in engine.state if flat.codes for p in flat.parameters)
    assert codes.shape == (32, 32) or len(codes.shape) == 2
    uses: list[Callable[[], object]] = [codes.float, lambda: codes.to(torch.float32), lambda: codes * 2, codes.clone]
    for use in uses:
        with pytest.raises(PlanError, match="held as the codes of its products"):
            use()
    engine.close()

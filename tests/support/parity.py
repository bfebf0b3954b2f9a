"""One comparison of the runtime with a single plain PyTorch process, used by every parity test.

A test lists cases; `check` trains each on the ranks of a pool (`run_case`) and in one process (`serial`, which shares
no code with the runtime), and compares losses, gradient norms, parameters and bytes. So the parity test of a new axis
is its plans, and a `batches` function if the axis deals out tokens in its own way:

    def test_my_axis(pool: LocalPool) -> None:
        cluster = cluster_of(2, 2)
        check(pool, cluster, [Case(exact("zero3", cluster, mapping=mapping), num_micros=2) for mapping in MAPPINGS])

A case may name a sabotage, which must make the comparison fail.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bench.common import engine_with
from terrace.base.errors import ProgramError
from terrace.cluster.cluster import Cluster
from terrace.launch.start import LocalPool, World
from terrace.model.balance import BalanceConfig
from terrace.model.experts.mixture import Router
from terrace.plan.layout import Layout
from terrace.plan.plan import Plan
from terrace.plan.presets import preset
from terrace.plan.slices import rank_slices
from terrace.runtime.batch import Batch
from terrace.runtime.engine import Engine
from terrace.runtime.settings import OptimizerConfig
from terrace.runtime.step_sums import StepResult
from tests.support import in_block
from tests.support.in_block import record_in_block
from tests.support.lanes import use_lane
from tests.support.router_losses import begin_noise, router_counts, router_losses, scored
from tests.support.sabotage import SABOTAGES
from tests.support.toys import MODELS, WHOLE_ROWS, Rows, count_tokens, make_batch, run_blocks

ADAMW = OptimizerConfig(lr=3e-3)
NUM_STEPS = 2  # the second starts from moments and parameters of the first; test_parity.py has a third
TOLERANCE = 1e-10
NO_BALANCE = BalanceConfig()


def exact(name: str, cluster: Cluster, **changes: object) -> Plan:
    """A preset in fp64 whose messages do not round, so that rounding cannot hide an error."""
    return replace(preset(name, cluster), compute="fp64", master="fp64", wire={}, **changes)  # type: ignore[arg-type]


def data_rows(engine: Engine, case: "Case", step: int) -> list[Batch]:
    """The micro-batches of a rank whose data rank has rows of its own."""
    layout, size = engine.program.layout, case.plan.micro_batch
    batch = case.rows.batch(step, size * layout.data_degree * case.num_micros)
    places = [micro * layout.data_degree + layout.data_rank(engine.rank) for micro in range(case.num_micros)]
    return [cut_rows(batch, size * place, size * (place + 1)) for place in places]


Slices = list[tuple[list[tuple[int, str]], list[Tensor]]]


@dataclass(frozen=True)
class Case:
    """One training run."""

    plan: Plan
    num_micros: int = 1
    model: str = "toy"
    sabotage: str = ""
    lane: str = "thread"
    num_steps: int = NUM_STEPS
    compiled: bool = False
    optimizer: OptimizerConfig = ADAMW
    rows: Rows = WHOLE_ROWS
    batches: Callable[[Engine, "Case", int], list[Batch]] = data_rows  # of a rank at a step
    balance: BalanceConfig = NO_BALANCE


def case_words(value: object) -> str:
    """The name of a parameter of a test, which may be a case, or sizes and a case."""
    if isinstance(value, tuple) and any(isinstance(each, Case) for each in value):
        return " ".join(map(case_words, value))
    return f"{value.plan.name} {value.model}" if isinstance(value, Case) else str(value)


@dataclass(frozen=True)
class Outcome:
    """Loss, losses of routers and gradient norm of each step, all parameters in one row, a complaint about bytes or
    order.
    """

    losses: list[float]
    norms: list[float]
    parameters: Tensor
    complaint: str = ""
    loads: Mapping[str, list[object]] = field(default_factory=dict)  # by layer: tokens of experts by step; a bias


def cut_rows(batch: Batch, first: int, last: int) -> Batch:
    """Rows `first` to `last` of a batch."""
    positions, places = (None if x is None else x[first:last] for x in (batch.positions, batch.places))
    return Batch(batch.inputs[first:last], batch.labels[first:last], positions, places=places)


def engine_of(world: World, cluster: Cluster, case: Case, blocks: Sequence[nn.Module] = (), **more: Any) -> Engine:
    """The engine of a case on this rank, over fresh blocks unless given some."""
    model = MODELS[case.model]
    return engine_with(
        blocks or model.blocks(torch.float64),
        cluster=cluster,
        plan=replace(case.plan, update=case.optimizer.update),
        num_micros=case.num_micros,
        rank=world.rank,
        optimizer=case.optimizer,
        sequence=case.rows.sequence,
        compiled=case.compiled,
        balance=case.balance,
        **{"objective": model.objective, "declared": model.declared, **more},
    )


def run_case(world: World, cluster: Cluster, case: Case) -> Outcome:
    """Train a case on this rank."""
    with use_lane(case.lane):
        blocks = MODELS[case.model].blocks(torch.float64)
        engine = engine_of(world, cluster, case, blocks)
        if case.sabotage:
            SABOTAGES[case.sabotage](engine)
        recording = record_in_block(engine)
        results = [engine.step(case.batches(engine, case, step), case.optimizer.lr) for step in range(case.num_steps)]
        complaint = in_block.complaint(engine.program, recording, case.num_steps)
        try:
            engine.check_bytes()
        except ProgramError as error:
            complaint += str(error)
        parameters = gathered(engine, blocks)
        engine.close()
    losses = [loss for result in results for loss in (result.loss, *result.router_losses.values())]
    norms = [result.grad_norm for result in results]
    return Outcome(losses, norms, parameters, complaint, loads_of(engine, results))


def loads_of(engine: Engine, results: Sequence[StepResult]) -> dict[str, list[object]]:
    """For each mixture on this rank: the tokens of its experts in every step, and the bias after the last."""
    found: dict[str, list[object]] = {layer: [] for layer in engine.load.layers}
    for result in results:
        if result.loads is not None:
            for layer, counts in zip(result.loads.layers, result.loads.counts, strict=True):
                found[layer].append(list(counts))
    for block in engine.state.modules:
        biases = [value for name, value in engine.state.named_parameters(block) if name.endswith("router.bias")]
        if biases:
            found[engine.program.blocks[block].name] += [bias.tolist() for bias in biases]
    return found


def train(world: World, cluster: Cluster, cases: Sequence[Case]) -> list[Outcome]:
    """Train every case on this rank."""
    return [run_case(world, cluster, case) for case in cases]


Train = Callable[[World, Cluster, Sequence[Case]], list[Outcome]]


def run(pool: LocalPool, cluster: Cluster, cases: Sequence[Case], train: Train = train) -> list[list[Outcome]]:
    """Outcomes of every case, each in rank order."""
    by_rank = pool.run(cluster.world_size, train, cluster, cases, timeout_s=300.0)
    return [list(outcomes) for outcomes in zip(*by_rank, strict=True)]


def check(pool: LocalPool, cluster: Cluster, cases: Sequence[Case], train: Train = train) -> None:
    """Every case equals the serial run on every rank, every ledger the formula, and the order of messages inside blocks
    their programs."""
    for case, outcomes in zip(cases, run(pool, cluster, cases, train), strict=True):
        found = deviation(outcomes, reference(cluster, case))
        assert max(found.values()) < TOLERANCE, (case, found)
        assert not any(outcome.complaint for outcome in outcomes), (case, [each.complaint for each in outcomes])


def num_rows(cluster: Cluster, case: Case) -> int:
    """Rows of a case's global batch."""
    return Layout.of(cluster, case.plan).data_degree * case.num_micros * case.plan.micro_batch


def gathered(engine: Engine, blocks: Sequence[nn.Module]) -> Tensor:
    """All parameters of an engine over these blocks as one fp64 row."""
    engine.state.gather(engine.comm.collectives)
    program = engine.program
    mesh = program.mesh
    whole = program.model.tensor.degree == program.stage.num_stages == 1
    whole = whole and not mesh.divides_stacks and mesh.tables is None
    return flatten(blocks) if whole else assemble(engine)


def assemble(engine: Engine) -> Tensor:
    """All parameters as one row, which rank 0 makes of the slices of all ranks for all of them."""
    slices = exchanged(engine)
    row = [_row(engine, slices)] if engine.rank == 0 else []
    return engine.comm.exchange_tensors(row)[0][0]


def _row(engine: Engine, slices: Slices) -> Tensor:
    found = put_together(engine, slices)
    if engine.program.blocks[-1].tied_to:
        found[-1] = {"weight": found[0]["weight"], **found[-1]}
    return torch.cat([value.reshape(-1) for whole in found for value in whole.values()])


def wholes(engine: Engine) -> list[dict[str, Tensor]]:
    """The parameters of every block in fp64, from the slices of all ranks; replicas must be the same on each."""
    return put_together(engine, exchanged(engine))


def exchanged(engine: Engine) -> Slices:
    """Of each rank, in order: block and name of each slice of a parameter that it holds, and the slices."""
    held = [(block, name, p) for block in engine.program.stage.held for name, p in engine.state.named_parameters(block)]
    places = engine.comm.exchange([(block, name) for block, name, _ in held])
    return list(zip(places, engine.comm.exchange_tensors([value.detach() for _, _, value in held]), strict=True))


def put_together(engine: Engine, slices: Slices) -> list[dict[str, Tensor]]:
    """The parameters of every block in fp64."""
    program, specs = engine.program, engine.state.specs
    found = [{param.name: torch.full(param.shape, torch.nan).double() for param in spec.params} for spec in specs]
    for rank, (there, values) in enumerate(slices):
        for (block, name), value in zip(there, values, strict=True):
            spec = program.blocks[block]
            (param,) = (param for param in spec.params if param.name == name)
            target = found[block][name][rank_slices(param, program.mesh, rank)]
            own = value[tuple(slice(0, size) for size in target.shape)]
            assert bool(torch.isnan(target).all()) or torch.equal(target, own), (spec.name, name, rank)
            assert value.count_nonzero() == own.count_nonzero(), "padding stays zero"
            target.copy_(own)
    return found


def flatten(blocks: Sequence[nn.Module]) -> Tensor:
    """All parameters of all blocks, shared ones repeated, as one fp64 row."""
    return torch.cat([p.detach().double().reshape(-1) for block in blocks for p in block.parameters()])


def make_adamw(parameters: Sequence[nn.Parameter], biases: Collection[int] = ()) -> torch.optim.AdamW:
    """The reference optimizer: no weight decay for vectors, nor for stacks of them, whose ids are among `biases`."""
    decays = {id(p) for p in parameters if p.dim() >= 2} - set(biases)
    matrices = {"params": [p for p in parameters if id(p) in decays], "weight_decay": ADAMW.weight_decay}
    others = {"params": [p for p in parameters if id(p) not in decays], "weight_decay": 0.0}
    return torch.optim.AdamW([matrices, others], lr=ADAMW.lr, betas=(ADAMW.beta1, ADAMW.beta2), eps=ADAMW.eps)


def trainable(blocks: Sequence[nn.Module]) -> list[nn.Parameter]:
    """Parameters with gradients, shared ones once."""
    return list({id(p): p for block in blocks for p in block.parameters() if p.requires_grad}.values())


def reference(cluster: Cluster, case: Case) -> Outcome:
    """The serial run of a case."""
    clip = case.optimizer.clip
    return serial(case.model, num_rows(cluster, case), case.num_steps, case.rows, case.balance, clip)


@cache
def serial(
    model_name: str,
    batch: int,
    num_steps: int = NUM_STEPS,
    rows: Rows = WHOLE_ROWS,
    balance: BalanceConfig = NO_BALANCE,
    clip: float = ADAMW.clip,
) -> Outcome:
    """Train in fp64 in this process on whole batches, or on one document after the other, with torch's own AdamW."""
    model = MODELS[model_name]
    blocks = model.blocks(torch.float64)
    parameters = trainable(blocks)
    biases = [id(p) for block in blocks for name, p in block.named_parameters() if name.endswith("bias")]
    optimizer = make_adamw(parameters, biases)

    losses, norms = [], []
    loads: dict[str, list[object]] = defaultdict(list)
    before: dict[Router, list[int]] = {}
    for step in range(num_steps):
        whole = rows.batch(step, batch)
        assert whole.places is not None, "a batch has places"
        optimizer.zero_grad()
        total, count = torch.zeros(()).double(), count_tokens(whole.labels)
        with scored(blocks, rows, balance) as routers:
            parts = rows.apart(whole.inputs, whole.labels), rows.apart(whole.places, whole.labels)
            for (x, y), (places, _) in zip(*parts, strict=True):
                begin_noise(blocks, places)
                total = total + model.objective(run_blocks(blocks, x), y) / count
        of_routers = [loss / count for loss in router_losses(routers, rows, whole.labels, balance, before)]
        torch.autograd.backward(torch.stack([total, *of_routers]).sum())
        norms.append(float(nn.utils.clip_grad_norm_(parameters, clip or math.inf)))
        optimizer.step()
        losses += [float(loss.detach()) for loss in (total, *of_routers)]
        before = router_counts(routers, rows, whole.labels)
        for router, counts in before.items():
            (name,) = (f"block.{index}" for index, block in enumerate(blocks) if router in block.modules())
            loads[name].append(counts)
            if router.bias is not None and balance.bias:
                for expert, number in enumerate(counts):
                    router.bias.data[expert] += balance.bias * float(np.sign(np.mean(counts) - number))
    for index, block in enumerate(blocks):
        loads[f"block.{index}"] += [
            bias.tolist() for name, bias in block.named_parameters() if name.endswith("er.bias")
        ]
    return Outcome(losses, norms, flatten(blocks), loads=loads)


@cache
def serial_bf16(model_name: str) -> Outcome:
    """Train in this process on 8 sequences a step, on bf16 copies of fp32 parameters; gradients are scaled and clipped
    in fp32.
    """
    model = MODELS[model_name]
    blocks, masters = model.blocks(torch.bfloat16), trainable(model.blocks(torch.float32))
    optimizer = make_adamw(masters)
    losses, norms = [], []
    for step in range(NUM_STEPS):
        tokens, labels = make_batch(step, 8)
        loss = model.objective(run_blocks(blocks, tokens), labels)
        torch.autograd.backward(loss)
        for master, working in zip(masters, trainable(blocks), strict=True):
            assert working.grad is not None
            master.grad, working.grad = working.grad.float() / count_tokens(labels), None
        norms.append(float(nn.utils.clip_grad_norm_(masters, ADAMW.clip)))
        optimizer.step()
        for master, working in zip(masters, trainable(blocks), strict=True):
            working.data.copy_(master.data)
        losses.append(float(loss.detach() / count_tokens(labels)))
    return Outcome(losses, norms, flatten(blocks))


def deviation(outcomes: Sequence[Outcome], reference: Outcome) -> dict[str, float]:
    """The largest absolute difference of any rank from the reference, by quantity; of loads, if any, infinite or 0."""
    worst = {"loss": 0.0, "norm": 0.0, "parameters": 0.0} | ({"loads": 0.0} if reference.loads else {})
    for outcome in outcomes:
        compared = outcome.loads.items() if reference.loads else ()
        if any(counts != reference.loads[layer] for layer, counts in compared):
            worst["loads"] = float("inf")
        for key, mine, wanted in (
            ("loss", outcome.losses, reference.losses),
            ("norm", outcome.norms, reference.norms),
            ("parameters", outcome.parameters.tolist(), reference.parameters.tolist()),
        ):
            differences = [abs(a - b) for a, b in zip(mine, wanted, strict=True)]
            worst[key] = max(worst[key], *(d if d == d else float("inf") for d in differences))
    return worst


def of_size(plan: Plan, micro_batch: int) -> Plan:
    """The plan with micro-batches of as many rows."""
    return replace(plan, micro_batch=micro_batch)


def rows_of_all(
    found: Iterable[tuple[list[float], list[float], Tensor, Mapping[int, Tensor]]],
    losses: list[float],
    norms: list[float],
    parameters: Tensor,
) -> dict[int, Tensor]:
    """The tensors of all ranks by row of the global batch; every rank must have these losses, norms and parameters."""
    rows = dict[int, Tensor]()
    for mine in found:
        assert mine[0] == pytest.approx(losses, abs=TOLERANCE)
        assert mine[1] == pytest.approx(norms, abs=TOLERANCE)
        torch.testing.assert_close(mine[2], parameters, rtol=0, atol=TOLERANCE)
        rows.update(mine[3])
    return rows

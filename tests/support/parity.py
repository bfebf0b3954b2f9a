"""One comparison of the runtime with a single plain PyTorch process, used by every parity test.

`serial` is the reference and shares no code with the runtime. `train` runs cases on one rank of a world,
`deviation` compares what they return. A case may name a sabotage, which must make the comparison fail.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor, nn

from terrace.base.errors import ProgramError
from terrace.cluster import Cluster
from terrace.launch.start import World
from terrace.model.decoder import count_tokens, run_blocks
from terrace.plan import MessageClass, Plan, preset
from terrace.plan.slices import rank_slices
from terrace.runtime.engine import Engine
from terrace.runtime.settings import OptimizerConfig
from tests.support.lanes import use_lane
from tests.support.sabotage import SABOTAGES
from tests.support.toys import MODELS, SEQUENCE, make_batch

ADAMW = OptimizerConfig(lr=3e-3)
NUM_STEPS = 5
FEW_STEPS = 3  # of eight ranks, whose steps take long on two cores


@dataclass(frozen=True)
class Case:
    """One training run of the runtime."""

    plan: Plan
    num_micros: int = 1
    model: str = "toy"
    sabotage: str = ""
    lane: str = "thread"
    num_steps: int = NUM_STEPS
    compiled: bool = False
    optimizer: OptimizerConfig = ADAMW


@dataclass(frozen=True)
class Outcome:
    """What a run leaves: per step loss and gradient norm, all parameters in one row, the ledger's complaint."""

    losses: list[float]
    norms: list[float]
    parameters: Tensor
    complaint: str = ""


def exact(name: str, cluster: Cluster, **changes: object) -> Plan:
    """A preset in fp64 whose messages do not round, so that rounding cannot hide an error."""
    return replace(preset(name, cluster), compute="fp64", master="fp64", wire={}, **changes)  # type: ignore[arg-type]


def shortened(cluster: Cluster, cases: Sequence[Case]) -> list[Case]:
    """Return the cases with few steps where there are eight ranks."""
    return [replace(case, num_steps=FEW_STEPS) if cluster.world_size == 8 else case for case in cases]


def train(world: World, cluster: Cluster, cases: Sequence[Case]) -> list[Outcome]:
    """Run every case on this rank."""
    outcomes = []
    for case in cases:
        with use_lane(case.lane):
            outcomes.append(_train(world, cluster, case))
    return outcomes


def _train(world: World, cluster: Cluster, case: Case) -> Outcome:
    model = MODELS[case.model]
    blocks = model.blocks(torch.float64)
    engine = Engine(
        blocks,
        cluster=cluster,
        plan=replace(case.plan, update=case.optimizer.name),
        num_micros=case.num_micros,
        objective=model.objective,
        rank=world.rank,
        adamw=case.optimizer,
        declared=model.declared,
        sequence=SEQUENCE,
        compiled=case.compiled,
    )
    if case.sabotage:
        SABOTAGES[case.sabotage](engine)
    losses, norms = [], []
    for step in range(case.num_steps):
        layout = engine.program.layout
        tokens, labels = make_batch(step, layout.data_degree * case.num_micros)
        rows = [micro * layout.data_degree + layout.data_place(world.rank) for micro in range(case.num_micros)]
        result = engine.step([(tokens[row : row + 1], labels[row : row + 1]) for row in rows], case.optimizer.lr)
        losses.append(result.loss)
        norms.append(result.grad_norm)
    complaint = ""
    try:
        engine.check_bytes()
    except ProgramError as error:
        complaint = str(error)
    if engine.program.layout.params >= 0:
        for state in engine.states:
            state.gather(engine.collectives, MessageClass.GATHER, False)
    whole = engine.program.tensor.degree == engine.program.stage.num_stages == 1
    parameters = flatten(blocks) if whole else assemble(engine)
    engine.close()
    return Outcome(losses, norms, parameters, complaint)


def assemble(engine: Engine) -> Tensor:
    """The same row from the slices of all ranks; what several hold must be the same on each."""
    program = engine.program
    wholes = [
        {param.name: torch.full(param.shape, torch.nan).double() for param in spec.params} for spec in engine.whole
    ]
    held = {
        block: [(name, p.detach()) for name, p in state.named_parameters()]
        for block, state in zip(program.stage.held, engine.states, strict=True)
    }
    for rank, states in enumerate(engine.exchange(held)):
        places = program.tensor.places(rank)
        for block, values in states.items():
            spec, whole = program.blocks[block], wholes[block]
            params = {param.name: param for param in spec.params}
            for name, value in values:
                target = whole[name][rank_slices(params[name], places, program.tensor.degrees)]
                own = value[tuple(slice(0, size) for size in target.shape)]
                assert bool(torch.isnan(target).all()) or torch.equal(target, own), (spec.name, name, rank)
                assert value.count_nonzero() == own.count_nonzero(), "padding stays zero"
                target.copy_(own)
    tied = program.blocks[-1].borrows
    if tied:
        wholes[-1] = {"weight": wholes[0]["weight"], **wholes[-1]}
    return torch.cat([value.reshape(-1) for whole in wholes for value in whole.values()])


def flatten(blocks: Sequence[nn.Module]) -> Tensor:
    """All parameters of all blocks, shared ones repeated, as one fp64 row."""
    return torch.cat([p.detach().double().reshape(-1) for block in blocks for p in block.parameters()])


def _optimizer(parameters: Sequence[nn.Parameter]) -> torch.optim.AdamW:
    matrices = {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": ADAMW.weight_decay}
    others = {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0}
    return torch.optim.AdamW([matrices, others], lr=ADAMW.lr, betas=(ADAMW.beta1, ADAMW.beta2), eps=ADAMW.eps)


def _trainable(blocks: Sequence[nn.Module]) -> list[nn.Parameter]:
    return list({id(p): p for block in blocks for p in block.parameters() if p.requires_grad}.values())


@cache
def serial(model_name: str, batch: int, num_steps: int = NUM_STEPS) -> Outcome:
    """Train in fp64 on whole batches in this process, with torch's own clipping and AdamW."""
    model = MODELS[model_name]
    blocks = model.blocks(torch.float64)
    parameters = _trainable(blocks)
    optimizer = _optimizer(parameters)
    losses, norms = [], []
    for step in range(num_steps):
        tokens, labels = make_batch(step, batch)
        loss = model.objective(run_blocks(blocks, tokens), labels) / count_tokens(labels)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        norms.append(float(nn.utils.clip_grad_norm_(parameters, ADAMW.clip)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return Outcome(losses, norms, flatten(blocks))


@cache
def serial_bf16(model_name: str, batch: int) -> Outcome:
    """Train in this process on bf16 copies of fp32 parameters; gradients are scaled and clipped in fp32."""
    model = MODELS[model_name]
    blocks, masters = model.blocks(torch.bfloat16), _trainable(model.blocks(torch.float32))
    optimizer = _optimizer(masters)
    losses, norms = [], []
    for step in range(NUM_STEPS):
        tokens, labels = make_batch(step, batch)
        loss = model.objective(run_blocks(blocks, tokens), labels)
        torch.autograd.backward(loss)
        for master, working in zip(masters, _trainable(blocks), strict=True):
            assert working.grad is not None
            master.grad, working.grad = working.grad.float() / count_tokens(labels), None
        norms.append(float(nn.utils.clip_grad_norm_(masters, ADAMW.clip)))
        optimizer.step()
        for master, working in zip(masters, _trainable(blocks), strict=True):
            working.data.copy_(master.data)
        losses.append(float(loss.detach() / count_tokens(labels)))
    return Outcome(losses, norms, flatten(blocks))


def deviation(outcomes: Sequence[Outcome], reference: Outcome) -> dict[str, float]:
    """The largest absolute difference of any rank from the reference, by quantity."""
    worst = {"loss": 0.0, "norm": 0.0, "parameters": 0.0}
    for outcome in outcomes:
        for key, mine, wanted in (
            ("loss", outcome.losses, reference.losses),
            ("norm", outcome.norms, reference.norms),
            ("parameters", outcome.parameters.tolist(), reference.parameters.tolist()),
        ):
            differences = [abs(a - b) for a, b in zip(mine, wanted, strict=True)]
            worst[key] = max(worst[key], *(d if d == d else float("inf") for d in differences))
    return worst

"""Runs with gradients in a sparse format equal a simulation of the messages in one process, to 1e-10 in fp64."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from terrace.checkpoint.reading import Checkpoint, resume
from terrace.checkpoint.writing import save
from terrace.cluster.cluster import Cluster
from terrace.comm.codecs import sparse
from terrace.launch.start import LocalPool, World
from terrace.plan.flats import FlatParamSpec, block_flats
from terrace.plan.plan import Plan
from terrace.plan.wire import WireFormat, parse_format
from terrace.runtime.settings import OptimizerConfig
from tests.support.checkpoints import make, train
from tests.support.nightly import nightly
from tests.support.parity import TOLERANCE, Case, Outcome, deviation, exact, flatten, run
from tests.support.toys import MODELS, cluster_of, count_tokens, make_batch, run_blocks

SGD = OptimizerConfig(name="sgd", lr=0.3, momentum=0.5, weight_decay=0.0)
NUM_STEPS = 5
MODEL = "llama tied"

pytestmark = pytest.mark.timeout(360)


Gradients = dict[tuple[int, str], Tensor]  # by block and parameter


class Messages:
    """The messages of one flat buffer by tier, among ranks in mixed radix, the innermost tier fastest."""

    def __init__(self, sizes: tuple[int, ...], formats: dict[int, WireFormat]) -> None:
        self.sizes, self.formats = sizes, formats  # of the tiers; of those with a sparse format
        self.residuals: dict[object, Tensor] = {}

    def coded(self, key: object, values: Tensor, wire: WireFormat) -> Tensor:
        """`values` (n) as they arrive."""
        message = torch.empty(1, wire.message_bytes(len(values)), dtype=torch.uint8)
        residual = self.residuals.setdefault(key, torch.zeros(1, len(values))) if wire.feedback else None
        sparse.encode(values[None], wire, message, residual)
        decoded = torch.empty(1, len(values))
        sparse.decode(message, wire, decoded)
        return decoded[0].double()

    def peers(self, rank: int, tier: int) -> list[int]:
        stride = 1
        for size in self.sizes[:tier]:
            stride *= size
        place = rank // stride % self.sizes[tier]
        return [rank + (other - place) * stride for other in range(self.sizes[tier])]

    def scattered(self, name: str, values: list[Tensor], tier: int) -> list[Tensor]:
        """Each rank's part of the sum over a tier: its own exactly, those of others as they arrive."""
        found, wire = [], self.formats.get(tier)
        for rank in range(len(values)):
            peers = self.peers(rank, tier)
            total = torch.zeros_like(values[0].chunk(len(peers))[0])
            for peer in peers:
                part = values[peer].chunk(len(peers))[peers.index(rank)]
                total += part if wire is None or peer == rank else self.coded((name, tier, peer, rank), part, wire)
            found.append(total)
        return found

    def gathered(self, values: list[Tensor], tier: int) -> list[Tensor]:
        return [torch.cat([values[peer] for peer in self.peers(rank, tier)]) for rank in range(len(values))]

    def added(self, name: str, values: list[Tensor], tiers: list[int]) -> list[Tensor]:
        """The sums over tiers of the values that arrive, each rank's own included: coded once, however many tiers."""
        sums = [self.coded((name, rank), value, self.formats[tiers[0]]) for rank, value in enumerate(values)]
        for tier in tiers:
            sums = [torch.stack([sums[peer] for peer in self.peers(rank, tier)]).sum(0) for rank in range(len(sums))]
        return sums


def simulated(cluster: Cluster, plan: Plan, num_micros: int) -> Outcome:
    """Train in one process; values that ranks add up go through `Messages`, as docs/plans.md says."""
    model, world = MODELS[MODEL], cluster.world_size
    blocks, flats = model.blocks(torch.float64), block_flats(cluster, plan, model.declared)
    names, sizes = [tier.name for tier in cluster.tiers], tuple(tier.size for tier in cluster.tiers)
    places = [-1 if tier == "device" else names.index(tier) for tier in (plan.grads, plan.optimizer)]
    formats = {
        kind: {names.index(tier): parse_format(text) for tier, text in plan.wire.get(kind, {}).items()}
        for kind in ("reduce", "sync")
    }
    buffers = [(index, flat) for index, parts in enumerate(flats) for flat in parts]
    messages = [{kind: Messages(sizes, wires) for kind, wires in formats.items()} for _ in buffers]
    parameters = list({id(p): p for block in blocks for p in block.parameters()}.values())
    optimizer = torch.optim.SGD(parameters, lr=SGD.lr, momentum=SGD.momentum_or_default)
    losses, norms = [], []
    for step in range(NUM_STEPS):
        tokens, labels = make_batch(step, world * num_micros)
        count = float(count_tokens(labels))
        rows = [gradients_of(blocks, tokens[row : row + 1], labels[row : row + 1]) for row in range(len(tokens))]
        for (index, flat), of_buffer in zip(buffers, messages, strict=True):
            values = [flat_row(flat, index, found) for _, found in rows]
            total = summed(of_buffer, [values[first : first + world] for first in range(0, len(values), world)], places)
            start = 0
            for spec in flat.params:
                parameter = blocks[index].get_parameter(spec.name)
                parameter.grad = total[start : start + spec.numel].view(spec.shape) / count
                start += spec.numel
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, SGD.clip)))
        optimizer.step()
        losses.append(sum(loss for loss, _ in rows) / count)
    return Outcome(losses, norms, flatten(blocks))


def gradients_of(blocks: list[nn.Module], tokens: Tensor, labels: Tensor) -> tuple[float, Gradients]:
    for block in blocks:
        block.zero_grad()
    loss = MODELS[MODEL].objective(run_blocks(blocks, tokens), labels)
    torch.autograd.backward(loss)
    found = {(index, key): p.grad for index, block in enumerate(blocks) for key, p in block.named_parameters()}
    return float(loss.detach()), {key: gradient.clone() for key, gradient in found.items() if gradient is not None}


def summed(messages: dict[str, Messages], micros: list[list[Tensor]], places: list[int]) -> Tensor:
    """The sum of a flat buffer, of micro-batches and ranks; the same on all ranks."""
    grads, optimizer = places
    kept = [torch.zeros_like(value) for value in micros[0]]
    for tier in range(grads + 1):
        kept = [value.chunk(messages["sync"].sizes[tier])[0] for value in kept]
    for values in micros:
        for tier in range(grads + 1):
            values = messages["reduce"].scattered("reduce", values, tier)
        kept = [before + value for before, value in zip(kept, values, strict=True)]
    kept = synced(messages["sync"], kept, grads, optimizer)
    for tier in reversed(range(optimizer + 1)):
        kept = messages["sync"].gathered(kept, tier)
    assert all(torch.equal(each, kept[0]) for each in kept), "all ranks hold the same"
    return kept[0]


def flat_row(flat: FlatParamSpec, index: int, gradients: Gradients) -> Tensor:
    row = torch.zeros(flat.padded, dtype=torch.float64)
    own = torch.cat([gradients[index, spec.name].reshape(-1) for spec in flat.params])
    row[: len(own)] = own
    return row


def synced(messages: Messages, values: list[Tensor], grads: int, optimizer: int) -> list[Tensor]:
    """A rank's part of the sum over the tiers outside `grads`, on tier `optimizer`."""
    for tier in range(grads + 1, optimizer + 1):
        values = messages.scattered("sync", values, tier)
    outside = range(optimizer + 1, len(messages.sizes))
    whole = [tier for tier in outside if tier in messages.formats]
    exact = [tier for tier in outside if tier not in whole]
    for tier in exact:
        values = messages.scattered("sync", values, tier)
    values = messages.added("sync", values, whole) if whole else values
    for tier in reversed(exact):
        values = messages.gathered(values, tier)
    return values


def sparse_plan(preset: str, sizes: tuple[int, ...], **wire: dict[str, str]) -> Plan:
    return replace(exact(preset, cluster_of(*sizes)), wire=wire)


CASES = [
    ((2, 3), sparse_plan("ddp", (2, 3), sync={"package": "topk:64", "node": "topk:64"})),
    ((2, 2), sparse_plan("zero2", (2, 2), reduce={"package": "topk:32+feedback", "node": "topk:64+feedback"})),
    ((2, 2, 2), sparse_plan("hsdp", (2, 2, 2), sync={"system": "topk:32+feedback"})),
    *nightly(
        ((2, 2), sparse_plan("ddp", (2, 2), sync={"node": "topk:32+feedback"})),
        ((2, 2, 2), sparse_plan("three-level", (2, 2, 2), sync={"system": "topk:32+feedback"})),
        ((2, 2, 2), sparse_plan("ddp", (2, 2, 2), sync={"node": "topk+feedback", "system": "topk+feedback"})),
        ((3,), sparse_plan("ddp", (3,), sync={"package": "topk:32"})),
    ),
]


@pytest.mark.parametrize(
    ("sizes", "plan"), CASES, ids=lambda each: f"{each.name} {each.wire}" if isinstance(each, Plan) else None
)
def test_a_run_equals_the_simulation(pool: LocalPool, sizes: tuple[int, ...], plan: Plan) -> None:
    cluster, num_micros = cluster_of(*sizes), 2 if "reduce" in plan.wire else 1
    case = Case(plan, num_micros=num_micros, model=MODEL, optimizer=SGD, num_steps=NUM_STEPS)
    (outcomes,) = run(pool, cluster, [case])
    expected = simulated(cluster, plan, num_micros)
    found = deviation(outcomes, expected)
    assert max(found.values()) < TOLERANCE, found
    assert not any(outcome.complaint for outcome in outcomes), outcomes[0].complaint
    assert len({outcome.parameters.numpy().tobytes() for outcome in outcomes}) == 1, "the same bits on all ranks"
    dense = simulated(cluster, replace(plan, wire={}), num_micros)
    assert deviation(outcomes, dense)["parameters"] > 1e-3, "the format changes what is learned"


def continue_here(world: World, folder: Path, wire: dict[str, dict[str, str]]) -> tuple[list[float], list[float], str]:
    """Losses of six steps with a save after three, those after a resume there, and whether residuals are equal."""
    straight = make(world, (2, 2), "ddp", wire=wire)
    losses = train(straight, 0, 3)
    saved = save(straight, folder, 3, {}, keep=1)
    before = [residual.clone() for flat in straight.state for residual in flat.origin.residuals.values()]
    losses += train(straight, 3, 6)
    other = make(world, (2, 2), "ddp", scale=2.0, wire=wire)
    note = resume(other, Checkpoint(saved))
    after = [residual for flat in other.state for residual in flat.origin.residuals.values()]
    assert any(residual.any() for residual in before), "there is something to keep"
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    return losses, train(other, 3, 6), note


def test_residuals_of_whole_messages_are_in_checkpoints(pool: LocalPool, tmp_path: Path) -> None:
    wire = {"sync": {"node": "topk:32+feedback"}}
    for losses, again, note in pool.run(4, continue_here, tmp_path, wire):
        assert again == losses[3:]
        assert note == ""

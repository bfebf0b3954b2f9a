"""Memory of a layer on one of several ranks: tensors that autograd saves, and torch's peak."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from terrace.cluster.cluster import Cluster
from terrace.launch.start import World
from terrace.model.config import ModelConfig
from terrace.model.decoder import build_blocks
from terrace.plan.plan import Plan
from terrace.runtime.batch import Batch
from tests.support.allocations import addresses, allocated, saved_bytes, seeded
from tests.support.lanes import use_lane
from tests.support.tensor_memory import engine_of_one


@dataclass(frozen=True)
class LayerMemory:
    """Bytes that a layer saves, and alive at the peaks of its forward and its backward, its ends included."""

    saved: int
    forward_peak: int
    backward_peak: int


def layer_memory(
    world: World, cluster: Cluster, plans: Sequence[Plan], model: ModelConfig, sequence: int
) -> list[LayerMemory]:
    """Return the memory of the first layer under each plan, on this rank."""
    with use_lane("eager"), released():  # messages are packed by the thread that is looked at
        return [_layer_memory(world, cluster, plan, model, sequence) for plan in plans]


@contextmanager
def released() -> Iterator[None]:
    """Let exchanges of rows return when gloo's thread holds their tensors no longer.

    It lets go of them a moment after the call has returned. If it is the last to do so it frees them, out of sight of a
    profiler that records the calling thread.
    """
    patched: Any = dist
    exchange = patched.all_to_all_single

    def settled(received: Any, sent: Any, *others: Any, **more: Any) -> None:
        before = received._use_count(), sent._use_count()
        exchange(received, sent, *others, **more)
        while received._use_count() > before[0] or sent._use_count() > before[1]:
            time.sleep(1e-4)

    patched.all_to_all_single = settled
    try:
        yield
    finally:
        patched.all_to_all_single = exchange


def _layer_memory(world: World, cluster: Cluster, plan: Plan, model: ModelConfig, sequence: int) -> LayerMemory:
    blocks = build_blocks(model)
    engine = engine_of_one(world, cluster, plan, model, sequence, blocks)
    tokens = torch.zeros(plan.micro_batch, sequence, dtype=torch.int64)
    engine.step([Batch(tokens, tokens)], 1e-3)  # tables, masks and buffers are there from now on
    axis: Any = engine.axes[-1]
    layer: Any = blocks[1]
    axis.begin(0, Batch(tokens, tokens), False)
    shape, positions = tokens.shape, None
    if not plan.experts:  # context ranks
        positions = Batch(tokens, tokens).local(axis._layouts[0].token_layout).positions
        assert positions is not None
        shape = torch.Size((1, positions.shape[1]))
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[plan.compute]
    inputs = torch.randn(*shape, model.hidden_size, dtype=dtype, generator=seeded(0)).requires_grad_()

    def forward() -> Tensor:
        output: Tensor = layer(inputs, positions)
        return output

    gradient = torch.randn_like(forward())
    runner: Any = engine.runner
    runner.gradients.open(1)
    made = [] if layer.attention.rotary is None else layer.attention.rotary._packed._made.values()
    tables = [table for each in made for pair in each.values() for table in pair]
    saved = saved_bytes(forward, addresses([inputs, *layer.parameters(), *tables]))
    forward_peak, left, output = allocated(forward)
    with runner.passes._weights.recorded_in(runner.passes._weights.queue(hold=False)):
        backward_peak, _, _ = allocated(lambda: torch.autograd.backward(output, gradient))
    engine.close()
    backward = backward_peak + left + inputs.nbytes + gradient.nbytes
    return LayerMemory(saved, forward_peak + inputs.nbytes, backward)

"""Memory that a layer keeps for its backward on one tensor rank, as torch allocates it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from terrace.cluster.cluster import Cluster
from terrace.launch.start import World
from terrace.model.blocks import block_specs
from terrace.model.config import ModelConfig
from terrace.model.decoder import build_blocks, token_loss
from terrace.model.init import initial_value
from terrace.plan.plan import Plan
from terrace.program.instruction import Instruction, Op
from terrace.runtime.batch import Batch
from terrace.runtime.engine import Engine
from terrace.runtime.setup import Blocks, RankSetup, Workload
from tests.support.allocations import allocated

LAYER = 1


def engine_of_one(
    world: World, cluster: Cluster, plan: Plan, model: ModelConfig, sequence: int, blocks: list[nn.Module]
) -> Engine:
    """The engine of a decoder whose step has one micro-batch."""
    specs = block_specs(model)
    return Engine(
        Blocks(
            blocks,
            names=[spec.name for spec in specs],
            declared=specs,
            initial=lambda block, name, shape: initial_value(model, block, name, shape, 0),
        ),
        Workload(cluster=cluster, plan=plan, num_micros=1, sequence=sequence),
        token_loss,
        setup=RankSetup(rank=world.rank),
    )


def kept_by_a_layer(world: World, cluster: Cluster, plan: Plan, model: ModelConfig, sequence: int) -> int:
    """Return the bytes that a layer's FORWARD leaves allocated on this rank, with its input and without its output."""
    engine = engine_of_one(world, cluster, plan, model, sequence, build_blocks(model))
    executor, kept = engine.runner, []
    plain = executor.handlers[Op.FORWARD]

    def watched(now: Instruction) -> None:
        if now.block != LAYER:
            plain(now)
            return
        given = executor.passes.step.activations._made[False, now.block - 1, now.micro].nbytes
        _, left, _ = allocated(lambda: plain(now))
        kept.append(left - executor.passes.step.activations._made[False, now.block, now.micro].nbytes + given)

    executor.handlers[Op.FORWARD] = watched
    tokens = torch.zeros(plan.micro_batch, sequence, dtype=torch.int64)
    with late_waits():
        for _ in range(3):  # buffers of messages are there from the first step on
            engine.step([Batch(tokens, tokens)], 1e-3)
    engine.close()
    return min(kept)


@contextmanager
def late_waits() -> Iterator[None]:
    """Let every wait for a message last some milliseconds longer.

    The tensor of a message that gloo's thread lets go of last is freed there, where the profiler of the rank's own
    thread does not look: one step in eight counted a tensor that was gone. After such a wait gloo has let go of it.
    """
    plain = dist.Work.wait

    def late(work: dist.Work, *words: Any) -> bool:
        done = plain(work, *words)
        time.sleep(0.003)
        return done

    with patch.object(dist.Work, "wait", late):
        yield

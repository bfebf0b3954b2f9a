"""A decoder under `torch.distributed.pipelining`: one `PipelineStage` for every virtual stage of a rank.

    1f1b          Schedule1F1B                one stage per rank
    interleaved   ScheduleInterleaved1F1B     stage s on rank s mod P
    zbv           ScheduleZBVZeroBubble       two stages per rank, down the ranks and up again

With data ranks a stage's module is wrapped in a form that `PipelineStage` knows: replicated by
`DistributedDataParallel`, or sharded by FSDP2 (`fully_shard` on each block and on the stage). Both average over the
data ranks, which the loss makes up for: it is divided by the tokens of all of them and multiplied by their number.
Gradients are summed over micro-batches and not scaled afterwards.

With torch 2.13 some combinations give wrong gradients silently where a backward is split (`zbv`): DDP always, and FSDP2
when it reshards after a forward. `Trainer` refuses the first; the second is never asked for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from bench.common import ADAMW, Batch, torch_adamw
from terrace.model.decoder import IGNORE_INDEX, token_loss

SCHEDULES = ("1f1b", "interleaved", "zbv")
_GIVEN_UP = "the schedule wants another number of stages a rank"


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """The split into stages: `stages` is the number of blocks of every virtual stage, in model order."""

    schedule: str
    stages: tuple[int, ...]
    num_stage_ranks: int
    num_data_ranks: int = 1
    sharded: bool = False  # over the data ranks, by FSDP2; otherwise replicated

    def own(self, stage_rank: int) -> list[int]:
        """The virtual stages of a rank, in model order."""
        num_stages, num_ranks = len(self.stages), self.num_stage_ranks
        if self.schedule == "zbv":
            assert num_stages == 2 * num_ranks, _GIVEN_UP
            return [stage_rank, num_stages - 1 - stage_rank]
        assert num_stages == num_ranks or self.schedule == "interleaved", _GIVEN_UP
        return list(range(stage_rank, num_stages, num_ranks))

    def blocks(self, stage: int) -> range:
        """The blocks of a virtual stage."""
        end = list(accumulate(self.stages))[stage]
        return range(end - self.stages[stage], end)


class Trainer:
    """This rank's stages, their schedule and their optimizer. Every rank of the world makes one at the same point.

    Ranks are numbered as in the engine's clusters: data ranks of a stage are adjacent. `blocks` are all blocks of the
    model; only this rank's are used, and need real parameters.
    """

    def __init__(self, blocks: Sequence[nn.Module], pipeline: Pipeline, num_micros: int) -> None:
        replicated = pipeline.num_data_ranks > 1 and not pipeline.sharded
        assert not (pipeline.schedule == "zbv" and replicated), "zbv under DDP gives wrong gradients"
        self._pipeline = pipeline
        mesh = init_device_mesh(
            "cpu", (pipeline.num_stage_ranks, pipeline.num_data_ranks), mesh_dim_names=("pipeline", "data")
        )
        group = mesh.get_group("pipeline")
        self._data_group = mesh.get_group("data")
        self.stages = []
        for index in pipeline.own(mesh.get_local_rank("pipeline")):
            module = _beside_data(nn.Sequential(*(blocks[block] for block in pipeline.blocks(index))), pipeline, mesh)
            self.stages.append(PipelineStage(module, index, len(pipeline.stages), torch.device("cpu"), group=group))
        self._schedule = _schedule(pipeline.schedule, self.stages, num_micros)
        self._parameters = [parameter for stage in self.stages for parameter in stage.submod.parameters()]
        self._optimizer = torch_adamw(self._parameters)

    def step(self, batches: Sequence[Batch]) -> tuple[float, float]:
        """Train on this data rank's micro-batches of (tokens, labels); (mean loss, gradient norm)."""
        self.gradients(batches)
        loss, norm = self._clip()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss, norm

    def gradients(self, batches: Sequence[Batch]) -> None:
        """Run the schedule once."""
        tokens, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
        num_data_ranks = self._pipeline.num_data_ranks
        num_tokens = (labels != IGNORE_INDEX).sum()
        if num_data_ranks > 1:
            dist.all_reduce(num_tokens, group=self._data_group)
        holds_first, holds_last = self.stages[0].is_first, self.stages[-1].is_last
        losses: list[Tensor] = []
        self._schedule.step(
            *([tokens] if holds_first else []),
            target=labels if holds_last else None,
            losses=losses,
            return_outputs=False,
            loss_kwargs={"divisor": num_tokens.item() / num_data_ranks},
        )
        self._loss = sum(loss.item() for loss in losses) / num_data_ranks

    def _clip(self) -> tuple[float, float]:
        grads = [_local(p.grad) for p in self._parameters if p.grad is not None]
        squares = nn.utils.get_total_norm(grads).double().square()
        if not self._pipeline.sharded:
            squares /= self._pipeline.num_data_ranks  # every replica has added its equal copy
        sums = torch.stack([squares, torch.tensor(self._loss, dtype=torch.float64)])
        dist.all_reduce(sums)
        norm = sums[0].sqrt()
        scale = (ADAMW.clip / (norm + 1e-6)).clamp(max=1.0).item()
        for grad in grads:
            grad.mul_(scale)
        return sums[1].item(), norm.item()

    def kept_bytes(self, batches: Sequence[Batch]) -> int:
        """Run the schedule once more; the most bytes of parameters and their gradients at one time.

        Sampled after every forward and backward of a micro-batch, while FSDP2 holds gathered parameters and reduced
        gradients.
        """
        peak = [0]
        watched = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")
        for stage in self.stages:
            for name in watched:
                setattr(stage, name, _before(getattr(stage, name), lambda: self._look(peak)))
        self.gradients(batches)
        self._look(peak)
        self._optimizer.zero_grad(set_to_none=True)
        for stage in self.stages:
            for name in watched:
                delattr(stage, name)
        return peak[0]

    def _look(self, peak: list[int]) -> None:
        seen: dict[int, int] = {}
        gathered = [parameter for stage in self.stages for parameter in stage.submod.parameters()]
        for parameter in (*self._parameters, *gathered):
            for tensor in (parameter, parameter.grad):
                if tensor is not None:
                    storage = _local(tensor).untyped_storage()
                    seen[storage.data_ptr()] = storage.nbytes()
        peak[0] = max(peak[0], sum(seen.values()))


def _before(function: Callable[..., Any], look: Callable[[], None]) -> Callable[..., Any]:
    def looking(*arguments: Any, **named: Any) -> Any:
        result = function(*arguments, **named)
        look()
        return result

    return looking


def _local(tensor: Tensor) -> Tensor:
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach()


def _share(logits: Tensor, labels: Tensor, divisor: float) -> Tensor:
    return token_loss(logits, labels) / divisor


def _beside_data(stage: nn.Sequential, pipeline: Pipeline, mesh: DeviceMesh) -> nn.Module:
    if pipeline.num_data_ranks == 1:
        return stage
    if not pipeline.sharded:
        return DistributedDataParallel(stage, process_group=mesh.get_group("data"), gradient_as_bucket_view=True)
    for module in (*stage, stage):
        # A stage turns off resharding after a backward, so from the first one on parameters stay whole for the step;
        # resharding after a forward would only gather them again for every micro-batch.
        fully_shard(module, mesh=mesh["data"], reshard_after_forward=False)
    return stage


def _schedule(name: str, stages: Sequence[PipelineStage], num_micros: int) -> Any:
    options: dict[str, Any] = {"n_microbatches": num_micros, "loss_fn": _share, "scale_grads": False}
    if name == "1f1b":
        (stage,) = stages
        return Schedule1F1B(stage, **options)
    kinds: dict[str, Any] = {"interleaved": ScheduleInterleaved1F1B, "zbv": ScheduleZBVZeroBubble}
    return kinds[name](list(stages), **options)

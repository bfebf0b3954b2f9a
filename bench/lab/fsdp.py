"""torch's FSDP2 (`fully_shard`) as ZeRO-3, with a node-wide reshard (hpZ), and as HSDP.

On gloo it needs three things, none of which slows it down: sums in place of averages; a ring for its reduce-scatter
(reasons in `ring.py`); and asynchronous gathers with explicit prefetching, because by default its overlap comes from
CUDA streams alone.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from bench.lab.contest import Contestant, Setting, torch_contestant
from bench.lab.ring import ring_reduce_scatter
from terrace.model.decoder import token_loss


class ReduceScatter:
    """FSDP2's reduce-scatter as `reduce(output, input, op, group)`, which blocks, as FSDP2 does on a CPU anyway."""

    def __init__(self, reduce: Callable[[Tensor, Tensor, Any, dist.ProcessGroup], None]) -> None:
        self._reduce = reduce

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer; FSDP2 asks for its inputs and outputs here."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        self._reduce(output_tensor, input_tensor, op, group)


def make(setting: Setting, *, mesh: str = "flat", reshard: str = "all") -> Contestant:
    """The training loop; `mesh` is flat or hybrid, `reshard` the placement after a forward."""
    job = setting.job
    if mesh == "hybrid":
        shape, names = (job.num_nodes, job.ranks_per_node), ("replicate", "shard")
        device_mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    else:
        device_mesh = init_device_mesh("cpu", (job.world_size,), mesh_dim_names=("shard",))
    model = _shard(setting.blocks, device_mesh, True if reshard == "all" else job.ranks_per_node)
    num_tokens = setting.num_micros * setting.micro_tokens  # of one rank; FSDP2 averages over ranks

    def loss_of(tokens: Tensor, labels: Tensor, is_last: bool) -> Tensor:
        model.set_requires_all_reduce(is_last)
        return token_loss(model(tokens), labels) / num_tokens

    return torch_contestant(list(model.parameters()), loss_of)


def _shard(blocks: list[nn.Module], mesh: Any, reshard: bool | int) -> Any:
    model: Any = nn.Sequential(*blocks)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for block in model:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
        block.set_custom_reduce_scatter(ReduceScatter(ring_reduce_scatter))
        block.set_force_sum_reduction_for_comms(True)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    model._set_unshard_async_op(True)  # the only way to overlap a gather without CUDA streams
    for block, following in pairwise(model):
        block.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([block])
    return model

"""torch's FSDP2 (`fully_shard`) as ZeRO-3, with a node-wide reshard (hpZ), and as HSDP."""

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from bench.lab.contest import Contestant, Setting, torch_contestant
from bench.lab.ring import ring_reduce_scatter
from bench.torch_fsdp import sharded
from terrace.model.decoder import token_loss


def make(
    setting: Setting, *, mesh: str = "flat", reshard: str = "all", prefetch: int = 1, fused: int = 1, keep: str = ""
) -> Contestant:
    """The training loop; `mesh` is flat or hybrid, `reshard` the placement after a forward.

    `prefetch` blocks are gathered ahead in both directions; `fused` blocks share a message. `keep` = "backward" keeps
    parameters from forward to backward, "step" until the last micro-batch, in which all gradients are reduced.
    """
    job = setting.job
    if mesh == "hybrid":
        shape, names = (job.num_nodes, job.ranks_per_node), ("replicate", "shard")
        device_mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    else:
        device_mesh = init_device_mesh("cpu", (job.world_size,), mesh_dim_names=("shard",))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    after = not keep if reshard == "all" else job.ranks_per_node
    model = sharded(
        setting.blocks, device_mesh, ring_reduce_scatter, reshard=after, policy=policy, prefetch=prefetch, fused=fused
    )
    num_tokens = setting.num_micros * setting.micro_tokens  # of one rank; FSDP2 averages over ranks

    def loss_of(tokens: Tensor, labels: Tensor, is_last: bool) -> Tensor:
        if keep == "step":
            model.set_requires_gradient_sync(is_last)
            model.set_reshard_after_backward(is_last)
        else:
            model.set_requires_all_reduce(is_last)
        return token_loss(model(tokens), labels) / num_tokens

    return torch_contestant(list(model.parameters()), loss_of)

"""torch's DDP with its hooks: gradients in bf16, PowerSGD, and local steps with averages of parameters."""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

from bench.common import torch_trainer
from bench.lab.contest import Batch, Contestant, Result, Setting, new_adamw, optimizer_tensors
from bench.lab.job import ADAMW
from bench.slow.contestants import EVERY
from terrace.model.decoder import token_loss


def make(setting: Setting, *, hook: str) -> Contestant:
    """The training loop with `hook`: bf16, powersgd or post_local_sgd."""
    # One bucket for PowerSGD: on gloo the second messages of buckets start when the first have come, in any order, and
    # ranks that differ in it abort.
    bucket_mb = 1024 if hook == "powersgd" else None
    whole = nn.Sequential(*setting.blocks)
    model: Any = DistributedDataParallel(whole, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb)
    if hook == "bf16":
        # By its own name DDP refuses the hook on any backend but NCCL, although gloo sums bf16.
        model.register_comm_hook(None, lambda state, bucket: bf16_compress_hook(state, bucket))
    elif hook == "powersgd":
        # Its defaults (rank 1, error feedback, warm start), as soon as it allows.
        state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook)
    else:
        new_state: Any = PostLocalSGDState  # untyped
        local = new_state(None, inner_group(setting), start_localSGD_iter=0)
        model.register_comm_hook(local, post_localSGD_hook)
    train, optimizer = trainer(setting, model)
    if hook == "post_local_sgd":
        averager, parameters = PeriodicModelAverager(period=EVERY), list(model.parameters())
        # It leaves out parameters without a gradient, so it has to come before gradients are dropped.
        optimizer.register_step_post_hook(lambda *_: averager.average_parameters(parameters))

    def step(batches: Sequence[Batch]) -> Result:
        loss, norm = train(batches)
        return Result(loss=loss, grad_norm=norm.item())

    return Contestant(step=step, states=lambda: optimizer_tensors(optimizer))


def inner_group(setting: Setting) -> Any:
    """The ranks of this rank's node."""
    job, found = setting.job, None
    for first in range(0, job.world_size, job.ranks_per_node):
        ranks = list(range(first, first + job.ranks_per_node))
        group = dist.new_group(ranks)  # by all ranks, in this order
        found = group if setting.rank in ranks else found
    assert found is not None, f"rank {setting.rank} of {job.world_size} is on no node"
    return found


def trainer(setting: Setting, model: Any) -> tuple[Any, Any]:
    """A step of a model, from micro-batches to (loss, gradient norm), and its optimizer."""
    assert setting.num_micros == 1, "these hooks send every backward's gradients"
    parameters = list(model.parameters())
    optimizer = new_adamw(parameters)

    def loss_of(tokens: Tensor, labels: Tensor, is_last: bool) -> Tensor:
        return token_loss(model(tokens), labels) / setting.micro_tokens  # averaged over ranks by the model

    return torch_trainer(parameters, optimizer, loss_of, ADAMW.clip), optimizer

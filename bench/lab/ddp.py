"""torch's DDP: everything replicated, gradients in bf16 on the wire."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from bench.lab.contest import Contestant, Setting, torch_contestant
from terrace.model.decoder import token_loss


def make(setting: Setting, *, bucket_mb: int = 25) -> Contestant:
    """The training loop, with buckets of `bucket_mb` MB of fp32 gradients."""
    whole = nn.Sequential(*setting.blocks)
    model: Any = DistributedDataParallel(whole, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb)
    # By its own name DDP refuses the hook on any backend but NCCL, although gloo sums bf16.
    model.register_comm_hook(None, lambda state, bucket: bf16_compress_hook(state, bucket))
    num_tokens = setting.num_micros * setting.micro_tokens  # of one rank; DDP averages over ranks

    def loss_of(tokens: Tensor, labels: Tensor, is_last: bool) -> Tensor:
        # A backward adds to the gradients of a forward without synchronisation alone.
        with nullcontext() if is_last else model.no_sync(), torch.autocast("cpu", torch.bfloat16):
            logits = model(tokens)
        return token_loss(logits, labels) / num_tokens

    return torch_contestant(list(model.parameters()), loss_of)

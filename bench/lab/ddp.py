"""torch's DDP: everything replicated, gradients in bf16 on the wire."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from bench.lab.contest import Batch, Contestant, Result, Setting, new_adamw, optimizer_tensors
from bench.lab.job import ADAMW
from terrace.model.decoder import token_loss


def make(setting: Setting) -> Contestant:
    """The training loop."""
    model: Any = DistributedDataParallel(nn.Sequential(*setting.blocks), gradient_as_bucket_view=True)
    # By its own name DDP refuses the hook on any backend but NCCL, although gloo sums bf16.
    model.register_comm_hook(None, lambda state, bucket: bf16_compress_hook(state, bucket))
    parameters = list(model.parameters())
    optimizer = new_adamw(parameters)
    num_tokens = setting.num_micros * setting.micro_tokens  # of one rank; DDP averages over ranks

    def step(batches: Sequence[Batch]) -> Result:
        total = torch.zeros(())
        for micro, (tokens, labels) in enumerate(batches):
            with nullcontext() if micro == len(batches) - 1 else model.no_sync():
                with torch.autocast("cpu", torch.bfloat16):
                    logits = model(tokens)
                loss = token_loss(logits, labels) / num_tokens
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(parameters, ADAMW.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return Result(loss=total.item(), grad_norm=norm.item())

    return Contestant(step=step, states=lambda: optimizer_tensors(optimizer))

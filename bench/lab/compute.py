"""Compute alone: a plain loop in every rank, and no message. Its processor seconds are those that any step needs.

Parameters are bf16. A rank updates the fp32 masters of its share of the parameters, so that all ranks together do the
work of one update; its other parameters keep their values, so losses do not follow those of training.
"""

from collections.abc import Sequence

import torch
from torch import nn

from bench.lab.contest import Batch, Contestant, Result, Setting, new_adamw, optimizer_tensors
from bench.lab.job import ADAMW
from terrace.model.decoder import token_loss


def make(setting: Setting) -> Contestant:
    """The loop."""
    model = nn.Sequential(*setting.blocks)
    shares = split(list(model.parameters()), setting.job.world_size)
    own = shares[setting.rank]
    masters = [nn.Parameter(parameter.detach().clone()) for parameter in own]
    model.to(torch.bfloat16)
    optimizer = new_adamw(masters)
    num_tokens = setting.num_micros * setting.micro_tokens

    def step(batches: Sequence[Batch]) -> Result:
        total = 0.0
        for tokens, labels in batches:
            loss = token_loss(model(tokens), labels) / num_tokens
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        for master, parameter in zip(masters, own, strict=True):
            assert parameter.grad is not None, "every parameter has a gradient"
            master.grad = parameter.grad.float()
        norm = nn.utils.clip_grad_norm_(masters, ADAMW.clip)
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, own, strict=True):
                parameter.copy_(master)
        model.zero_grad(set_to_none=True)
        return Result(loss=total, grad_norm=norm.item())

    return Contestant(step=step, states=lambda: optimizer_tensors(optimizer))


def split(parameters: Sequence[nn.Parameter], num_shares: int) -> list[list[nn.Parameter]]:
    """The parameters in shares of nearly equal size: the largest first, each to the smallest share."""
    shares: list[list[nn.Parameter]] = [[] for _ in range(num_shares)]
    sizes = [0] * num_shares
    for parameter in sorted(parameters, key=lambda each: -each.numel()):
        smallest = sizes.index(min(sizes))
        shares[smallest].append(parameter)
        sizes[smallest] += parameter.numel()
    return shares

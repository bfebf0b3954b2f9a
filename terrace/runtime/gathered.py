"""Gathers values of every rank as JSON or as tensors. Nothing from another process is unpickled."""

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from terrace.comm.byte_views import as_bytes


def gather_plain(value: Any, device: torch.device, group: Any = None) -> list[Any]:
    """Gather `value` from every rank of `group` (default: the world), in rank order. Each of them calls this.

    Raises `TypeError` for a value that JSON cannot hold.
    """
    raw = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    return [json.loads(bytes(each.cpu().numpy())) for each in gather_bytes(raw, group)]


def gather_tensors(tensors: Sequence[Tensor], device: torch.device, group: Any = None) -> list[list[Tensor]]:
    """Gather the CPU `tensors` of every rank, in rank order. Number, shapes and dtypes may differ between ranks."""
    kinds = [[str(each.dtype).removeprefix("torch."), list(each.shape)] for each in tensors]
    parts = [as_bytes(each.reshape(-1)) for each in tensors if each.numel()]
    own = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
    found = []
    for kinds_there, raw in zip(gather_plain(kinds, device, group), gather_bytes(own.to(device), group), strict=True):
        left, there = raw.cpu(), []
        for name, shape in kinds_there:
            like = torch.empty(shape, dtype=getattr(torch, name))
            mine, left = left[: like.nbytes], left[like.nbytes :]
            # Copied to a new tensor: a slice of bytes may be misaligned for its dtype.
            like.view(-1).view(torch.uint8).copy_(mine)
            there.append(like)
        found.append(there)
    return found


def gather_bytes(own: Tensor, group: Any = None) -> list[Tensor]:
    """Gather a 1-D uint8 tensor from every rank. Lengths may differ."""
    size = torch.tensor([own.numel()], device=own.device)
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    counts = [int(each) for each in sizes]
    # Padded to the longest, since a gather wants equal lengths.
    padded = own.new_zeros(max(counts))
    padded[: own.numel()] = own
    rows = [torch.empty_like(padded) for _ in counts]
    if len(padded):
        dist.all_gather(rows, padded, group=group)
    return [row[:count] for row, count in zip(rows, counts, strict=True)]

"""The input of every rank of `terrace train`."""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from terrace.data.batches import Source
from terrace.train.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class RunJob:
    """Input of every rank: the run, its folder, its data, and the checkpoint to resume from."""

    run: RunConfig
    folder: Path
    sources: tuple[Source, ...]
    tokenizer_fingerprint: str
    resume: Path | None = None


def device_of() -> torch.device:
    """Device of this rank: its GPU if ranks talk over nccl, else the CPU."""
    if dist.get_backend() != "nccl":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())  # set on joining the world

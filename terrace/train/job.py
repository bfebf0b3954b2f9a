"""The input of every rank of `terrace train`."""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from terrace.checkpoint.layout import latest
from terrace.data.batches import Source
from terrace.data.eval_batches import EvalSource
from terrace.train.config import RunConfig
from terrace.train.runs import again


@dataclass(frozen=True, kw_only=True)
class JobInputs:
    """Inputs of every rank besides the run: the folder, the data, and the checkpoint to resume from.

    `config` is the new content of config.toml, if the folder has one of an earlier start; rank 0 writes it once all
    ranks are ready and it holds the folder's lock. `changes` lists settings that differ from that file's. `memory` is
    the manifest of a checkpoint in the memory of machines, and `resume` is then its folder on this one. `eval_sources`
    are only evaluated.
    """

    folder: Path
    sources: tuple[Source, ...]
    tokenizer_fingerprint: str
    resume: Path | None = None
    config: str = ""
    changes: tuple[str, ...] = ()
    memory: str = ""
    eval_sources: tuple[EvalSource, ...] = ()
    command: str = "terrace"  # as the user has called it


@dataclass(frozen=True, kw_only=True)
class RunJob(JobInputs):
    """A run configuration with its inputs."""

    run: RunConfig

    def again(self) -> str:
        """The user's command to continue the run, with a note on the saved checkpoints."""
        return again(self.command, self.folder, "train", is_saved=latest(self.folder) is not None)


def device_of() -> torch.device:
    """Device of this rank: its GPU under nccl, else the CPU."""
    if dist.get_backend() != "nccl":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())  # set on joining the world

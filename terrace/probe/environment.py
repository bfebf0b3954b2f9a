"""Environment variables that affect how ranks start and communicate; read here, never set."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from terrace.launch.launchers import names, place

_OTHERS = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "TERRACE_PACE")
_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_")


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Ranks started by a launcher; `local` is None if it does not report the number per machine."""

    world_size: int
    local: int | None = None


def launcher_variables() -> dict[str, str]:
    found = {name: os.environ[name] for name in (*names(), *_OTHERS) if name in os.environ}
    return found | {name: value for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)}


def environment_variables() -> Mapping[str, str]:
    return dict(os.environ)


def launched_ranks() -> Ranks | None:
    """Ranks that a launcher started, including this process; None without a launcher."""
    found = place(os.environ)
    if found is None:
        return None
    local = found.local_world_size
    if local is None and found.launcher == "srun":
        nodes = os.environ.get("SLURM_STEP_NUM_NODES") or os.environ.get("SLURM_NNODES", "")
        whole = nodes.isdecimal() and int(nodes) > 0 and found.world_size % int(nodes) == 0
        local = found.world_size // int(nodes) if whole else None
    return Ranks(world_size=found.world_size, local=local)

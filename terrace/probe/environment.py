"""Environment variables that decide how ranks start and communicate; read here, set nowhere."""

import os

_NAMES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_PROCID",
    "SLURM_NTASKS",
    "SLURM_LOCALID",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "TERRACE_PACE",
)
_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_")


def launcher_variables() -> dict[str, str]:
    """The set variables of launchers and communication libraries."""
    found = {name: os.environ[name] for name in _NAMES if name in os.environ}
    return found | {name: value for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)}

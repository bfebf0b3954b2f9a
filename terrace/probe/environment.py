"""Environment variables that decide how ranks start and communicate; read here, set nowhere."""

import os

from terrace.launch.launchers import names

_OTHERS = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "TERRACE_PACE")
_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_")


def launcher_variables() -> dict[str, str]:
    """The set variables of launchers and communication libraries."""
    found = {name: os.environ[name] for name in (*names(), *_OTHERS) if name in os.environ}
    return found | {name: value for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)}

"""Whether this machine has the devices of a run, and those that the run leaves idle."""

from terrace.base.errors import ConfigError, PlanError
from terrace.base.words import counted
from terrace.launch.start import local_devices
from terrace.rl.config import RlConfig


def check_devices(config: RlConfig, ray: str) -> None:
    """Raise `ConfigError` or `PlanError` if a run has CUDA devices that this machine or Ray does not."""
    if config.cluster.device.type == "cpu":
        return
    if ray:
        raise ConfigError(
            f"cluster {config.cluster.name!r} has CUDA devices, and under Ray roles run on CPUs: add "
            "--cluster.device.backend cpu, or leave out --ray"
        )
    ranks, num_devices = config.cluster.world_size, len(local_devices())
    if num_devices < ranks:
        raise PlanError(
            f"cluster {config.cluster.name!r} has {counted(ranks, 'rank')} with a CUDA device each, and this machine "
            f"has {counted(num_devices, 'CUDA device')}: give it fewer ranks, such as --cluster.tiers.NAME.size 1, or "
            "try it on this machine's CPU with --cluster.device.backend cpu"
        )


def unused_gpus(config: RlConfig, ray: str) -> str:
    """A line on GPUs of this machine that the run leaves idle; "" if there are none."""
    num = len(local_devices())
    if not num or ray or config.cluster.device.type != "cpu":
        return ""
    return (
        f"\nroles run on the CPU, as device.backend of cluster {config.cluster.name!r} says: {counted(num, 'GPU')} of "
        "this machine not used"
    )

"""A machine on which everything is as it should be."""

from terrace.probe.machine import PACKAGES, Machine

SOUND = Machine(
    python=(3, 11, 7),
    system="Linux",
    num_cores=8,
    memory_bytes=64_000_000_000,
    free_memory_bytes=32_000_000_000,
    free_disk_bytes=100_000_000_000,
    interfaces=("lo", "eth0"),
    fabrics=(),
    has_nvidia=False,
    open_files=65536,
    locked_bytes=-1,
    variables={},
    packages=dict.fromkeys(PACKAGES, "2.13.0"),
    has_nccl=False,
    has_gloo=True,
)

"""The lab's only reading and setting of environment variables."""

import fcntl
import os
import socket
import struct
import sys
from dataclasses import dataclass

_SIOCGIFADDR = 0x8915  # of Linux: the address of an interface
MARK = "LAB-RESULT "  # begins the line of output that holds a case's record


@dataclass(frozen=True)
class Place:
    """Rank and world size of this process, from torchrun's variables."""

    rank: int
    world_size: int


def place() -> Place:
    """This process's place; exits with one line when no launcher set it."""
    try:
        return Place(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    except KeyError as missing:
        sys.exit(f"{missing} is not set: start ranks by `python -m bench.lab`, not by hand")


def tell_deepspeed(ranks_per_node: int) -> None:
    """Set the variables that DeepSpeed reads at import: on a CPU it would count NUMA nodes as devices of a node."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["LOCAL_SIZE"] = str(ranks_per_node)
    os.environ["DS_BUILD_OPS"] = "0"


def child_environment() -> dict[str, str]:
    """The environment for ranks: eight processes on few cores do best with one thread each."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}


def is_root() -> bool:
    """Whether this process may make network namespaces."""
    return os.geteuid() == 0


def own_address() -> str:
    """This process's address among the ranks: that of its gloo interface, or of the loopback."""
    name = os.environ.get("GLOO_SOCKET_IFNAME")
    if name is None:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", name.encode())
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])

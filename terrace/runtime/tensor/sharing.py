"""Shared memory between the rows of a tensor axis, for messages fused with products."""

import socket

from terrace.comm import symmetric
from terrace.plan.layout import INSIDE
from terrace.plan.tensor_traffic import shared_bytes
from terrace.runtime.comm import Comm


def fused_operators(comm: Comm) -> symmetric.Operators | None:
    """The fused operators, with newly shared memory; None if the plan does not fuse tensor messages.

    Every rank calls this. Raises `PlanError` if the ranks of a line are on several hosts.
    """
    program = comm.program
    if not program.plan.fuses_tensor:
        return None
    found = symmetric.operators(comm.device)
    (tier,) = program.mesh.tiers("rows")
    rows = comm.groups.of(INSIDE, program.model.tensor.rows, tier)
    hosts = comm.exchange(socket.gethostname())
    symmetric.check_one_host([hosts[rank] for rank in rows.ranks])
    num_bytes = shared_bytes(program.model.tensor, program.blocks)
    found.share(rows.handle.group_name, num_bytes)
    comm.meter.add("buffers", num_bytes)
    return found

"""Memory that the rows of a tensor axis share, where their messages are fused with products."""

import socket

from terrace.comm import symmetric
from terrace.plan.layout import INSIDE
from terrace.plan.tensor_traffic import shared_bytes
from terrace.runtime.comm import Comm


def fused_operators(comm: Comm) -> symmetric.Operators | None:
    """The operators of a plan with fused tensor messages, on memory that is shared now; None of another plan.

    Every rank calls this. Raises `PlanError` where the ranks of a line share no memory.
    """
    program = comm.program
    if not program.plan.fuses_tensor:
        return None
    found = symmetric.operators(comm.device)
    (tier,) = program.mesh.tiers("rows")
    rows = comm.groups.of(INSIDE, program.tensor.rows, tier)
    hosts = comm.exchange(socket.gethostname())
    symmetric.check_one_host([hosts[rank] for rank in rows.ranks])
    num_bytes = shared_bytes(program.tensor, program.blocks)
    found.share(rows.handle.group_name, num_bytes)
    comm.meter.add("buffers", num_bytes)
    return found

"""A reduce-scatter for gloo with the traffic of a ring: (W - 1) / W of the buffer per rank.

gloo's own sends as much as its all-reduce, twice that. An all-to-all with a local sum also sends (W - 1) / W per rank,
but far more between two halves of the ring: each rank of one node sends to each of the other. So every rival that
reduce-scatters gets this ring, as NCCL would provide it.
"""

from typing import Any

import torch
import torch.distributed as dist


def ring_reduce_scatter(
    output: torch.Tensor,
    given: torch.Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> None:
    """Sum the W equal pieces of `given` over the group; piece r goes to `output` of rank r. Blocks.

    The travelling partial sum is rounded to the dtype of `given` at each hop. `output` may be a part of `given`.
    """
    assert op == dist.ReduceOp.SUM, f"{op} was asked for, but the ring only sums"
    group = group or dist.group.WORLD
    assert group is not None, "the process group is not initialised"
    size, rank = group.size(), dist.get_rank(group)
    pieces = given.view(size, -1)
    carried, incoming = pieces[rank - 1], torch.empty_like(pieces[0])
    for hop in range(2, size + 1):
        sent = dist.isend(carried, group=group, group_dst=(rank + 1) % size)
        received = dist.irecv(incoming, group=group, group_src=(rank - 1) % size)
        assert sent is not None, "this process is not in the group"
        assert received is not None, "this process is not in the group"
        received.wait()
        total = incoming + pieces[rank - hop]
        sent.wait()  # before its buffer changes
        carried = total
    output.view(-1).copy_(carried)

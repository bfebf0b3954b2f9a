"""Blocks of a decoder under torch's FSDP2 (`fully_shard`), at its best on gloo.

On gloo it needs three things, none of which slows it down: sums in place of averages; another reduce-scatter, since
gloo's own sends twice the bytes; and asynchronous gathers with explicit prefetching of the next block in both
directions, because by default its overlap comes from CUDA streams alone.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

Reduce = Callable[[Tensor, Tensor, Any, dist.ProcessGroup], None]  # output, input, op, group; blocks


class ReduceScatter:
    """FSDP2's reduce-scatter as a function, which blocks, as FSDP2 does on a CPU anyway."""

    def __init__(self, reduce: Reduce) -> None:
        self._reduce = reduce

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer; FSDP2 asks for its inputs and outputs here."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        self._reduce(output_tensor, input_tensor, op, group)


def exchange_reduce_scatter(output: Tensor, given: Tensor, op: Any, group: dist.ProcessGroup) -> None:
    """Sum `given` into `output` by an all-to-all and a local sum, (W - 1) / W of the buffer a rank; blocks."""
    assert op == dist.ReduceOp.SUM, f"{op} was asked for, but the pieces are only summed"
    incoming = torch.empty_like(given)
    dist.all_to_all_single(incoming, given, group=group)
    torch.sum(incoming.view(group.size(), -1), 0, out=output.view(-1))


def sharded(
    blocks: Sequence[nn.Module],
    mesh: Any,
    reduce: Reduce,
    *,
    reshard: bool | int = True,
    policy: MixedPrecisionPolicy | None = None,
    prefetch: int = 1,
    fused: int = 1,
) -> Any:
    """The blocks in sequence, each sharded over `mesh` and reduced by `reduce`; `reshard` as `fully_shard` has it.

    `prefetch` blocks are gathered ahead in both directions; `fused` blocks that follow one another share a message.
    """
    groups = blocks if fused == 1 else [nn.Sequential(*blocks[at : at + fused]) for at in range(0, len(blocks), fused)]
    model: Any = nn.Sequential(*groups)
    policy = policy or MixedPrecisionPolicy()
    for block in model:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
        block.set_custom_reduce_scatter(ReduceScatter(reduce))
        block.set_force_sum_reduction_for_comms(True)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    model._set_unshard_async_op(True)  # the only way to overlap a gather without CUDA streams
    parts = list(model)
    for number, block in enumerate(parts):
        block.set_modules_to_forward_prefetch(parts[number + 1 : number + 1 + prefetch])
        block.set_modules_to_backward_prefetch(parts[max(0, number - prefetch) : number][::-1])
    return model

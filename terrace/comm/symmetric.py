"""Matrix products fused with messages, on torch's symmetric memory (CUDA only).

    gather     [x_0; ...; x_n-1] W for every W, each part of x multiplied while others are copied from their ranks
    scatter    this rank's part of the sum of x_r W, each part copied while others are multiplied

torch.ops.symm_mem.fused_all_gather_matmul and fused_matmul_reduce_scatter (torch 2.11 to 2.13) are private to torch
and have no CPU version. Only `operators` names them, so that a test can replace them by equivalent functions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from terrace.accelerator import has_streams
from terrace.base.errors import PlanError

_INSTEAD = "write a number of parts instead, plan.tensor_chunks = 4"


@dataclass(frozen=True)
class Operators:
    """Products among the ranks of a group, which is passed by name.

    `gather` takes x (m, K), matrices (K, N) and the group; it returns the x of all ranks (n m, K), in rank order, and
    its products (n m, N). `scatter` takes x (n m, K), a matrix (K, N) and the group, and returns this rank's part
    (m, N). `share` allocates a number of bytes shared by the ranks of a group; call it before any product.
    """

    gather: Callable[[Tensor, Sequence[Tensor], str], tuple[Tensor, list[Tensor]]]
    scatter: Callable[[Tensor, Tensor, str], Tensor]
    share: Callable[[str, int], None]


def operators(device: torch.device) -> Operators:
    """Torch's operators for a device. Raises `PlanError` if it has none."""
    if not has_streams(device):
        raise PlanError(
            f"tensor_chunks = 'fused' needs CUDA: a {device.type.upper()} has no symmetric memory; {_INSTEAD}"
        )
    try:
        import torch.distributed._symmetric_memory  # defines the operators

        found = torch.ops.symm_mem.fused_all_gather_matmul, torch.ops.symm_mem.fused_matmul_reduce_scatter
    except (ImportError, AttributeError) as error:
        raise PlanError(
            f"tensor_chunks = 'fused': torch {torch.__version__} has no fused products on symmetric memory ({error}); "
            f"{_INSTEAD}"
        ) from error
    gather_matmul, matmul_scatter = found

    def gather(x: Tensor, matrices: Sequence[Tensor], group: str) -> tuple[Tensor, list[Tensor]]:
        whole, products = gather_matmul(x.contiguous(), list(matrices), 0, group, return_A=True)
        return whole, products

    def scatter(x: Tensor, matrix: Tensor, group: str) -> Tensor:
        part: Tensor = matmul_scatter(x.contiguous(), matrix, "sum", 0, group)
        return part

    return Operators(gather, scatter, _share)


def check_one_host(hosts: Sequence[str]) -> None:
    """Raise `PlanError` unless all `hosts`, those of the ranks that share memory, are the same."""
    if len(set(hosts)) > 1:
        raise PlanError(
            f"tensor_chunks = 'fused': tensor rows are on hosts {' and '.join(sorted(set(hosts)))}, and share memory "
            f"on one host alone; map them to one, or {_INSTEAD}"
        )


def _share(group: str, num_bytes: int) -> None:
    # Allocated once, before any step: otherwise devices that cannot read each other's memory would fail in the middle
    # of a step, and a workspace that grows is shared again each time.
    from torch.distributed._symmetric_memory import get_symm_mem_workspace

    try:
        get_symm_mem_workspace(group, num_bytes)  # type: ignore[arg-type]
    except RuntimeError as error:
        reason = str(error).strip().splitlines() or ["no reason given"]
        raise PlanError(
            f"tensor_chunks = 'fused': devices of tensor rows cannot share memory ({reason[0]}); {_INSTEAD}"
        ) from error

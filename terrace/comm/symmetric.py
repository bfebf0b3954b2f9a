"""Products fused with messages, on memory that the ranks of a group share: torch's symmetric memory, on CUDA.

    gather     [x_0; ...; x_n-1] W of every W, each part of x multiplied while others are copied from their ranks
    scatter    this rank's part of the sum of x_r W, each part copied while others are multiplied

torch.ops.symm_mem.fused_all_gather_matmul and fused_matmul_reduce_scatter (torch 2.11 to 2.13) are private to torch and
have no CPU form. `operators` is the only place that names them, so a test may put other functions with the same results
in its place.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from terrace.base.errors import PlanError

_INSTEAD = "write a number of parts instead, plan.tensor_chunks = 4"


@dataclass(frozen=True)
class Operators:
    """Products of the ranks of a group, given by its name.

    `gather` takes x (m, K), matrices (K, N) and the group; it returns the x of all ranks (n m, K), in rank order, and
    its products (n m, N). `scatter` takes x (n m, K), a matrix (K, N) and the group, and returns this rank's part (m,
    N). `share` reserves a number of bytes that the ranks of a group share, before anything is computed.
    """

    gather: Callable[[Tensor, Sequence[Tensor], str], tuple[Tensor, list[Tensor]]]
    scatter: Callable[[Tensor, Tensor, str], Tensor]
    share: Callable[[str, int], None]


def operators(device: torch.device) -> Operators:
    """Torch's operators for a device; raises `PlanError` where it has none."""
    if device.type != "cuda":
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
    """Raise `PlanError` unless ranks that are to share memory are on one host, by the `hosts` of all of them."""
    if len(set(hosts)) > 1:
        raise PlanError(
            f"tensor_chunks = 'fused': tensor rows are on hosts {' and '.join(sorted(set(hosts)))}, and share memory "
            f"on one host alone; map them to one, or {_INSTEAD}"
        )


def _share(group: str, num_bytes: int) -> None:
    # Now and once: a group whose devices cannot read each other would else end in the middle of a step, and memory that
    # grows is shared anew.
    from torch.distributed._symmetric_memory import get_symm_mem_workspace

    try:
        get_symm_mem_workspace(group, num_bytes)  # type: ignore[arg-type]
    except RuntimeError as error:
        reason = str(error).strip().splitlines() or ["no reason given"]
        raise PlanError(
            f"tensor_chunks = 'fused': devices of tensor rows cannot share memory ({reason[0]}); {_INSTEAD}"
        ) from error

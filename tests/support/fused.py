"""Fused products on a CPU: the fallbacks of torch's operators, which gather and sum over the group before or after.

Only the operators of `terrace.comm.symmetric` are replaced; everything around them runs as on CUDA.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory as symm_mem

from terrace.cluster.cluster import Cluster
from terrace.comm import symmetric
from terrace.comm.symmetric import Operators
from terrace.launch.start import World
from tests.support import parity
from tests.support.parity import Case, Outcome


def on_cuda(cluster: Cluster) -> Cluster:
    """The cluster with CUDA devices in its description."""
    return replace(cluster, device=replace(cluster.device, backend="cuda"))


def _gather(x: Tensor, matrices: Sequence[Tensor], group: str) -> tuple[Tensor, list[Tensor]]:
    whole, products = symm_mem._fused_all_gather_matmul_fallback(x, list(matrices), 0, group)  # type: ignore[arg-type]
    assert whole is not None
    return whole, products


def _scatter(x: Tensor, matrix: Tensor, group: str) -> Tensor:
    # The two lines of torch's fallback by the operators that they call: its own way to them imports a compiler, which
    # takes seconds of every process.
    functional = torch.ops._c10d_functional
    size = dist.distributed_c10d._get_group_size_by_name(group)  # type: ignore[arg-type]
    part: Tensor = functional.wait_tensor(functional.reduce_scatter_tensor(x @ matrix, "sum", size, group))
    return part


shared: list[tuple[str, int]] = []  # (group, bytes) that engines of this process asked for
FALLBACKS = Operators(_gather, _scatter, lambda group, num_bytes: shared.append((group, num_bytes)))


@contextmanager
def fallbacks(found: Operators = FALLBACKS) -> Iterator[None]:
    """Engines made in the body of a `with` get these operators on a CPU."""
    own, symmetric.operators = symmetric.operators, lambda device: found
    try:
        yield
    finally:
        symmetric.operators = own


def train(world: World, cluster: Cluster, cases: Sequence[Case]) -> list[Outcome]:
    """`parity.train` with torch's fallbacks."""
    with fallbacks():
        return parity.train(world, cluster, cases)


def train_wrongly(world: World, cluster: Cluster, cases: Sequence[Case]) -> list[Outcome]:
    """As `train`, with the tokens of the products rotated by one rank's part."""

    def gather(x: Tensor, matrices: Sequence[Tensor], group: str) -> tuple[Tensor, list[Tensor]]:
        whole, products = _gather(x, matrices, group)
        return whole, [torch.cat([each[len(x) :], each[: len(x)]]) for each in products]

    with fallbacks(replace(FALLBACKS, gather=gather)):
        return parity.train(world, cluster, cases)

"""Cost of attention on a cluster's devices and links, for the balancer of `balance = "cost"`."""

from collections.abc import Collection
from dataclasses import replace

from terrace.cluster.cluster import Cluster
from terrace.model.blocks import forward_flops
from terrace.model.config import ModelConfig
from terrace.sequence.cost import WorkCost
from terrace.simulate.kernels import peak_flops_per_s


def attention_cost(
    cluster: Cluster,
    model: ModelConfig,
    *,
    rows: int = 1,
    columns: int = 1,
    ulysses: int = 1,
    compute: str = "bf16",
    recomputed: Collection[int] = (),
) -> WorkCost:
    """Cost of a layer of `model` on one of rows x columns tensor ranks and one of `ulysses` context ranks.

    Everything but attention, in all blocks, is averaged over the layers and priced at the share of the peak that matrix
    products reach. Blocks with indices in `recomputed` run their forward twice; each layer costs the mean over layers.
    Raises `ClusterError` for a device that has no peak of the dtype.
    """
    # The reached peak, not the data sheet's: the balancer compares these seconds with measured links.
    peak = peak_flops_per_s(cluster.device, compute) * cluster.device.kernels.gemm
    layers, itself = range(1, model.num_layers + 1), 4 * model.num_heads * model.head_dim  # a token attended to
    # Forward and backward take three forwards, recomputation one more; attention to the own token is priced apart.
    flops = sum(
        (4 if block in recomputed else 3) * (forward_flops(model, block, 1, 1) - (itself if block in layers else 0))
        for block in range(model.num_blocks)
    )
    found = WorkCost.of(
        cluster,
        heads=max(1, model.num_heads // rows),
        kv_heads=max(1, model.num_kv_heads // rows),
        head_dim=model.head_dim,
        ulysses=ulysses,
        window=model.sliding_window,
        token_s=flops / (model.num_layers * columns * rows * peak),
        compute=compute,
        forwards=1 + sum(block in recomputed for block in layers) / model.num_layers,
    )
    return replace(found, other_windows=tuple(each for each in model.windows if each != model.sliding_window))

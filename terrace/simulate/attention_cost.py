"""What attention costs on a cluster's devices and links, as the balancer of `balance = "cost"` takes it."""

from terrace.cluster import Cluster
from terrace.model.config import ModelConfig, forward_flops
from terrace.spread.cost import WorkCost


def attention_cost(
    cluster: Cluster, model: ModelConfig, *, rows: int = 1, columns: int = 1, ulysses: int = 1, compute: str = "bf16"
) -> WorkCost:
    """Return what a layer of `model` costs one of rows x columns tensor ranks and of `ulysses` parts of a place.

    What is not attention is that of all blocks, shared among the layers, at the share of the peak that products reach.
    Raises `ClusterError` for a device that has no peak of the dtype.
    """
    flops = sum(forward_flops(model, block, 1, 1) for block in range(model.num_blocks)) / model.num_layers
    flops -= 4 * model.num_heads * model.head_dim  # of one token to itself
    peak = cluster.device.peak_flops_per_s.get(compute, 1.0) * cluster.device.kernels.gemm
    return WorkCost.of(
        cluster,
        heads=max(1, model.num_heads // rows),
        kv_heads=max(1, model.num_kv_heads // rows),
        head_dim=model.head_dim,
        ulysses=ulysses,
        window=model.sliding_window,
        token_s=3 * flops / (columns * rows * peak),
        compute=compute,
    )

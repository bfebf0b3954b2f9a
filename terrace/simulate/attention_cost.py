"""Attention cost model on a cluster's devices and links, for the balancer of `balance = "cost"`."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from terrace.cluster.cluster import Cluster
from terrace.model.operations import Core
from terrace.model.spec import BlockSpec
from terrace.model.windows import widest_window
from terrace.sequence.cost import Link, WorkCost
from terrace.simulate.kernels import peak_flops_per_s


def attention_cost(
    cluster: Cluster,
    blocks: Sequence[BlockSpec],
    *,
    rows: int = 1,
    columns: int = 1,
    ulysses: int = 1,
    compute: str = "bf16",
    recomputed: Collection[int] = (),
) -> WorkCost:
    """Cost of one layer on one of rows x columns tensor ranks and one of `ulysses` context ranks.

    All FLOPs outside attention are averaged over the layers and priced at the share of the peak that matrix products
    reach. Blocks in `recomputed` run their forward twice; every layer is charged the mean. Raises `ClusterError` for
    a device without a peak for the dtype.
    """
    # The reached peak, not the data sheet's: the balancer compares these seconds with measured links.
    peak = peak_flops_per_s(cluster.device, compute) * cluster.device.kernels.gemm
    layers = [index for index, block in enumerate(blocks) if block.attends and not block.operations.delta.heads]
    # A backward costs two forwards, recomputation one more. Attention of a token to itself is priced separately.
    flops = sum(
        (4 if index in recomputed else 3) * (block.forward_flops(1, 1) - 2 * _multiplications(block.operations.core))
        for index, block in enumerate(blocks)
    )
    if not layers:
        # Linear layers alone have no pairs, and send no keys: all FLOPs are alike for every token.
        token_s = flops / (sum(block.attends for block in blocks) * columns * rows * peak)
        links = tuple(Link.of(tier) for tier in cluster.tiers)
        return WorkCost(links=links, pair_s=0.0, key_bytes=0.0, query_bytes=0.0, token_s=token_s)
    cores = [blocks[index].operations.core for index in layers]
    window, core = widest_window([each.window for each in cores]), cores[0]
    found = WorkCost.of(
        cluster,
        heads=max(1, core.heads // rows),
        kv_heads=max(1, core.kv_heads // rows),
        head_dim=core.head_dim,
        ulysses=ulysses,
        window=window,
        token_s=flops / (len(layers) * columns * rows * peak),
        compute=compute,
        forwards=1 + sum(block in recomputed for block in layers) / len(layers),
    )
    others = {each.window for each in cores} - {window}
    return replace(found, other_windows=tuple(sorted(others)))


def _multiplications(core: Core) -> int:
    """Multiply-adds of attention from one token to one token."""
    return core.heads * (core.head_dim + core.value_dim)

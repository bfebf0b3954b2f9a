"""torchft's DiLoCo between nodes, plain or streaming, with DDP or FSDP2 among the ranks of a node.

A node is a replica group; every rank of it exchanges its parameters (its shards, under FSDP2) with the ranks at its
place in other nodes. The lighthouse runs on rank 0. Quantised messages need Triton, so these are fp32.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in its list of exports
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from bench.lab.contest import Batch, Contestant, Result, Setting, optimizer_tensors
from bench.lab.launch import own_address
from bench.lab.ring import ring_reduce_scatter
from bench.slow.contestants import EVERY
from bench.slow.hooks import inner_group, trainer
from bench.torch_fsdp import sharded

_TIMEOUT = timedelta(minutes=5)


def make(setting: Setting, *, inside: str, fragments: int = 1, delay: int = 0) -> Contestant:
    """The training loop; `inside` is ddp or fsdp, blocks are dealt to `fragments` that take turns."""
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    job, blocks = setting.job, list(setting.blocks)
    node, place = divmod(setting.rank, job.ranks_per_node)
    if inside == "ddp":
        model: Any = DistributedDataParallel(nn.Sequential(*blocks), process_group=inner_group(setting))
    else:
        mesh = init_device_mesh("cpu", (job.num_nodes, job.ranks_per_node), mesh_dim_names=("node", "inside"))
        model = sharded(blocks, mesh["inside"], ring_reduce_scatter)
    train, optimizer = trainer(setting, model)
    lighthouse, address, store = _servers(setting, node, place)
    manager: Any = Manager(
        pg=ProcessGroupGloo(timeout=_TIMEOUT),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=job.num_nodes,
        use_async_quorum=False,
        timeout=_TIMEOUT,
        quorum_timeout=_TIMEOUT,
        connect_timeout=_TIMEOUT,
        rank=place,
        world_size=job.ranks_per_node,
        store_addr=store[0],
        store_port=store[1],
        lighthouse_addr=address,
        replica_id=f"node_{node}",
        hostname=store[0],
        init_sync=False,  # all begin with the same values
    )
    parts = [nn.ModuleList(blocks[number::fragments]) for number in range(fragments)]
    outer = [torch.optim.SGD(part.parameters(), lr=0.7, momentum=0.9, nesterov=True) for part in parts]
    diloco: Any = DiLoCo(manager, parts, optimizer, outer, sync_every=EVERY, fragment_sync_delay=delay)
    diloco.__enter__()

    def step(batches: Sequence[Batch]) -> Result:
        loss, norm = train(batches)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        return Result(loss=loss, grad_norm=norm.item())

    def close() -> None:
        assert manager.num_participants() == job.num_nodes, "a node did not take part in the last exchange"
        diloco.__exit__(None, None, None)
        dist.barrier()
        manager.shutdown(wait=False)
        dist.barrier()
        if lighthouse is not None:
            lighthouse.shutdown()

    return Contestant(step=step, states=lambda: optimizer_tensors(optimizer), close=close)


def _servers(setting: Setting, node: int, place: int) -> tuple[Any, str, tuple[str, int]]:
    """The lighthouse where this rank runs it, its address, and host and port of the store of this rank's node."""
    from torchft.coordination import LighthouseServer

    host, ports, lighthouse = own_address(), [0, 0], None
    if setting.rank == 0:
        lighthouse = LighthouseServer(bind="[::]:0", min_replicas=setting.job.num_nodes, join_timeout_ms=1000)
        ports[0] = int(lighthouse.address().rpartition(":")[2])
    if place == 0:
        _STORES.append(TCPStore(host, 0, is_master=True, wait_for_workers=False))
        ports[1] = _STORES[-1].port
    everyone: list[Any] = [None] * setting.job.world_size
    dist.all_gather_object(everyone, (host, *ports))
    first, leader = everyone[0], everyone[node * setting.job.ranks_per_node]
    return lighthouse, f"http://{first[0]}:{first[1]}", (leader[0], leader[2])


_STORES: list[Any] = []  # kept until the process ends: a manager's threads ask it to the last

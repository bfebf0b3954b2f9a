"""Given to every contestant: the model, real text, the optimizer, the shape of the cluster; no torch.

Sizes are those of an earlier measurement of the same rivals, so that the two can be compared.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from terrace.runtime.settings import OptimizerConfig

ADAMW = OptimizerConfig(lr=3e-4)
BF16_BYTES = 2
WIRE = "bf16"


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model, how its batches are cut, and how ranks are arranged, innermost tier first."""

    hidden: int = 320
    layers: int = 8
    vocab: int = 4096
    sequence: int = 64
    micro_batch: int = 1
    seed: int = 0
    tiers: Mapping[str, int] = field(default_factory=lambda: {"package": 2, "node": 2, "system": 2})

    @property
    def world_size(self) -> int:
        total = 1
        for size in self.tiers.values():
            total *= size
        return total

    @property
    def num_nodes(self) -> int:
        """Size of the outermost tier."""
        return list(self.tiers.values())[-1]

    @property
    def ranks_per_node(self) -> int:
        """Ranks inside one unit of the outermost tier."""
        return self.world_size // self.num_nodes


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A contestant: its name in results and tables, its adapter, and the adapter's arguments."""

    name: str
    label: str
    adapter: str  # module under bench.lab
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: str  # in words, for the page
    inter_node: str  # which formula of `floor` holds

    @property
    def is_ours(self) -> bool:
        """Whether Terrace runs it."""
        return self.adapter == "terrace_plans"


def floor(kind: str, num_micros: int, job: Job) -> float:
    """Bytes between nodes per step, over all uplinks, in S, the bf16 bytes of all parameters.

    Message counts on paper: flat rings cross each uplink with (W - 1) / W of S; collectives by tier move each new byte
    across once.
    """
    a, nodes, world = num_micros, job.num_nodes, job.world_size
    ring, once = nodes * (world - 1) / world, nodes - 1
    return {
        "flat zero3": 3 * a * ring,
        "flat hpz": 2 * a * ring,
        "deepspeed hpz": (1 + a) * ring,
        "flat ddp": 2 * ring,
        "deepspeed zero++": ring / 2 + a * once / 4,
        "tiered zero3": 3.0 * a * once,
        "tiered zero++, int8 and int4": (0.5 + a / 4) * once,
        "two crossings": 2.0 * once,
        "two crossings, int8 and int4": 0.75 * once,
    }[kind]


def _ours(name: str, settings: str, inter_node: str, preset: str = "", **plan: Any) -> Entry:
    options = {"preset": preset or name, "plan": plan}
    return Entry(
        name=f"terrace {name}",
        label=f"Terrace {name.replace('-compressed', ', compressed')}",
        adapter="terrace_plans",
        options=options,
        settings=settings,
        inter_node=inter_node,
    )


_FSDP = "fully_shard on every block and the root, bf16 compute and wire, fp32 master"
_DEEPSPEED = "persistence threshold 0, reuse distance 0, live and prefetch limits of 4 and 2 M parameters"
_COMPRESSED = "int8 new weights and int4 gradients on all tiers but the package, with error feedback between nodes"
CONTESTANTS = (
    Entry(
        name="ddp",
        label="DDP",
        adapter="ddp",
        settings="DDP under bf16 autocast, gradients compressed to bf16 by its hook, `no_sync` but in the last "
        "micro-batch, gradients as views of the buckets",
        inter_node="flat ddp",
    ),
    Entry(
        name="zero3", label="FSDP2 ZeRO-3", adapter="fsdp", settings=f"{_FSDP}, over all ranks", inter_node="flat zero3"
    ),
    Entry(
        name="hpz",
        label="FSDP2 hpZ",
        adapter="fsdp",
        options={"reshard": "node"},
        settings=f"{_FSDP}, over all ranks, `reshard_after_forward` = ranks of a node",
        inter_node="flat hpz",
    ),
    Entry(
        name="hsdp",
        label="FSDP2 HSDP",
        adapter="fsdp",
        options={"mesh": "hybrid"},
        settings=f"{_FSDP}, mesh of nodes x ranks of a node, all-reduce in the last micro-batch only",
        inter_node="two crossings",
    ),
    Entry(
        name="deepspeed zero3",
        label="DeepSpeed ZeRO-3",
        adapter="deepspeed_zero",
        settings=f"stage 3, {_DEEPSPEED}",
        inter_node="flat zero3",
    ),
    Entry(
        name="deepspeed zero3 hpz",
        label="DeepSpeed ZeRO-3 hpZ",
        adapter="deepspeed_zero",
        options={"hpz": True},
        settings=f"stage 3 with `zero_hpz_partition_size` = ranks of a node, {_DEEPSPEED}",
        inter_node="deepspeed hpz",
    ),
    Entry(
        name="deepspeed zero++",
        label="DeepSpeed ZeRO++",
        adapter="deepspeed_zero",
        options={"hpz": True, "quantized": True},
        settings="hpz, and `zero_quantized_weights`, `zero_quantized_gradients`",
        inter_node="deepspeed zero++",
    ),
    _ours("zero3", "params, grads and optimizer over all ranks", "tiered zero3"),
    _ours("hsdp", "params, grads and optimizer on the node", "two crossings"),
    _ours(
        "zero++",
        "ZeRO-3, int8 gathers, a copy on the node for later ones, int4 gradients in every micro-batch",
        "tiered zero++, int8 and int4",
    ),
    _ours("three-level", "params on the package, grads on the node, optimizer over all ranks; bf16", "two crossings"),
    _ours(
        "three-level-compressed unit 1",
        f"the same placement; {_COMPRESSED}",
        "two crossings, int8 and int4",
        preset="three-level-compressed",
    ),
    _ours(
        "three-level-compressed",
        f"the same placement; {_COMPRESSED}; the micro-batches of a step pass each block together (`unit = 4`), so "
        "that a block is gathered and its gradient reduced once",
        "two crossings, int8 and int4",
        unit=4,
    ),
)


def contestant(name: str) -> Entry:
    return next(entry for entry in CONTESTANTS if entry.name == name)


def read_text(num_bytes: int) -> bytes:
    """The first bytes of the standard library's source: real text, the same for every rank."""
    from terrace.data.corpus import read_documents

    held = bytearray()
    for document in read_documents("stdlib"):
        held += document.encode()
        if len(held) >= num_bytes:
            break
    return bytes(held[:num_bytes])


def windows(job: Job, rank: int, step: int, num_micros: int) -> Iterator[int]:
    """Number of the first sequence of each micro-batch of this rank; no two steps share one."""
    for micro in range(num_micros):
        yield ((step * num_micros + micro) * job.world_size + rank) * job.micro_batch

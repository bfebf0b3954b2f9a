"""Given to every contestant: the model, real text, the optimizer, the shape of the cluster; no torch.

Sizes are those of an earlier measurement of the same rivals, so that the two can be compared.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from terrace.runtime.settings import OptimizerConfig

ADAMW = OptimizerConfig(lr=3e-4)
BF16_BYTES = 2
WIRE = "bf16"
WARMUP_STEPS, TRIAL_STEPS = 1, 1
# Growth of a rank's resident memory that a trial may need to be taken: 21 bytes a parameter, which replicated states
# and activations of four sequences exceed, and every sharded contestant keeps with parameters gathered for a step.
MEMORY_LIMIT_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model, its sequences, and how ranks are arranged, innermost tier first."""

    hidden: int = 320
    layers: int = 8
    vocab: int = 4096
    sequence: int = 64
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


def floor(kind: str, num_micros: int, job: Job) -> float:
    """Bytes between nodes per step, over all uplinks, in S, the bf16 bytes of all parameters.

    Message counts on paper: flat rings cross each uplink with (W - 1) / W of S; collectives by tier move each new byte
    across once.
    """
    a, nodes, world = num_micros, job.num_nodes, job.world_size
    ring, once = nodes * (world - 1) / world, nodes - 1
    return {
        "none": 0.0,
        "flat zero3": 3 * a * ring,
        "flat, kept for the backward": 2 * a * ring,
        "flat, once a step": 2 * ring,
        "deepspeed hpz": (1 + a) * ring,
        "deepspeed zero++": ring / 2 + a * once / 4,
        "tiered zero3": 3.0 * a * once,
        "tiered zero++, int8 and int4": (0.5 + a / 4) * once,
        "two crossings": 2.0 * once,
        "two crossings, int8 and int4": 0.75 * once,
    }[kind]


def read_text(num_bytes: int) -> bytes:
    """The first bytes of the standard library's source: real text, the same for every rank."""
    from terrace.data.corpus import read_documents

    held = bytearray()
    for document in read_documents("stdlib"):
        held += document.encode()
        if len(held) >= num_bytes:
            break
    return bytes(held[:num_bytes])


def windows(job: Job, rank: int, step: int, accum: int, micro_batch: int) -> Iterator[list[int]]:
    """Numbers of the sequences in each micro-batch of this rank; no two steps share one.

    A step has the same sequences however they are cut into micro-batches.
    """
    own = [(step * accum + number) * job.world_size + rank for number in range(accum)]
    for first in range(0, accum, micro_batch):
        yield own[first : first + micro_batch]

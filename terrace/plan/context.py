"""The context axis: which ranks attend to a micro-batch together, and how many tokens each holds.

The axis has two forms, each with its own degree on every tier (unified sequence parallelism, Fang and Zhao,
2405.07719):

    ulysses   ranks exchange tokens for heads: each attends with a subset of the heads (2309.14509)
    ring      ranks keep their queries and pass keys and values around (2310.01889)

A *ring rank* is one set of u Ulysses ranks: together they attend to its tokens with all heads. The ring ranks of a
context group differ on the ring axis, and with `balance = "cost"` on the data axis too. Outside attention, every rank
holds the same number of local tokens, padding included:

    balance = "tokens"   every row of S tokens is cut into 2r chunks of c = ceil(S / 2r), padding at its end; ring rank
                         k has chunks k and 2r-1-k, which balances causal work (one ring rank: the whole row); of these
                         B 2c tokens every Ulysses rank holds ceil(B 2c / u)
    balance = "cost"     the rows of all data ranks are one set of documents; a rank holds ceil(B S / (r u)) tokens

Shape legend: B rows of a micro-batch, S tokens of a row, r ring and u ulysses ranks over all tiers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from terrace.model.params import ParamSpec
from terrace.plan.mesh import Mesh
from terrace.plan.plan import Plan

if TYPE_CHECKING:
    from terrace.cluster.cluster import Cluster
    from terrace.model.spec import BlockSpec

ULYSSES = ("ulysses",)
CHUNKS_PER_RING_RANK = 2  # in a causal ring: an early and a late one


@dataclass(frozen=True)
class ContextGroup:
    """Ranks that attend together. `members[ring_rank * ulysses + ulysses_rank]` is a global rank.

    Ring ranks are numbered over the tiers, the innermost fastest, so the ring ranks inside one unit of a tier are
    neighbours. `ring_degrees` is the number of ring ranks that each tier joins, `sizes` the cluster's degrees.
    """

    members: tuple[int, ...]
    ulysses: int
    ring_degrees: tuple[int, ...]
    sizes: tuple[int, ...]  # sizes of the cluster's tiers

    @staticmethod
    def of(cluster: "Cluster", plan: Plan, rank: int) -> "ContextGroup":
        """The context group of `rank`: all ranks that differ from it only on `ring_axes` and Ulysses."""
        mesh = Mesh.of(cluster, plan)
        # One Ulysses rank stands for each ring rank while the ring is laid out.
        first = mesh.members(rank, ULYSSES)[0]
        return ContextGroup(
            members=tuple(
                rank
                for first_ulysses in mesh.members(first, ring_axes(plan))
                for rank in mesh.members(first_ulysses, ULYSSES)
            ),
            ulysses=mesh.total("ulysses"),
            ring_degrees=mesh.group(*ring_axes(plan)),
            sizes=tuple(tier.size for tier in cluster.tiers),
        )

    @property
    def num_ring_ranks(self) -> int:
        return len(self.members) // self.ulysses

    def tier(self, member: int, other: int) -> int:
        """Index of the outermost tier that a message between two members crosses."""
        return tier_between(self.sizes, self.members[member], self.members[other])


def tier_between(sizes: Sequence[int], rank: int, other: int) -> int:
    """Index of the outermost tier on which two ranks differ; for ring ranks, pass `ring_degrees` as `sizes`."""
    assert rank != other, f"rank {rank} needs no link to itself"
    crossed = 0
    for tier, size in enumerate(sizes):
        # Strip one tier per iteration; the quotients are the units that contain the two ranks.
        (rank, here), (other, there) = divmod(rank, size), divmod(other, size)
        crossed = tier if here != there else crossed
    return crossed


def ring_axes(plan: Plan) -> tuple[str, ...]:
    return ("ring", "data") if plan.balance == "cost" else ("ring",)


def is_context_parallel(mesh: Mesh, plan: Plan) -> bool:
    """Whether several ranks attend together, so that a rank does not hold whole rows."""
    return mesh.total("ulysses") * num_ring_ranks(mesh, plan) > 1


def num_ring_ranks(mesh: Mesh, plan: Plan) -> int:
    return math.prod(mesh.group(*ring_axes(plan)))


def chunk_tokens(sequence: int, ring: int) -> int:
    """Tokens of one chunk of a row, padding included."""
    return sequence if ring == 1 else -(-sequence // (CHUNKS_PER_RING_RANK * ring))


def attention_tokens(plan: Plan, mesh: Mesh, sequence: int) -> int:
    """Tokens of a micro-batch that a ring rank attends to under `balance = "tokens"`, padding included."""
    return _attention_tokens(plan.micro_batch, sequence, mesh.total("ring"))


def _attention_tokens(micro_batch: int, sequence: int, ring: int) -> int:
    return micro_batch * chunk_tokens(sequence, ring) * (1 if ring == 1 else CHUNKS_PER_RING_RANK)


def batch_shape(plan: Plan, mesh: Mesh, sequence: int) -> tuple[int, int]:
    """(Rows, tokens per row) that blocks run on; under context parallelism one row with the rank's local tokens."""
    return (1, local_tokens(plan, mesh, sequence)) if is_context_parallel(mesh, plan) else (plan.micro_batch, sequence)


def local_tokens(plan: Plan, mesh: Mesh, sequence: int) -> int:
    """Tokens of a micro-batch on each rank outside attention, padding included."""
    return count_local_tokens(plan.micro_batch, sequence, mesh.total("ulysses"), mesh.total("ring"), plan.balance)


def count_local_tokens(micro_batch: int, sequence: int, ulysses: int, ring: int, balance: str = "tokens") -> int:
    """Same as `local_tokens`, from plain integers."""
    # Documents are distributed evenly by token, without chunks per row.
    if balance == "cost":
        return -(-micro_batch * sequence // (ulysses * ring))
    return -(-_attention_tokens(micro_batch, sequence, ring) // ulysses)


@dataclass(frozen=True)
class Heads:
    """Number of attention heads on a tensor rank, each with `size` features."""

    queries: int
    keys: int
    size: int

    def can_split(self, ulysses: int) -> bool:
        """Whether `ulysses` ranks can split the heads evenly, with whole key-value heads or one shared head each."""
        return self.queries % ulysses == 0 and (self.keys % ulysses == 0 or ulysses % self.keys == 0)

    def per_ulysses_rank(self, ulysses: int) -> "Heads":
        """Heads of one Ulysses rank: K/u of K key-value heads, or one shared head if u > K.

        If the heads do not divide evenly (`can_split`), these are the largest rank's.
        """
        return Heads(-(-self.queries // ulysses), -(-self.keys // ulysses), self.size)


def attention_heads(block: "BlockSpec", rows: int) -> Heads | None:
    """Heads of a block on each of `rows` tensor rows, None if the block declares none, or is linear.

    With more rows than key-value heads each row uses one of them (terrace.plan.slices).
    """
    queries, keys = _declared(block, "heads"), _declared(block, "kv_heads")
    if queries is None or block.operations.delta.heads:
        return None
    # Without `kv_heads` attention is multi-head: as many keys as queries.
    num_keys = queries[0] if keys is None else keys[0]
    # At least one key-value head per row: if there are more rows than heads, rows share one.
    return Heads(queries[0] // rows, max(1, num_keys // rows), queries[1])


def _declared(block: "BlockSpec", name: str) -> tuple[int, int] | None:
    """(Units, elements per unit) of the first dim of a matrix with that name."""

    def elements(param: ParamSpec, dim: int) -> int:
        return (param.whole or param.shape)[dim]

    dims = (
        (units, elements(param, dim) // units)
        for param in block.params
        for dim, (counted, units) in enumerate(param.dims)
        if counted == name and units and param.is_matrix
    )
    return next(dims, None)

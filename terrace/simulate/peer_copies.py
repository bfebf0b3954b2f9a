"""Bytes and seconds of copies of checkpoint shards in the memory of other machines. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from terrace.cluster.cluster import Cluster
from terrace.plan.counts import choices_bytes
from terrace.plan.flats import FlatParamSpec
from terrace.plan.hops import RESIDUAL_BYTES
from terrace.plan.partners import MEMORY, SLOTS, TAIL_BYTES, TIME
from terrace.plan.plan import Plan
from terrace.plan.projected import projected_numbers
from terrace.plan.routes import residual_numels
from terrace.plan.slices import rank_slices
from terrace.plan.state_bytes import moments
from terrace.plan.state_formats import stored_bytes
from terrace.plan.wire import FORMATS, MessageClass
from terrace.program.program import Program
from terrace.program.report import StepReport
from terrace.simulate.links import send_s


def part_bytes(program: Program, rank: int) -> int:
    """Bytes of a rank's checkpoint shard, without its header.

    Exact for the first rank of each stage; other shards may be smaller by the padding of tensor slices.
    """
    own = program.stage.own
    found = sum(_flat_bytes(program.plan, flat, rank) for block in own for flat in program.model.flats[block])
    is_first = not any(program.model.stage_layout.coordinates(rank))  # it writes what all ranks of the stage have
    return found + (sum(choices_bytes(program.blocks[block]) for block in own) if is_first else 0)


def residual_bytes(program: Program) -> int:
    """Bytes of a rank's error-feedback residuals, which its shard includes after the first step."""
    flats = (flat for block in program.stage.held for flat in program.model.flats[block] if flat.trainable)
    of_states = sum(sum(residual_numels(flat.layout, program.plan, flat.padded)) for flat in flats)
    return RESIDUAL_BYTES * (of_states + sum(message.fed_back for message in program.messages))


def _flat_bytes(plan: Plan, flat: FlatParamSpec, rank: int) -> int:
    layout = flat.layout
    tier = layout.optimizer if flat.trainable else layout.params
    coordinates = layout.coordinates(rank)
    # A lower rank holds the same shard and writes it.
    if any(coordinates[tier + 1 :]):
        return 0
    part = layout.slice(tier, coordinates, flat.padded)
    owned = max(0, min(int(part.stop), flat.numel) - int(part.start))
    if not flat.trainable:
        first = not any(coordinates) and not any(
            part.start for param in flat.params for part in rank_slices(param, layout.ranks, rank)
        )
        return flat.stored_bytes(plan, owned) + flat.constants_bytes * first
    elementwise = owned - max(0, min(int(part.stop), flat.num_orthogonal) - int(part.start))
    states = sum(moments(plan.update, owned, elementwise))
    numbers = projected_numbers(plan.update, flat.orthogonal, part)
    return (
        owned * FORMATS[plan.master].element_bytes
        + stored_bytes(plan.optimizer_states or plan.sums, states)
        + numbers * FORMATS[plan.sums].element_bytes
    )


@dataclass(frozen=True, kw_only=True)
class CopyCost:
    """Copies of one rank in a run: bytes of its own shard and of the shard it keeps for a peer, numbers of copies
    and steps.

    The first copy lacks `own_later_bytes` and `kept_later_bytes`.
    """

    tier: int
    own_bytes: int
    kept_bytes: int
    own_later_bytes: int
    kept_later_bytes: int
    num_copies: int
    num_steps: int

    @property
    def sent_bytes(self) -> int:
        sizes = (self.own_bytes - self.own_later_bytes, self.own_bytes)
        first, other = (size + TAIL_BYTES if size else 0 for size in sizes)
        return first + (self.num_copies - 1) * other

    @property
    def memory_bytes(self) -> int:
        """Host memory of the rank's copies, without file headers."""
        # Slots that still hold the first copy, or none.
        num_first = max(0, SLOTS + 1 - self.num_copies)
        later_bytes = self.own_later_bytes + self.kept_later_bytes
        return SLOTS * (self.own_bytes + self.kept_bytes) - num_first * later_bytes


def with_copies(report: StepReport, cost: CopyCost, cluster: Cluster) -> StepReport:
    """The predicted step with its share of the copies; only their transfer takes time."""
    rate = cost.num_copies / cost.num_steps
    sent: Mapping[tuple[MessageClass, str], int] = {
        (MessageClass.PEER_COPY, cluster.tiers[cost.tier].name): cost.sent_bytes // cost.num_steps
    }
    return replace(
        report,
        time_s={**report.time_s, TIME: rate * send_s(cluster, cost.tier, max(cost.own_bytes, cost.kept_bytes))},
        sent_bytes={**report.sent_bytes, **{key: size for key, size in sent.items() if size}},
        memory_bytes={**report.memory_bytes, MEMORY: cost.memory_bytes},
    )

"""Seconds that a block waits for the messages inside it, on any axis (terrace.program.block_program).

A message costs, hop by hop, as much as a collective of the data axis on its lane (terrace.simulate.cost), plus a launch
and the coding of block formats. An exchange of context ranks starts all its messages together, so each tier's latency
counts once. These messages overlap those on the lanes without slowing each other.

A piece of compute of C seconds hides up to C seconds of its messages, and is slowed meanwhile by the overlap penalty:
the device's for the tensor axis, the tier's for the context axis. The rest of the messages is exposed.

A message that is fused with its product (FLUX, Chang et al. 2406.06858) is cut into tiles, each sent while others are
multiplied: the operation takes max(product, message) plus a tail, in which one tile is sent without a product or
multiplied without a message. A tile here is one rank's shard of the message, as in torch's operators
(torch.distributed._symmetric_memory), so the tail of a message of M seconds among n ranks is M / n. FLUX's own kernels
cut at tiles of the product and have a shorter tail. A product cut into n may run at a lower rate; that is not priced.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from terrace.cluster.cluster import Cluster
from terrace.plan.context_traffic import NO_ATTENTION, AttentionBytes, scan_bytes, sizes_by_tier
from terrace.plan.expert_traffic import NO_TRAFFIC, ExpertTraffic
from terrace.plan.hops import hops_coding_bytes
from terrace.plan.in_block_messages import Leg, RoutedMessage, TensorMessage
from terrace.plan.tables import TableTraffic
from terrace.plan.tensor_traffic import TensorTraffic
from terrace.plan.wire import FORMATS, MessageClass, WireFormat
from terrace.program.block_program.steps import Compute, ComputeKind, InBlockMessage, Moment, Send
from terrace.program.instruction import Instruction
from terrace.simulate.links import coding_s, exchange_tiers, hop_s, is_exposed, send_s, tier_penalty
from terrace.simulate.work import Work

if TYPE_CHECKING:
    from terrace.program.program import Program

WAIT_TENSOR = f"wait {MessageClass.TENSOR.value}"  # the category of their seconds, of a clock as of a prediction
WAIT_CONTEXT = f"wait {MessageClass.CONTEXT.value}"
WAIT_CHOICES = f"wait {MessageClass.CHOICES.value}"

Rounds = tuple[tuple[float, float], tuple[float, float]]  # (forward, backward) s of the first and of later rounds
Rooms = Mapping[Compute, float]  # seconds of the pieces behind which messages hide

_CLASSES = (MessageClass.TENSOR, MessageClass.CONTEXT, MessageClass.CHOICES)  # all that hide behind pieces of computing
_PIECES = (
    *map(Compute, (ComputeKind.OUTPUTS, ComputeKind.INPUT_GRADIENTS, ComputeKind.WEIGHT_GRADIENTS)),
    *(Compute(kind, step) for kind in (ComputeKind.ROUND, ComputeKind.ROUND_GRADIENTS) for step in (0, 1)),
)

NO_ROUNDS: Rounds = ((0.0, 0.0), (0.0, 0.0))


class PricedMoment(NamedTuple):
    """(Seconds, overlap penalty) of the messages hidden behind one piece of compute, which occurs `times` times."""

    message_class: MessageClass
    behind: Compute | None
    parts: tuple[tuple[float, float], ...]
    times: int


class InBlockPrices:
    """Cached seconds of single messages inside a block.

    `sends` caches the messages of context ranks by their bytes; blocks on one cluster may share it.
    """

    def __init__(
        self,
        cluster: Cluster,
        tensor: TensorTraffic | None = None,
        attention: AttentionBytes = NO_ATTENTION,
        sends: dict[tuple[object, ...], float] | None = None,
        experts: ExpertTraffic | TableTraffic = NO_TRAFFIC,
    ) -> None:
        self._cluster, self._tensor, self._attention, self._experts = cluster, tensor, attention, experts
        form = cluster.device.software.messages
        self._waits = bool(form.exposed or form.exposed_unsharded)
        self._sends = {} if sends is None else sends
        self._known: dict[InBlockMessage, tuple[float, float]] = {}

    def by_tier(self, message: InBlockMessage) -> dict[int, float]:
        """Seconds of a message by tier index; a launch counts on the first tier crossed."""
        if isinstance(message, TensorMessage):
            return tensor_message_seconds(self._cluster, self._axis, message)
        if isinstance(message, RoutedMessage):
            return _routed_message_seconds(self._cluster, self._experts, message)
        sends = self._attention.sends(message)
        # A message without a tier is an exchange of Ulysses ranks, over all their tiers at once.
        if message.tier < 0:
            found = exchange_tiers(self._cluster, self._attention.ulysses, sends)
        else:
            found = {tier: send_s(self._cluster, tier, num_bytes) for tier, num_bytes in sends}
        for tier, num_bytes in self._attention.coding_bytes(message).items():
            found[tier] += coding_s(self._cluster, num_bytes)
        return found

    def price(self, message: InBlockMessage) -> tuple[float, float]:
        """(Seconds, slow-down of overlapping compute) of a message."""
        found = self._known.get(message)
        if found is None:
            found = self._known[message] = self.seconds(message), self.penalty(message)
        return found

    def penalty(self, message: InBlockMessage) -> float:
        """Slow-down of overlapping compute as a share of the message's seconds."""
        if self._waits and is_exposed(self._cluster, message.message_class):
            return 1.0
        # Tensor messages and exchanges over several tiers have the device's penalty.
        own_tier = -1 if isinstance(message, TensorMessage) else message.tier
        return self._cluster.device.overlap_penalty if own_tier < 0 else tier_penalty(self._cluster, own_tier)

    def seconds(self, message: InBlockMessage) -> float:
        attention = self._attention
        if isinstance(message, TensorMessage | RoutedMessage):
            return sum(self.by_tier(message).values())
        # Forward and backward, keys and their gradients often have the same bytes.
        key = (message.tier if message.tier >= 0 else attention.ulysses, attention.sends(message), attention.formats)
        found = self._sends.get(key)
        if found is None:
            found = self._sends[key] = sum(self.by_tier(message).values())
        return found

    def priced(self, moments: Iterable[Moment]) -> tuple[PricedMoment, ...]:
        found = []
        for each in moments:
            found.append(PricedMoment(each.message_class, each.behind, self.parts(each.messages), each.times))
            if each.fused:
                tails = sum(count * self.tail_s(message) for message, count in each.fused)
                found.append(PricedMoment(each.message_class, None, ((tails, 0.0),), each.times))
        return tuple(found)

    def tail_s(self, message: InBlockMessage) -> float:
        """Seconds by which a fused message outlasts the longer of message and product."""
        assert isinstance(message, TensorMessage), f"{message} is fused with no product"
        return self.price(message)[0] / self._axis.line(message.axes).degree

    @property
    def _axis(self) -> TensorTraffic:
        assert self._tensor is not None, "only messages of a tensor axis are of one"
        return self._tensor

    def parts(self, counted: Sequence[tuple[InBlockMessage, int]]) -> tuple[tuple[float, float], ...]:
        """(Seconds, penalty) of messages behind the same piece, in the order in which it hides them."""
        if len(counted) == 1:
            message, count = counted[0]
            seconds, penalty = self.price(message)
            return ((count * seconds, penalty),)
        # A piece hides messages of the outermost tier first.
        found: list[tuple[float, float]] = []
        for message, count in outermost_first(counted):
            seconds, penalty = self.price(message)
            if found and found[-1][1] == penalty:
                found[-1] = (found[-1][0] + count * seconds, penalty)
            else:
                found.append((count * seconds, penalty))
        return tuple(found)


def outermost_first(counted: Sequence[tuple[InBlockMessage, int]]) -> list[tuple[InBlockMessage, int]]:
    """Messages in the order in which a piece of compute hides them."""
    return sorted(counted, key=lambda each: 0 if isinstance(each[0], TensorMessage) else -each[0].tier)


def exposed(moments: Iterable[PricedMoment], rooms: Rooms) -> dict[MessageClass, float]:
    """Seconds that messages add to compute, by message class."""
    total: dict[MessageClass, float] = defaultdict(float)
    for message_class, behind, parts, times in moments:
        total[message_class] += times * added_s(parts, behind, rooms)
    return {each: total[each] for each in _CLASSES if each in total}


def added_s(parts: Iterable[tuple[float, float]], behind: Compute | None, rooms: Rooms) -> float:
    """Seconds that `parts`, (seconds, penalty) of messages, add to the piece of compute that hides them."""
    left_s, added_s = 0.0 if behind is None else rooms.get(behind, 0.0), 0.0
    for seconds, penalty in parts:
        # Compute hides this part, and is slowed by its penalty; the rest is exposed.
        covered_s = seconds if seconds < left_s else left_s
        left_s -= covered_s
        added_s += seconds - covered_s + penalty * covered_s
    return added_s


def rooms_of(forward_s: float, input_s: float, weight_s: float, rounds: Rounds = NO_ROUNDS) -> Rooms:
    """Seconds of compute by piece that can hide messages of a block."""
    (first, first_back), (later, later_back) = rounds
    seconds = forward_s, input_s, weight_s, first, later, first_back, later_back
    return dict(zip(_PIECES, seconds, strict=True))


def block_prices(program: "Program", block: int) -> InBlockPrices:
    attention = program.model.context.attention(program.blocks[block])
    return InBlockPrices(program.cluster, program.model.tensor, attention, experts=program.model.routed.sizes(block))


def inside_seconds(program: "Program", instruction: Instruction, message_class: MessageClass) -> dict[int, float]:
    """Seconds of all messages of a class inside a pass, hidden or not, by tier index."""
    prices, total = block_prices(program, instruction.block), defaultdict[int, float](float)
    for step in program.model.block_program(instruction.block).routed_steps(instruction.op):
        for sent in step.messages if isinstance(step, Send) else ():
            for tier, seconds in prices.by_tier(sent).items() if sent.message_class is message_class else ():
                total[tier] += seconds
    for moment in program.model.block_program(instruction.block).moments(instruction.op):
        for message, count in moment.messages if moment.message_class is message_class else ():
            for tier, seconds in prices.by_tier(message).items():
                total[tier] += moment.times * count * seconds
    return dict(total)


def attention_bytes(
    work: Work, ulysses: Sequence[int], ring: Sequence[int], wires: Sequence[WireFormat] = ()
) -> AttentionBytes:
    """Message bytes of a layer's attention; the degrees by tier multiply to those of `work`.

    `wires` are the formats by tier, by default the compute dtype on all tiers.
    """
    if work.layer.delta.heads:
        return scan_bytes(work.layer.delta, tuple(ring), work.rows, work.micro_batch, work.compute)
    head_bytes = work.layer.core.head_dim * FORMATS[work.compute].element_bytes
    queries, keys = head_bytes * work.attended_heads, head_bytes * 2 * work.attended_kv_heads
    return AttentionBytes(
        tuple(ulysses),
        tuple(ring),
        inputs=work.tokens * (queries + keys),
        outputs=work.tokens * queries,
        keys=work.attended * keys,
        formats=sizes_by_tier(
            wires,
            work.compute,
            held=work.tokens,
            attended=work.attended,
            queries=work.layer.core.head_dim * work.attended_heads,
            keys=work.layer.core.head_dim * work.attended_kv_heads,
        ),
    )


def tensor_message_seconds(cluster: Cluster, tensor: TensorTraffic, message: TensorMessage) -> dict[int, float]:
    """Seconds of one tensor-axis message by tier index."""
    degrees, total = tensor.line(message.axes).degrees, dict[int, float]()
    for tier, num_bytes in tensor.sends(message):
        total[tier] = hop_s(cluster, tier, degrees[tier], num_bytes)
    if total:
        # Launch and coding happen once per message, not once per tier.
        total[next(iter(total))] += cluster.device.kernels.launch_s + _coding_s(cluster, tensor, message)
    return total


def _coding_s(cluster: Cluster, tensor: TensorTraffic, message: TensorMessage) -> float:
    # Single numbers per token are sent uncoded.
    if message.leg is Leg.NUMBERS:
        return 0.0
    hops = tensor.hops(message)
    reduction, gathering = (hops, []) if message.leg is Leg.REDUCE else ([], hops)
    return coding_s(cluster, hops_coding_bytes(tensor.plan, MessageClass.TENSOR, reduction, gathering))


def _routed_message_seconds(
    cluster: Cluster, sizes: ExpertTraffic | TableTraffic, message: RoutedMessage
) -> dict[int, float]:
    alone = cluster.device.kernels.launch_s + coding_s(cluster, sizes.coding_bytes(message))
    return {
        tier: hop_s(cluster, tier, sizes.degree(message._replace(tier=tier)), num_bytes) + alone
        for tier, num_bytes in sizes.sends(message)
    }

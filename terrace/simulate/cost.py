"""Seconds of an instruction on a device and a tier.

Compute is either priced kernel by kernel from a `Work` (`terrace.simulate.layers`), or from FLOPs as a roofline: the
larger of FLOPs over the peak of the compute dtype and bytes over the memory bandwidth. A collective on a tier with n
members in which a rank sends B bytes, of a message of n/(n - 1) B, takes

    (n - 1) * latency + B / rate

with the rate that messages of this size reach (`terrace.simulate.links`). A collective over several tiers takes the sum
over them, since each hop waits for the one before. Coding and decoding block formats is bound by memory: bytes read and
written over the share of the bandwidth that codecs reach, before and after the message on its lane. The constants are
the cluster's; its `marks` say whether they are preset, measured or fitted. A block may
have several flat buffers (terrace.plan.flats): each is a separate message with its own members and padding, and they
are sent one at a time. Messages inside a block are priced by `terrace.simulate.inside`.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING

from terrace.base.errors import PlanError
from terrace.cluster.cluster import Cluster
from terrace.model.spec import Computes
from terrace.plan.context import attention_heads
from terrace.plan.flats import FlatParamSpec
from terrace.plan.mesh import CONTEXT
from terrace.plan.outer import Outer
from terrace.plan.projected import products_of_a_rank
from terrace.plan.recompute import operations_in
from terrace.plan.state_bytes import keeps_master
from terrace.plan.wire import FORMATS, OF_PASSES, MessageClass
from terrace.program.block_program.steps import Compute
from terrace.program.exchange import exchanged
from terrace.program.instruction import Instruction, Op
from terrace.program.kept import gradients, moved, passed
from terrace.program.message import Message
from terrace.simulate.below_seconds import host_update_seconds, moved_stream, passed_stream
from terrace.simulate.inside import NO_ROUNDS, InBlockPrices, Rooms, Rounds, block_prices, exposed, rooms_of
from terrace.simulate.kernels import gemm_s, memory_s
from terrace.simulate.layers import core_rounds, operation_seconds, optimizer_s, rounding_bytes, seconds_of
from terrace.simulate.links import copies_s, hops_s, send_s, tier_penalty, waits_for_sends, with_coding
from terrace.simulate.masks import work_in
from terrace.simulate.outer_cost import apply_passes, passes_s, take_passes
from terrace.simulate.priced_instruction import NO_STREAM, Doing, Event, PassStep, Stream
from terrace.simulate.routed import FORWARD, RoutedSeconds, pass_steps, routed_seconds, shared_out
from terrace.simulate.scaled import check_same
from terrace.simulate.trained import trained_part
from terrace.simulate.work import Work

if TYPE_CHECKING:
    from terrace.program.program import Program
    from terrace.simulate.rank import Play

# AdamW reads gradient, both moments and parameter, and writes the last three; norm and scaling pass gradients thrice.
_ADAMW_PASSES = 10
_CODING_KERNELS = 6  # a matrix: two casts, magnitudes, their largest, a product and a copy


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds of each compute instruction, per block, and of every collective."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]  # without recomputation
    update_s: tuple[float, ...]
    program: "Program"
    weight_s: tuple[float, ...] = ()  # the part of backward_s that is weight gradients; empty: none
    rounds: tuple[Rounds, ...] = ()  # of each block's attention, which hide messages of context ranks; empty: none
    routed: tuple[RoutedSeconds, ...] = ()  # of each block between its routed messages; empty: none are sent
    operations_s: tuple[float, ...] = ()  # of each block, what is recomputed where not all of it is; empty: nothing
    saved_s: tuple[float, ...] = ()  # of each block's forward, that its recomputation leaves out; empty: nothing
    dealt_s: float = 0.0  # a pass of attention waits for messages that depend on the documents of a batch
    drains: bool = False  # whether refreshes end before the next step begins, as another model then runs
    # Cluster with the link to another stage's member, by that stage, where it is another than the cluster's
    links: Mapping[int, Cluster] = field(default_factory=dict, hash=False)

    def recompute_s(self, block: int) -> float:
        if self.program.model.recomputes(block):
            return self.forward_s[block] - (self.saved_s[block] if self.saved_s else 0.0)
        return self.operations_s[block] if self.operations_s else 0.0

    def collective_s(self, instruction: Instruction) -> float:
        return self.of_message(self.program.message(instruction))[0]

    def of_message(self, message: Message) -> tuple[float, float]:
        """(Seconds that a message occupies its lane, its penalty), as `hops_s`."""
        kind = message.message_class, message.ranks is not None and message.ranks.gathers
        seconds, penalty = hops_s(self.program.cluster, message.hops, message.coding_bytes, *kind)
        # Without peers it has no lane: the device computes nothing while it decodes.
        return seconds, penalty if message.sends else 1.0

    def collective(self, instruction: Instruction) -> tuple[float, int, str, float]:
        """(Seconds, lane, wait category, penalty) of a collective instruction."""
        block = instruction.block
        # Equal blocks send equal messages. CLIP and OUTER_COUNT have no block and depend on the program.
        own = (self.program.phase, self.program.exchange)
        alike = self.program.model.alike[block] if block >= 0 else own
        first = not block and self.program.cluster.device.software.messages.exposed_ends
        key = (instruction.op, instruction.backward, instruction.secondary, instruction.in_gaps, alike, first)
        found = self._collectives.get(key)
        if found is None:
            message = self.program.message(instruction)
            seconds, penalty = self.of_message(message)
            penalty = 1.0 if first and message.message_class in OF_PASSES else penalty
            found = self._collectives[key] = seconds, message.lane, f"wait {instruction.message_class}", penalty
        return found

    def parts(self, instruction: Instruction) -> list[tuple[float, float]]:
        """(Seconds, penalty) of each part of a message in gaps; zero for a part without bytes."""
        parts = self.program.message(instruction).parts
        return [self.of_message(part) if part.sends else (0.0, 0.0) for part in parts]

    def apply_s(self, block: int) -> float:
        return self._outer_s([block], apply_passes)

    def take_s(self) -> float:
        """Compute seconds of an OUTER_COUNT: the changes of all blocks whose exchange starts."""
        return self._outer_s(exchanged(self.program, self.program.exchange.starts), take_passes)

    def _outer_s(self, blocks: Iterable[int], passes: Callable[[Outer], list[int]]) -> float:
        program = self.program
        device, summed, each = program.cluster.device, program.plan.sums, passes(program.plan.outer)
        return math.fsum(passes_s(device, program.model.flats[block], summed, each) for block in blocks)

    def stream(self, instruction: Instruction, update_s: float = 0.0) -> Stream:
        """What an instruction passes of states below the device, with `update_s` of computing in all."""
        found = passed(self.program.model, instruction)
        return passed_stream(self.program, found, update_s) if found.num_pieces else NO_STREAM

    def moved(self, instruction: Instruction) -> Stream:
        """Seconds in which an instruction reads parameters from below the device or writes them; a SYNC, gradients."""
        model = self.program.model
        return moved_stream(self.program, moved(model, instruction), gradients(model, instruction)[1])

    def gradients_s(self, block: int) -> float:
        """Seconds in which an UPDATE reads from below the device: gradients, or new parameters of the host's cores."""
        read, _ = gradients(self.program.model, Instruction(Op.UPDATE, block))
        return self.program.cluster.device.below[self.program.plan.keep.grads].read_s(read) if read else 0.0

    def point_to_point(self, instruction: Instruction) -> tuple[float, float]:
        """(Seconds, slow-down of compute) of a message to another stage."""
        cluster, message = self.program.cluster, self.program.message(instruction)
        # A message between stages is priced on the outermost tier that it crosses, plus coding and decoding.
        ((tier, num_bytes),) = message.sends
        link = self.links.get(instruction.peer, cluster)
        sent = send_s(link, tier, num_bytes), tier_penalty(cluster, tier)
        seconds, penalty = with_coding(cluster, message.coding_bytes, [sent])
        alone = len(self.program.stage.chunks) == 1
        return seconds, 1.0 if waits_for_sends(cluster, message.message_class, alone) else penalty

    def of_stage(
        self, program: "Program", update_s: tuple[float, ...], links: Mapping[int, Cluster] = MappingProxyType({})
    ) -> "Costs":
        """Costs of another stage's program, with the same cost per block; caches of prices are shared."""
        found = replace(self, program=program, update_s=update_s, links=links)
        vars(found).update(_prices=self._prices, _waits=self._waits, _collectives=self._collectives, passes=self.passes)
        return found

    def waits_inside(self, instruction: Instruction) -> dict[MessageClass, float]:
        """Seconds that a pass waits for messages inside its block, by message class."""
        block, steps = instruction.block, self.program.model.block_program(instruction.block)
        weight_s = self.weight_s[block] if self.weight_s else 0.0
        rounds = self.rounds[block] if self.rounds else NO_ROUNDS
        alike = self.program.model.alike_inside(block)
        key = (instruction.op, alike, self.forward_s[block], self.backward_s[block], weight_s, rounds)
        found = self._waits.get(key)
        if found is None:
            rooms = self.rooms(self.forward_s[block], self.backward_s[block] - weight_s, weight_s, rounds)
            found = exposed(self._priced(block).priced(steps.moments(instruction.op)), rooms)
            if self.dealt_s and self.program.blocks[block].attends:
                again = instruction.op is not Op.FORWARD and self.program.model.recomputes(block)
                found = {**found, MessageClass.CONTEXT: self.dealt_s * (1 + again)}
            self._waits[key] = found
        return found

    def steps(self, instruction: Instruction, seconds: float, category: str) -> tuple[PassStep, ...]:
        """Steps of a pass with `seconds` of compute, if it sends routed messages; the first step is compute."""
        op, block = instruction.op, instruction.block
        steps = self.program.model.block_program(block).routed_steps(op)
        if not steps:
            return ()
        own = self.routed[block] if self.routed else RoutedSeconds()
        found = list(pass_steps(steps, op, category, block, own, self._priced(block)))
        # Compute before the messages of a forward comes after those of a backward.
        within_s = [own.of(step) for step in steps if isinstance(step, Compute) and step.kind in FORWARD]
        # A look-up runs between its messages; its seconds count before them.
        first_s = max(0.0, self.forward_s[block] - sum(within_s)) if within_s or op is Op.FORWARD else 0.0
        last_s = max(0.0, seconds - first_s - sum(map(own.of, steps)))
        first, last = (PassStep(Doing.COMPUTE, Event(op, block, each, -1, category)) for each in (first_s, last_s))
        return (first, *found, last) if op is not Op.FORWARD else (first, *found)

    def _priced(self, block: int) -> InBlockPrices:
        alike = self.program.model.alike_inside(block)
        prices = self._prices.get(alike)
        if prices is None:
            prices = self._prices[alike] = block_prices(self.program, block)
        return prices

    def rooms(self, forward_s: float, input_s: float, weight_s: float, rounds: Rounds) -> Rooms:
        """Seconds of a block's compute that can hide its messages, by piece."""
        return rooms_of(forward_s, input_s, weight_s, rounds)

    @cached_property
    def _prices(self) -> dict[tuple[int, tuple[str, ...]], InBlockPrices]:
        return {}

    @cached_property
    def _collectives(self) -> dict[tuple[object, ...], tuple[float, int, str, float]]:
        return {}

    @cached_property
    def passes(self) -> dict[tuple[object, ...], "Play"]:
        """Cache of priced passes (terrace.simulate.events)."""
        return {}

    @cached_property
    def _waits(self) -> dict[tuple[object, ...], dict[MessageClass, float]]:
        return {}


def step_costs(program: "Program", work: Work | Sequence[float]) -> Costs:
    """Prices of a program, from a rank's `Work` on a micro-batch or from each whole block's forward FLOPs.

    Tensor and context ranks share the FLOPs of a block evenly. From FLOPs, the backward of a block takes twice its
    forward: one product for the gradient of the input and one for the gradient of the weight, which a frozen block
    skips. Raises `PlanError` when the plan and the work disagree.
    """
    return _from_work(program, work) if isinstance(work, Work) else _from_flops(program, work)


def _from_work(program: "Program", work: Work) -> Costs:
    device, plan = program.cluster.device, program.plan
    if (work.micro_batch, work.compute) != (plan.micro_batch, plan.compute):
        raise PlanError(
            f"the work is of {work.micro_batch} sequences in {work.compute}, the plan's micro-batch of "
            f"{plan.micro_batch} in {plan.compute}: make them the same"
        )
    check_same(work, plan)
    if work.recompute != "none" or work.operations:
        named = f"recompute = {work.recompute!r}" if work.recompute != "none" else f"operations = {work.operations}"
        raise PlanError(f"work.{named}: the plan says what is recomputed, so leave it out")
    if (work.rows, work.columns) != (program.model.tensor.rows.degree, program.model.tensor.columns.degree):
        raise PlanError(
            f"the work is of {work.rows} x {work.columns} tensor ranks (rows x columns), the plan's are "
            f"{program.model.tensor.rows.degree} x {program.model.tensor.columns.degree}: make them the same"
        )
    known: dict[int, tuple[tuple[float, float, float, float], Rounds, RoutedSeconds]] = {}
    accumulate = program.num_micros > 1
    kinds = program.model.block_kinds
    for index, (kind, block) in enumerate(zip(kinds, program.blocks, strict=True)):
        if kind not in known:
            routed, divided = routed_seconds(program, index, work)
            seconds = seconds_of(device, work, block, accumulate=accumulate, divided=divided)
            # Frozen matrices get no gradient, but the gradient of the input still passes through them.
            weight_s = seconds.weight_s * trained_part(block, program.blocks)
            rounds = core_rounds(device, work_in(work, block, device.type))
            copied = copies_s(device, program.model.flats[index], plan.unit)
            own = seconds.forward_s, seconds.input_s + weight_s, weight_s, seconds.saved_s
            each = own[0] + copied[0], own[1] + copied[1], own[2], own[3] + copied[0]  # copied once in a forward
            known[kind] = each, rounds, routed
    forward, backward, weight, saved = ([known[kind][0][part] for kind in kinds] for part in range(4))
    in_chunks = program.blocks[-1].computes is Computes.LOGITS
    each_rounds, each_routed = [known[kind][1] for kind in kinds], [known[kind][2] for kind in kinds]
    costs = _costs(program, forward, backward, update_seconds(program), weight, each_rounds, each_routed, in_chunks)
    dealt_s = work.ragged.dealt.wait_s
    return replace(costs, operations_s=_operations_s(program, work), saved_s=tuple(saved), dealt_s=dealt_s)


def _operations_s(program: "Program", work: Work) -> tuple[float, ...]:
    known: dict[tuple[int, tuple[str, ...]], float] = {}
    found = []
    for index, kind in enumerate(program.model.block_kinds):
        key = kind, operations_in(program.model.recomputed[index])
        if key not in known:
            own = work_in(work, program.blocks[index], program.cluster.device.type)
            known[key] = operation_seconds(program.cluster.device, own, key[1])
        found.append(known[key])
    return tuple(found)


def _costs(
    program: "Program",
    forward: Sequence[float],
    backward: Sequence[float],
    update: Sequence[float],
    weight: Sequence[float],
    rounds: Sequence[Rounds],
    routed: Sequence[RoutedSeconds],
    in_chunks: bool,
) -> Costs:
    if program.plan.keep.hands_over:
        update = host_update_seconds(program, update)
    # A loss in chunks runs forward and backward together, in the backward (terrace.runtime.head).
    if in_chunks and program.model.tensor.degree == 1 and program.trains:
        backward = [*backward[:-1], forward[-1] + backward[-1]]
        forward, weight = [*forward[:-1], 0.0], [*weight[:-1], 0.0]
    return Costs(
        forward_s=tuple(forward),
        backward_s=tuple(backward),
        update_s=tuple(update),
        program=program,
        weight_s=tuple(weight),
        rounds=tuple(rounds),
        routed=tuple(routed),
    )


def update_seconds(program: "Program") -> tuple[float, ...]:
    """Optimizer seconds of a rank's shard of every block; a device's constant is added to the last trainable block."""
    device, plan = program.cluster.device, program.plan
    more, item = rounding_bytes(device, plan.master, plan.optimizer_states), FORMATS[plan.compute].element_bytes

    def own_s(parts: Sequence[FlatParamSpec]) -> float:
        # The constant counts once a step, below, not once a block.
        # Codes: rounded to the compute dtype and read twice, for the largest magnitude and for the code.
        coded = [flat for flat in parts if flat.is_coded]
        coding_s = 0.0
        if coded:
            kernels = _CODING_KERNELS * sum(flat.num_scales for flat in coded)
            coding_s = memory_s(device, (2 * item + 1) * _owned(coded), kernels)
        own_s = optimizer_s(device, _owned(parts), more) - device.kernels.optimizer_s
        return own_s + coding_s + whole_matrices_s(program, parts)

    update = program.model.of_flats(own_s)
    for block in program.stage.held:
        if used := _used(program, block):
            update[block] += optimizer_s(device, used, more) - device.kernels.optimizer_s
    trained = [block for block in program.stage.held if program.blocks[block].num_trainable]
    if trained:  # only their UPDATE is played
        update[trained[-1]] += device.kernels.optimizer_s  # once a step, on every stage
    return host_update_seconds(program, update) if plan.keep.hands_over else tuple(update)


def whole_matrices_s(program: "Program", flats: Sequence[FlatParamSpec]) -> float:
    """Seconds of an optimizer's products on the matrices that overlap a rank's shard of a block; 0 if it has none."""
    device, plan = program.cluster.device, program.plan
    return sum(
        times * gemm_s(device, m, k, n, 1, plan.compute)
        for flat in flats
        for times, m, k, n in products_of_a_rank(plan.update, flat.matrix_slices)
    )


def _owned(flats: Sequence[FlatParamSpec]) -> int:
    trained = (flat for flat in flats if flat.trainable and not flat.is_spread)
    return sum(flat.padded // flat.layout.span(flat.layout.optimizer) for flat in trained)


def _used(program: "Program", block: int) -> float:
    """Elements of a spread table that an update changes on a rank."""
    look_ups = program.model.routed.look_ups(block)
    return look_ups.width * look_ups.used(program.num_micros)


def _from_flops(program: "Program", forward_flops: Sequence[float]) -> Costs:
    device, plan = program.cluster.device, program.plan
    # If the device states no peak for the dtype, its highest peak is used.
    peak = device.peak_flops_per_s.get(plan.compute) or max(device.peak_flops_per_s.values())
    item, summed = FORMATS[plan.compute].element_bytes, FORMATS[plan.sums].element_bytes
    more = rounding_bytes(device, plan.master, plan.optimizer_states)
    bandwidth = device.memory_bandwidth_bytes_per_s
    shared = program.model.tensor.degree * math.prod(program.mesh.group(*CONTEXT))
    forward, backward, weight, update, routed = [], [], [], [], []
    of_blocks = zip(program.blocks, program.model.flats, forward_flops, strict=True)
    for index, (block, parts, whole_flops) in enumerate(of_blocks):
        flops = whole_flops / shared
        weights = sum(param.numel for param in block.params if not param.is_spread) * item
        # The weights are read at least once.
        forward.append(max(flops / peak, weights / bandwidth))
        weight.append(forward[-1] * trained_part(block, program.blocks))
        backward.append(forward[-1] + weight[-1])
        routed.append(shared_out(block, program.model.routed.traffic(index), flops, forward[-1], weight[-1]))
        copied = item if any(keeps_master(plan, flat.layout, coded=flat.is_coded) for flat in parts) else 0
        whole = [product for flat in parts for product in products_of_a_rank(plan.update, flat.matrix_slices)]
        products_s = sum(2.0 * times * m * k * n for times, m, k, n in whole) / peak
        owned = _owned(parts) + _used(program, index)
        update.append(owned * (_ADAMW_PASSES * summed + copied + more) / bandwidth + products_s)
    rounds = [_rounds(program, peak)] * len(program.blocks)
    # Of the recomputed operations only attention has FLOPs, in one round: context ranks do not recompute operations.
    again = ["attention" in parts for parts in program.model.recomputed]
    # The loss of any last block is assumed to be computed in chunks, which FLOPs do not show.
    costs = _costs(program, forward, backward, update, weight, rounds, routed, True)
    return replace(costs, operations_s=tuple(each[0][0] * runs for each, runs in zip(rounds, again, strict=True)))


def _rounds(program: "Program", peak: float) -> Rounds:
    heads = next(filter(None, (attention_heads(each, program.mesh.total("rows")) for each in program.blocks)), None)
    if heads is None:
        return NO_ROUNDS
    # A ring of R ranks computes its scores in R rounds on R ranks, so each round has 1 / R^2 of them.
    scores = program.plan.micro_batch * program.model.sequence**2 * heads.queries / program.mesh.total("ulysses")
    forward_s = 4 * scores * heads.size / program.mesh.total("ring") ** 2 / peak
    return (forward_s, 2 * forward_s), (forward_s, 2 * forward_s)

"""All ranks of a small world simulated together, instruction by instruction: the reference for the simulation of one.

Every rank has a compute stream and a lane for every tier. A collective is a chain of hops, each among the ranks that
differ on one tier alone. The first hop starts when all of its members have issued the message, hold its input
and have their lane free; every further hop when its members have ended the one before. A hop ends for all of its
members at once.

Ranks run the same instructions in the same order, and no rank depends on another's later instructions, so the world is
simulated instruction by instruction, with a clock for each rank.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from terrace.plan.layout import Layout
from terrace.plan.residency import recomputed
from terrace.plan.routes import block_hops
from terrace.plan.state_bytes import accumulates_in_place
from terrace.plan.wire import MessageClass
from terrace.program.instruction import Instruction, Op
from terrace.program.program import Program
from terrace.simulate.cost import Costs
from terrace.simulate.links import rate_bytes_per_s


def joint_time_s(program: Program, costs: Costs, slower: Mapping[int, float] | None = None) -> list[dict[str, float]]:
    """Return the seconds of a steady step by category, of every rank; rank r computes `slower[r]` times as long."""
    world = _World(program, costs, slower or {})
    for _ in range(2):
        for rank in world.ranks:
            rank.time_s.clear()
        for instruction in program.instructions:
            world.step(instruction)
    return [dict(rank.time_s) for rank in world.ranks]


@dataclass
class _Rank:
    """The clocks of one rank and the moments at which its messages under way will be there."""

    slower: float
    penalty: float
    now_s: float = 0.0
    lanes_s: dict[int, float] = field(default_factory=lambda: defaultdict(float))  # when each lane is free
    time_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    gathers: dict[int, tuple[float, str]] = field(default_factory=dict)
    refreshes: dict[int, float] = field(default_factory=dict)
    reductions: list[float] = field(default_factory=list)
    reduced: dict[int, float] = field(default_factory=dict)
    syncs: list[float] = field(default_factory=list)

    def wait(self, done_s: float, category: str) -> None:
        if done_s > self.now_s:
            self.time_s[category] += done_s - self.now_s
            self.now_s = done_s

    def compute(self, seconds: float, category: str) -> None:
        seconds *= self.slower
        busy_s = max(self.lanes_s.values(), default=0.0) - self.now_s
        seconds += self.penalty * min(seconds, max(0.0, busy_s))
        self.time_s[category] += seconds
        self.now_s += seconds


class _World:
    def __init__(self, program: Program, costs: Costs, slower: Mapping[int, float]) -> None:
        self.program, self.costs, self.cluster = program, costs, program.cluster
        self.again = recomputed(program.plan, program.blocks)
        penalty = program.cluster.device.overlap_penalty
        self.ranks = [_Rank(slower.get(rank, 1.0), penalty) for rank in range(program.cluster.world_size)]

    def step(self, instruction: Instruction) -> None:
        op, block = instruction.op, instruction.block
        if op in (Op.FORWARD, Op.BACKWARD):
            for rank in self.ranks:
                self._pass(rank, instruction)
            self._inside(instruction)
        elif op is Op.UPDATE:
            for rank in self.ranks:
                rank.compute(self.costs.update_s[block], "update")
        elif op is Op.GATHER:
            category = f"wait {instruction.message_class}"
            ready = [rank.refreshes.pop(block, 0.0) for rank in self.ranks]
            for rank, done_s in zip(self.ranks, self._issue(instruction, ready), strict=True):
                rank.gathers[block] = (done_s, category)
        elif op is Op.REDUCE and self._buffered(block):
            for rank, done_s in zip(self.ranks, self._issue(instruction), strict=True):
                rank.reduced[block] = done_s
                rank.reductions.append(done_s)
        elif op is Op.SYNC:
            ready = [rank.reduced.get(block, 0.0) for rank in self.ranks]
            for rank, done_s in zip(self.ranks, self._issue(instruction, ready), strict=True):
                rank.syncs.append(done_s)
        elif op is Op.CLIP:
            self._clip(instruction)
        elif op is Op.REFRESH:
            for rank, done_s in zip(self.ranks, self._issue(instruction), strict=True):
                rank.refreshes[block] = done_s

    def _pass(self, rank: _Rank, instruction: Instruction) -> None:
        block, blocks = instruction.block, self.program.blocks
        read = (block, *blocks[block].tied_to)
        for needed in read:
            if needed in rank.gathers:
                rank.wait(*rank.gathers.pop(needed))
            if not self.program.model.gathers(needed) and needed in rank.refreshes:
                rank.wait(rank.refreshes.pop(needed), "wait refresh")
        if instruction.op is Op.FORWARD:
            rank.compute(self.costs.forward_s[block], "forward")
            return
        if any(self._buffered(needed) for needed in read):  # it needs a gradient buffer; there are two
            while len(rank.reductions) > 1:
                rank.wait(rank.reductions.pop(0), "wait reduce")
        recompute_s = self.costs.forward_s[block] if block in self.again else 0.0
        rank.compute(self.costs.backward_s[block] + recompute_s, "backward")

    def _buffered(self, block: int) -> bool:
        flats = self.program.model.flats[block]
        return any(flat.trainable and not accumulates_in_place(flat.layout) for flat in flats)

    def _inside(self, instruction: Instruction) -> None:
        """Ranks of the tensor axis wait for one another inside a block, then for their messages."""
        seconds = self.costs.waits_inside(instruction).get(MessageClass.TENSOR, 0.0)
        if not seconds:
            return
        tensor = self.program.model.tensor.both
        at_s = [rank.now_s for rank in self.ranks]
        for tier, degree in enumerate(tensor.degrees):
            if degree > 1:
                at_s = [max(at_s[peer] for peer in tensor.peers(rank, tier)) for rank in range(len(at_s))]
        for rank, there_s in zip(self.ranks, at_s, strict=True):
            rank.wait(there_s + seconds, "wait tensor")

    def _clip(self, instruction: Instruction) -> None:
        for rank in self.ranks:
            for done_s in rank.reductions:
                rank.wait(done_s, "wait reduce")
            for done_s in rank.syncs:
                rank.wait(done_s, "wait sync")
            rank.reductions.clear()
            rank.syncs.clear()
        for rank, done_s in zip(self.ranks, self._issue(instruction), strict=True):
            rank.wait(done_s, "wait control")

    def _issue(self, instruction: Instruction, ready_s: Sequence[float] | None = None) -> list[float]:
        """Return, of every rank, when a message will be there that may start at `ready_s`."""
        ready_s = ready_s or [0.0] * len(self.ranks)
        at_s = [max(rank.now_s, ready) for rank, ready in zip(self.ranks, ready_s, strict=True)]
        hops = list(self._hops(instruction))
        if not hops:
            return at_s
        lane = self.program.message(instruction).lane
        device = self.cluster.device
        codec_bytes_per_s = device.memory_bandwidth_bytes_per_s * device.kernels.codec
        coding_s = self.program.message(instruction).coding_bytes / codec_bytes_per_s
        at_s = [max(at, rank.lanes_s[lane]) + coding_s for rank, at in zip(self.ranks, at_s, strict=True)]
        for layout, tier, num_bytes in hops:
            seconds = self._hop_s(layout.degrees[tier], tier, num_bytes)
            at_s = [max(at_s[peer] for peer in layout.peers(rank, tier)) + seconds for rank in range(len(at_s))]
        for rank, done_s in zip(self.ranks, at_s, strict=True):
            rank.lanes_s[lane] = done_s
        return at_s

    def _hops(self, instruction: Instruction) -> Iterator[tuple[Layout, int, int]]:
        """Yield (layout of who takes part, tier, bytes a rank sends), one flat buffer after the other."""
        program, message = self.program, instruction.message_class
        assert message is not None, f"{instruction} sends nothing"
        if message is MessageClass.CONTROL:
            yield from (
                (program.model.stage_layout, tier, num_bytes) for tier, num_bytes in program.message(instruction).sends
            )
            return
        source = program.model.stage_layout.params_backward if instruction.secondary else None
        for flat in program.model.flats[instruction.block]:
            if flat.trainable or instruction.op is Op.GATHER:
                reduction, gathering = block_hops(flat.layout, program.plan, message, flat.padded, source)
                yield from ((flat.layout, hop.tier, hop.sent_bytes) for hop in (*reduction, *gathering))

    def _hop_s(self, degree: int, tier: int, num_bytes: int) -> float:
        """Return the seconds in which every member sends `num_bytes` to the others: a part to each of them."""
        rate = rate_bytes_per_s(self.cluster, tier, num_bytes * degree / (degree - 1), degree=degree)
        return (degree - 1) * self.cluster.tiers[tier].latency_s + num_bytes / rate

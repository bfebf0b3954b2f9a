"""One rank's step simulated plainly, one instruction after the other: the reference for the fast simulator."""

from collections import defaultdict, deque
from dataclasses import dataclass, field

from terrace.plan.residency import recomputed
from terrace.plan.state_bytes import accumulates_in_place
from terrace.plan.wire import MessageClass
from terrace.program.instruction import Instruction, Op
from terrace.program.period import Period
from terrace.program.program import Program
from terrace.simulate.cost import Costs


def slow_time_s(program: Program, costs: Costs) -> dict[str, float]:
    """Return the seconds of a steady step by category."""
    rank = _Rank(program, costs, recomputed(program.plan, program.blocks))
    for _ in range(2):
        rank.time_s = defaultdict(float)
        for instruction in program.instructions:
            rank.step(instruction)
    return dict(rank.time_s)


def slow_cycle_s(period: Period, costs: Costs, cycles: int = 3) -> list[dict[str, float]]:
    """Return the seconds of every turn of the last of some cycles, step after step, on one clock."""
    first = period.turns[0].programs[0]
    rank = _Rank(first, costs, recomputed(first.plan, first.blocks))
    for _ in range(cycles):
        found = []
        for turn in period.turns:
            rank.time_s = defaultdict(float)
            for _ in range(turn.times):
                rank.program, rank.costs = turn.programs[0], costs.of_stage(turn.programs[0], costs.update_s)
                for instruction in rank.program.instructions:
                    rank.step(instruction)
            found.append(dict(rank.time_s))
    return found


@dataclass
class _Rank:
    """The clocks of one rank and the moments at which communication under way will be done."""

    program: Program
    costs: Costs
    again: frozenset[int]
    now_s: float = 0.0
    lanes_s: dict[int, float] = field(default_factory=lambda: defaultdict(float))  # when each lane is free
    begins_s: dict[int, float] = field(default_factory=lambda: defaultdict(float))  # and busy since, without a pause
    penalties: dict[int, float] = field(default_factory=lambda: defaultdict(float))  # of each lane's newest message
    time_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    gathers: dict[int, tuple[float, str]] = field(default_factory=dict)
    refreshes: dict[int, float] = field(default_factory=dict)
    reductions: deque[float] = field(default_factory=deque)
    reduced: dict[int, float] = field(default_factory=dict)
    syncs: list[float] = field(default_factory=list)
    told_s: float = 0.0  # when the numbers of islands are there
    changes: dict[int, float] = field(default_factory=dict)

    def step(self, instruction: Instruction) -> None:
        op, block = instruction.op, instruction.block
        if op is Op.GATHER:
            refreshed_s = self.refreshes.pop(block, 0.0)
            self.gathers[block] = (self._issue(instruction, refreshed_s), f"wait {instruction.message_class}")
        elif op is Op.FORWARD:
            self._await_parameters(block)
            self._compute(self.costs.forward_s[block], "forward")
            self._inside(instruction)
        elif op is Op.BACKWARD:
            self._await_parameters(block)
            read = (block, *self.program.blocks[block].tied_to)
            while len(self.reductions) > 1 and any(self._opens_gradient(needed) for needed in read):
                self._wait(self.reductions.popleft(), "wait reduce")
            again = self.costs.forward_s[block] if block in self.again else 0.0
            self._compute(self.costs.backward_s[block] + again, "backward")
            self._inside(instruction)
        elif op is Op.REDUCE:
            if self._opens_gradient(block):
                self.reduced[block] = self._issue(instruction)
                self.reductions.append(self.reduced[block])
        elif op is Op.SYNC:
            self.syncs.append(self._issue(instruction, self.reduced.get(block, 0.0)))
        elif op is Op.CLIP:
            self._clip(instruction)
        elif op is Op.UPDATE:
            self._compute(self.costs.update_s[block], "update")
        elif op is Op.REFRESH:
            self.refreshes[block] = self._issue(instruction)
        elif op in (Op.OUTER_COUNT, Op.OUTER_START, Op.OUTER_APPLY):
            self._outer(instruction)

    def _outer(self, instruction: Instruction) -> None:
        block = instruction.block
        if instruction.op is Op.OUTER_COUNT:
            self._compute(self.costs.take_s(), "update")
            self.told_s = self._issue(instruction)
        elif instruction.op is Op.OUTER_START:
            self.changes[block] = self._issue(instruction, self.told_s)
        else:
            self._wait(self.changes.pop(block, 0.0), "wait outer")
            self._wait(self.refreshes.pop(block, 0.0), "wait refresh")
            self._compute(self.costs.apply_s(block), "update")

    def _clip(self, instruction: Instruction) -> None:
        for done_s in self.reductions:
            self._wait(done_s, "wait reduce")
        for done_s in self.syncs:
            self._wait(done_s, "wait sync")
        self.reductions.clear()
        self.syncs.clear()
        self._wait(self._issue(instruction), "wait control")

    def _await_parameters(self, block: int) -> None:
        for needed in (block, *self.program.blocks[block].tied_to):
            if needed in self.gathers:
                self._wait(*self.gathers.pop(needed))
            if not self.program.model.gathers(needed) and needed in self.refreshes:
                self._wait(self.refreshes.pop(needed), "wait refresh")

    def _opens_gradient(self, block: int) -> bool:
        """Whether a block has a gradient in a buffer: frozen ones, and those added up where they stay, have none."""
        flats = self.program.model.flats[block]
        return any(flat.trainable and not accumulates_in_place(flat.layout) for flat in flats)

    def _inside(self, instruction: Instruction) -> None:
        """Messages of tensor ranks inside a block take their time on no lane."""
        seconds = self.costs.waits_inside(instruction).get(MessageClass.TENSOR, 0.0)
        if seconds:
            self.time_s["wait tensor"] += seconds
            self.now_s += seconds

    def _issue(self, instruction: Instruction, ready_s: float = 0.0) -> float:
        """Return when a message will be there that may start at `ready_s`."""
        message = self.program.message(instruction)
        lane, (seconds, penalty) = message.lane, self.costs.of_message(message)
        if not seconds:
            return max(ready_s, self.now_s)
        start_s = max(self.now_s, ready_s)
        if self.lanes_s[lane] <= start_s:
            self.begins_s[lane] = start_s
        self.lanes_s[lane] = max(self.lanes_s[lane], start_s) + seconds
        self.penalties[lane] = penalty
        return self.lanes_s[lane]

    @property
    def _is_cpu(self) -> bool:
        return self.program.cluster.device.type == "cpu"

    def _wait(self, done_s: float, category: str) -> None:
        if done_s > self.now_s:
            seconds = done_s - self.now_s
            wanted_s = sum(self._wanted_s(lane, seconds) for lane in self.lanes_s)
            self.now_s = done_s
            self.time_s[category] += seconds
            if self._is_cpu and wanted_s > seconds:
                self.time_s[category] += self._stand_still(wanted_s - seconds)

    def _compute(self, seconds: float, category: str) -> None:
        if self._is_cpu:  # the clock stands still while messages take the cores
            wanted_s = sum(self._wanted_s(lane, seconds) for lane in self.lanes_s)
            self.now_s += seconds
            self.time_s[category] += seconds + self._stand_still(wanted_s)
            return
        shared_s = {lane: min(seconds, max(0.0, end_s - self.now_s)) for lane, end_s in self.lanes_s.items()}
        seconds += max((self.penalties[lane] * shared_s[lane] for lane in shared_s), default=0.0)
        self.time_s[category] += seconds
        self.now_s += seconds

    def _stand_still(self, seconds: float) -> float:
        """Return how long all stands still for `seconds` of cores, but the link of islands, whose message goes on.

        The message needs cores for a part of its time; it waits for them too, so that all stand still for longer.
        """
        lane = len(self.program.cluster.tiers) - 1
        if not self.program.plan.outer.has_islands or self.lanes_s[lane] <= self.now_s:
            return seconds
        part, left_s, further_s, total_s = self.penalties[lane], self.lanes_s[lane] - self.now_s, seconds, 0.0
        while further_s > 1e-15 * seconds:
            total_s += further_s
            carried_s = min(left_s, (1.0 - part) * further_s)
            left_s, further_s = left_s - carried_s, part * carried_s
        for block in self.changes:
            self.changes[block] -= self.lanes_s[lane] - self.now_s - left_s
        self.lanes_s[lane] = self.now_s + left_s
        return total_s

    def _wanted_s(self, lane: int, seconds: float) -> float:
        """Return the part of the cores' next `seconds` that a lane's messages need."""
        begin_s, end_s = max(self.begins_s[lane], self.now_s), min(self.lanes_s[lane], self.now_s + seconds)
        return self.penalties[lane] * max(0.0, end_s - begin_s)

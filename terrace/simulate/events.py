"""Event simulation of a program on one rank: a compute stream and a lane for every tier.

The rules are the executor's: communication is issued in program order onto the lane of the outermost tier it crosses
and starts when the lane is free and its input is ready; an instruction on the compute stream waits only for its inputs.
Messages inside a block take no lane: compute waits for them in place. Compute that overlaps a busy lane is slowed by
the overlap penalty of the lane's newest message, for the time they share:

- on a device with separate cores for messages (CUDA), only compute is slowed; with several busy lanes the largest
  penalty counts;
- on a CPU the same cores do both. A penalty is the part of the cores that a message needs; where compute and
  messages together need more cores than there are, all of them take longer. `now_s` and the times of lanes are then
  read from a clock that stops for the extra time, so nothing is slowed by it. Seconds by category are wall time.

The step is played twice and the second is reported, so that refreshes which overlap the start of the next step are in
their steady state.

A program repeats the same few instructions for every micro-batch, so each distinct one is priced once and the play
itself only adds and compares. `terrace.simulate.recording` plays by the same rules and keeps every span.
"""

import math
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from terrace.base.errors import ProgramError
from terrace.plan.mesh import CONTEXT
from terrace.plan.state_bytes import accumulates_in_place
from terrace.program.instruction import PASSES, Instruction, Op
from terrace.program.phase import Phase
from terrace.program.report import StepReport
from terrace.simulate.cost import Costs

if TYPE_CHECKING:
    from terrace.program.program import Program


def simulate(program: "Program", costs: Costs) -> StepReport:
    """The predicted report of a steady step. Linear in the number of instructions.

    Raises `ProgramError` for a program that talks to other stages (terrace.simulate.stages plays all of them).
    """
    check_alone(program)
    return program.report(_time(program, price(program, costs)))


def step_seconds(program: "Program", costs: Costs) -> dict[str, float]:
    """Seconds of a steady step by category, without the report; raises as `simulate` does."""
    check_alone(program)
    return _time(program, price(program, costs))


def check_alone(program: "Program") -> None:
    """Raise `ProgramError` for a program that talks to other stages."""
    if program.stage.num_stages > 1:
        raise ProgramError(
            f"the program of stage {program.stage.index} talks to other stages: simulate all {program.stage.num_stages}"
        )


def _time(program: "Program", plays: list["Play"]) -> dict[str, float]:
    # FREE takes no time.
    plays = [play for play in plays if play[1].op is not Op.FREE]
    rank = Rank(program)
    for _ in range(2):
        rank.time_s = defaultdict(float)
        for act, event in plays:
            act(rank, event)
    return dict(rank.time_s)


@dataclass(slots=True, eq=False)
class Event:
    """A distinct instruction as it is played: its seconds, its lane and the blocks it reads."""

    op: Op
    block: int
    seconds: float  # on the compute stream or the lane
    lane: int  # -1: the compute stream
    category: str  # of its compute, or of waiting for it
    needs: tuple[int, ...] = ()  # blocks whose parameters it reads
    opens: bool = False  # whether it needs a gradient buffer
    inside: tuple[tuple[str, float], ...] = ()  # exposed messages inside the block: category, seconds
    penalty: float = 0.0  # of a message: slow-down of compute, as a share of the shared time


Play = tuple[Callable[["Rank", Event], None], Event]
Moment = tuple[float, int]  # when a message will be there; for a recording, the number of its span


def price(program: "Program", costs: Costs) -> list[Play]:
    """The play of every instruction, in order; instructions that differ only in their micro-batch share an event."""
    plays = price_distinct(program, costs)
    return [plays[number] for number in program.folded[1]]


def price_distinct(program: "Program", costs: Costs) -> list[Play]:
    """The plays of the distinct instructions (`Program.folded`)."""
    pricing = _Pricing(program, costs)
    return [pricing.play(instruction) for instruction in program.folded[0]]


class _Pricing:
    def __init__(self, program: "Program", costs: Costs) -> None:
        self.program, self.costs = program, costs
        self._sends_inside = program.tensor.degree * math.prod(program.mesh.group(*CONTEXT)) > 1
        self._buffered = gradient_buffers(program)

    def play(self, instruction: Instruction) -> Play:
        op, block = instruction.op, instruction.block
        if op in PASSES:
            return self._pass(instruction)
        if op is Op.UPDATE:
            return Rank.update, Event(op, block, self.costs.update_s[block], -1, "update")
        if op is Op.OUTER_APPLY:
            return Rank.outer_apply, Event(op, block, self.costs.apply_s(block), -1, "update")
        # Frozen blocks and gradients accumulated in place need no reduction; a RECV is waited for by its pass.
        if op in (Op.FREE, Op.RECV) or (op is Op.REDUCE and not self._buffered[block]):
            return Rank.nothing, Event(op, block, 0.0, -1, "")
        if op in (Op.SEND, Op.TIE):
            category = f"wait {instruction.message_class}"
            seconds, penalty = self.costs.point_to_point(instruction)
            return Rank.nothing, Event(op, block, seconds, Rank.SENDING, category, penalty=penalty)
        act = Rank.restore if self.program.phase is Phase.RESTORE else _COLLECTIVE[op]
        seconds, lane, category, penalty = self.costs.collective(instruction)
        return act, Event(op, block, seconds, lane, category, penalty=penalty)

    def _pass(self, instruction: Instruction) -> Play:
        op, index, blocks = instruction.op, instruction.block, self.program.blocks
        needs = (index, *blocks[index].borrows)
        # Parameters that no gather brings are ready after the refresh of the step before, so the pass waits for it.
        act = Rank.run if all(map(self.program.gathers, needs)) else Rank.run_whole
        inside = self._waits_inside(instruction)
        if op is Op.FORWARD:
            return act, Event(op, index, self.costs.forward_s[index], -1, "forward", needs, inside=inside)
        opens = any(self._buffered[needed] for needed in needs)
        weight_s = self.costs.weight_s[index] if self.costs.weight_s else 0.0
        if op is Op.BACKWARD_WEIGHT:  # reads no parameters
            return Rank.run, Event(op, index, weight_s, -1, "backward", (), opens)
        seconds = self.costs.backward_s[index]
        if self.program.recomputes(index):  # it runs its forward again first
            seconds += self.costs.forward_s[index]
        if op is Op.BACKWARD_INPUT:
            seconds -= weight_s
        return act, Event(op, index, seconds, -1, "backward", needs, opens, inside=inside)

    def _waits_inside(self, instruction: Instruction) -> tuple[tuple[str, float], ...]:
        if not self._sends_inside:
            return ()
        waits = self.costs.waits_inside(instruction)
        return tuple((f"wait {name.value}", seconds) for name, seconds in waits.items() if seconds)


def gradient_buffers(program: "Program") -> list[bool]:
    """Whether some gradient of each block is whole until it is reduced, and not accumulated in place.

    A block of frozen parameters has none.
    """
    return program.of_flats(
        lambda flats: any(flat.trainable and not accumulates_in_place(program.plan, flat.layout) for flat in flats)
    )


class Rank:
    """The clocks of one rank, and the arrival times of its messages in flight."""

    SENDING = -1  # the lane of messages to other stages, after the tiers' lanes

    __slots__ = (
        "begins_s",
        "busy_s",
        "changes",
        "directions",
        "gathers",
        "lanes_s",
        "mutual",
        "now_s",
        "penalties",
        "reduced",
        "reductions",
        "refreshes",
        "syncs",
        "time_s",
    )

    def __init__(self, program: "Program") -> None:
        self.now_s = 0.0
        self.mutual = program.cluster.device.backend == "cpu"  # whether compute slows messages, too
        num_lanes = len(program.layout.tiers) + (program.stage.num_stages > 1)
        self.lanes_s = [0.0] * num_lanes  # when each lane is free
        self.begins_s = [0.0] * num_lanes  # since when each lane has been busy without a pause
        self.penalties = [0.0] * num_lanes  # of the newest message of each lane
        self.busy_s = 0.0  # when all are
        self.time_s: dict[str, float] = defaultdict(float)
        self.gathers: dict[int, tuple[Moment, str]] = {}
        self.refreshes: dict[int, Moment] = {}
        self.reductions: deque[Moment] = deque()
        self.reduced: dict[int, Moment] = {}
        self.syncs: list[Moment] = []
        self.directions: dict[int, tuple[Moment, str]] = {}
        self.changes: dict[int, tuple[Moment, str]] = {}

    def nothing(self, event: Event) -> None:
        """FREE, and REDUCE where autograd adds into the accumulated gradient itself."""

    def gather(self, event: Event) -> None:
        """GATHER starts after the refresh of its block."""
        self.gathers[event.block] = self.issue(event, self.refreshes.pop(event.block, _START)), event.category

    def run(self, event: Event) -> None:
        """FORWARD and BACKWARD wait for the gathers of the blocks they read."""
        gathers = self.gathers
        for block in event.needs if gathers else ():
            if block in gathers:
                moment, category = gathers.pop(block)
                if moment[0] > self.now_s:
                    self.wait(moment, category)
        # At most one reduction may be in flight when a new gradient buffer opens.
        while event.opens and len(self.reductions) > 1:
            self.wait(self.reductions.popleft(), "wait reduce")
        self.compute(event)
        for category, seconds in event.inside:
            self.inside(category, seconds)

    def run_whole(self, event: Event) -> None:
        """FORWARD and BACKWARD with parameters that are whole on every rank: they wait for the refresh."""
        refreshes = self.refreshes
        for block in event.needs if refreshes else ():
            if block in refreshes:
                self.wait(refreshes.pop(block), "wait refresh")
        self.run(event)

    def reduce(self, event: Event) -> None:
        """REDUCE of a unit's gradient."""
        self.reduced[event.block] = moment = self.issue(event, _START)
        self.reductions.append(moment)

    def sync(self, event: Event) -> None:
        """SYNC starts after the last reduction of its block."""
        self.syncs.append(self.issue(event, self.reduced.get(event.block, _START)))

    def clip(self, event: Event) -> None:
        """CLIP waits for every gradient, then for its own message."""
        self.settle()
        self.wait(self.issue(event, _START), event.category)

    def settle(self) -> None:
        """Wait for every gradient."""
        for moment in self.reductions:
            self.wait(moment, "wait reduce")
        for moment in self.syncs:
            self.wait(moment, "wait sync")
        self.reductions.clear()
        self.syncs.clear()

    def exchange(self, event: Event) -> None:
        """TIE takes no lane: both stages are here, and wait for their exchange."""
        self.wait((self.now_s + event.seconds, -1), event.category)

    def orthogonalise(self, event: Event) -> None:
        """ORTHOGONALISE starts at once: its momentum is there."""
        self.directions[event.block] = self.issue(event, _START), event.category

    def update(self, event: Event) -> None:
        """UPDATE reads the gradients that CLIP waited for, and the whole matrices of its block."""
        if event.block in self.directions:
            self.wait(*self.directions.pop(event.block))
        self.compute(event)

    def outer_start(self, event: Event) -> None:
        """OUTER_START starts at once: the step before has changed the parameters."""
        self.changes[event.block] = self.issue(event, _START), event.category

    def outer_apply(self, event: Event) -> None:
        """OUTER_APPLY reads the mean change, and writes what a refresh of the step before still reads."""
        self.wait(*self.changes.pop(event.block))
        if event.block in self.refreshes:
            self.wait(self.refreshes.pop(event.block), "wait refresh")
        self.compute(event)

    def refresh(self, event: Event) -> None:
        """REFRESH follows its UPDATE."""
        self.refreshes[event.block] = self.issue(event, _START)

    def restore(self, event: Event) -> None:
        """REFRESH of a restoring program: no step runs before it is over."""
        self.wait(self.issue(event, _START), event.category)

    def issue(self, event: Event, ready: Moment) -> Moment:
        """Puts a message on its lane that may start at `ready`; returns its arrival."""
        start_s = ready[0]
        if self.now_s > start_s:
            start_s = self.now_s
        if not event.seconds:
            return start_s, ready[1]
        lanes_s, lane = self.lanes_s, event.lane
        if lanes_s[lane] > start_s:
            start_s = lanes_s[lane]
        else:
            # The lane was idle, so a new busy stretch begins.
            self.begins_s[lane] = start_s
        lanes_s[lane] = done_s = start_s + event.seconds
        self.penalties[lane] = event.penalty
        if done_s > self.busy_s:
            self.busy_s = done_s
        return done_s, -1

    def wait(self, moment: Moment, category: str) -> None:
        """Let the compute stream wait for a message."""
        seconds = moment[0] - self.now_s
        if seconds > 0.0:
            if self.mutual:  # several lanes may want the cores
                self.time_s[category] += max(0.0, self.needed_s(seconds) - seconds)
            self.time_s[category] += seconds
            self.now_s = moment[0]

    def compute(self, event: Event) -> None:
        """Run something on the compute stream."""
        seconds = event.seconds
        # Fast path: every lane is idle.
        if self.busy_s <= self.now_s:
            self.time_s[event.category] += seconds
            self.now_s += seconds
        elif self.mutual:
            self.time_s[event.category] += seconds + self.needed_s(seconds)
            self.now_s += seconds
        else:
            seconds += self.slowed_s(seconds)
            self.time_s[event.category] += seconds
            self.now_s += seconds

    def needed_s(self, seconds: float) -> float:
        """Core-seconds that messages need during the next `seconds`, by the penalties of their lanes."""
        total_s, now_s = 0.0, self.now_s
        for begin_s, end_s, penalty in zip(self.begins_s, self.lanes_s, self.penalties, strict=True):
            if end_s > now_s:
                shared_s = min(end_s, now_s + seconds) - max(begin_s, now_s)
                if shared_s > 0.0:
                    total_s += penalty * shared_s
        return total_s

    def slowed_s(self, seconds: float) -> float:
        """Extra seconds, due to messages, of compute that begins now and takes `seconds` without them."""
        most_s, now_s = 0.0, self.now_s
        for end_s, penalty in zip(self.lanes_s, self.penalties, strict=True):
            if end_s > now_s:
                shared_s = end_s - now_s
                slowed_s = penalty * (shared_s if shared_s < seconds else seconds)
                # Messages on several lanes run at once; only the strongest slow-down counts.
                if slowed_s > most_s:
                    most_s = slowed_s
        return most_s

    def inside(self, category: str, seconds: float) -> None:
        """Waits for the messages inside a block; their place between its kernels does not change the sum."""
        self.time_s[category] += seconds
        self.now_s += seconds


_START: Moment = (0.0, -1)  # before anything
_COLLECTIVE = {
    Op.GATHER: Rank.gather,
    Op.REDUCE: Rank.reduce,
    Op.SYNC: Rank.sync,
    Op.CLIP: Rank.clip,
    Op.ORTHOGONALISE: Rank.orthogonalise,
    Op.REFRESH: Rank.refresh,
    Op.OUTER_START: Rank.outer_start,
}

"""The clocks of one rank: a compute stream and a lane for every tier.

The rules are the executor's: communication is issued in program order onto the lane of the outermost tier it crosses
and starts when the lane is free and its input is ready; an instruction on the compute stream waits only for its inputs.
Routed messages take lanes too, in the middle of their pass. Other messages inside a block take no lane: compute
waits for them in place. Compute that overlaps a busy lane is slowed during the overlap by the penalty of the lane's
newest message:

- on a device with separate cores for messages (CUDA), only compute is slowed; with several busy lanes the largest
  penalty counts;
- on a CPU the same cores do both. A penalty is the share of the cores that a message needs; where compute and
  messages together need more cores than there are, all of them take longer. `now_s` and lane times use a clock that
  stops for the extra time; seconds by category are wall time. An exchange of islands spans many passes and mostly
  waits for its link, so while the clock stands still it progresses by the share of its time that needs no cores. All
  other messages stand still too.

The same clock stands still where messages of two tiers share a bus (terrace.simulate.bus).
"""

import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any

from terrace.program.gaps import Held
from terrace.program.instruction import Op
from terrace.simulate.below import START, Moment
from terrace.simulate.below_clocks import BelowClocks
from terrace.simulate.bus import Bus, progress_s
from terrace.simulate.priced_instruction import NO_STREAM, Doing, Event

if TYPE_CHECKING:
    from terrace.program.program import Program


class Passes:
    __slots__ = ("by_category", "opens", "plays", "sends", "steps_s", "tails")

    def __init__(self, plays: Sequence["Play"]) -> None:
        self.plays = plays
        self.opens = self.sends = False
        steps_s: list[float] = []
        by_category: dict[str, list[float]] = {}
        for _, event in plays:
            self.opens |= event.opens
            self.sends |= bool(event.steps) or event.rows is not NO_STREAM
            for category, seconds in ((event.category, event.seconds), *event.inside):
                steps_s.append(seconds)
                by_category.setdefault(category, []).append(seconds)
        self.steps_s, self.by_category = steps_s, by_category
        self.tails: dict[int, Passes] = {}

    def behind(self, number: int) -> "Passes":
        """The passes after the first `number`."""
        if not number:
            return self
        found = self.tails.get(number)
        if found is None:
            found = self.tails[number] = Passes(self.plays[number:])
        return found


Play = tuple[Callable[["Rank", Event], None], Event]
Act = Callable[["Rank", Any], None]
Move = tuple[Act, Event | Passes]


class Rank(BelowClocks):
    """The clocks of one rank, and the arrival times of its messages in flight."""

    SENDING = -1  # the lane of messages to other stages, after the tiers' lanes
    RECORDS = False  # whether each computation is recorded by itself

    __slots__ = (
        *("ahead_s", "begins_s", "bus", "busy_s", "changes", "counts", "directions", "gathers", "counts_end", "held"),
        *("lanes_s", "mutual", "outside", "penalties", "reduced", "reductions", "stops", "syncs"),
        "time_s",
    )

    def __init__(self, program: "Program") -> None:
        super().__init__(program)
        self.mutual = program.cluster.device.type == "cpu"  # whether compute slows messages, too
        self.bus = Bus(shares) if (shares := program.cluster.shared_buses) else None
        self.stops = self.mutual or self.bus is not None  # whether the clock may stand still
        num_lanes = len(program.layout.tiers) + (program.stage.num_stages > 1)
        # When each lane is free, and since when it has been busy without a pause.
        self.lanes_s, self.begins_s = [0.0] * num_lanes, [0.0] * num_lanes
        self.penalties = [0.0] * num_lanes  # of the newest message of each lane
        self.busy_s = 0.0  # when all lanes are free
        self.time_s: dict[str, float] = defaultdict(float)
        self.gathers: dict[int, tuple[Moment, str]] = {}
        self.reductions = deque[Moment]()
        self.reduced: dict[int, Moment] = {}
        self.syncs, self.held = list[Moment](), Held[Event]()
        self.counts: tuple[Moment, str] | None = None
        self.directions: dict[int, tuple[Moment, str]] = {}
        self.counts_end, self.changes = START, dict[int, tuple[Moment, str]]()
        # The lanes of exchanges between islands, and the seconds by which these progressed while the clock stood still.
        self.outside, self.ahead_s = program.model.world_layout.outside, 0.0

    def nothing(self, event: Event) -> None:
        """FREE, and REDUCE where autograd accumulates gradients in place."""

    def gather(self, event: Event) -> None:
        """GATHER starts after the refresh of its block, and first reads parameters that are kept below the device."""
        self.start_late(event.block)
        moment = self.issue(event, self.read_first(event, self.refreshes.pop(event.block, START)))
        self.gathers[event.block] = moment, event.category

    def run(self, event: Event) -> None:
        """FORWARD and BACKWARD wait for the gathers of the blocks they read."""
        gathers = self.gathers
        for block in event.needs if gathers else ():
            if block in gathers:
                moment, category = gathers.pop(block)
                if moment[0] > self.now_s:
                    self.wait(moment, category)
        if event.most_writing or self.fetched:
            self.wait_kept(event)
        # At most one reduction may be in flight when a new gradient buffer opens.
        while event.opens and len(self.reductions) > 1:
            self.wait(self.reductions.popleft(), "wait reduce")
        if self.stops or self.RECORDS:
            self.compute(event)
            for category, seconds in event.inside:
                self.inside(category, seconds)
            return
        # The same for a clock that never stands still, in one call: most of a search's plays are passes.
        time_s, now_s, seconds = self.time_s, self.now_s, event.seconds
        if self.busy_s > now_s:
            seconds += self.slowed_s(seconds)
        time_s[event.category] += seconds
        now_s += seconds
        for category, seconds in event.inside:
            time_s[category] += seconds
            now_s += seconds
        self.now_s = now_s

    def run_all(self, passes: Passes) -> None:
        """Several passes; where no message is in flight and none is waited for, their seconds add up."""
        plays, number = passes.plays, 0
        while self.is_held(passes):
            act, event = plays[number]
            act(self, event)
            number += 1
            if number == len(plays):
                return
        passes = passes.behind(number)
        self.now_s = reduce(add, passes.steps_s, self.now_s)
        # Added in sequence, so that sums equal those of playing each pass.
        for category, seconds in passes.by_category.items():
            self.time_s[category] = reduce(add, seconds, self.time_s[category])

    def is_held(self, passes: Passes) -> bool:
        """Whether passes may wait for messages or be slowed by them."""
        under_way = self.busy_s > self.now_s or self.gathers or self.refreshes or self.late or passes.sends
        below = self.grads_written or self.fetched
        return bool(under_way or below or (passes.opens and len(self.reductions) > 1))

    def run_whole(self, event: Event) -> None:
        """FORWARD and BACKWARD with parameters replicated on every rank: they wait for the refresh."""
        refreshes = self.refreshes
        for block in event.needs if self.late else ():
            self.start_late(block)
        for block in event.needs if refreshes else ():
            if block in refreshes:
                self.wait(refreshes.pop(block), "wait refresh")
        self.run(event)

    def run_steps(self, event: Event) -> None:
        """A pass with messages on lanes: `event` is its compute before them."""
        self.run_whole(event)
        self.play_steps(event)

    def play_steps(self, event: Event) -> None:
        sent: list[Moment] = []
        for does, step, number in event.steps:
            if does is Doing.COMPUTE:
                self.compute(step)
            elif does is Doing.SEND:
                sent.append(self.issue(step, sent[number] if number >= 0 else START))
            elif does is Doing.WAIT:
                self.wait(sent[number], step.category)
            else:
                self.leave(number)

    def reduce(self, event: Event) -> None:
        self.reduced[event.block] = moment = self.issue(event, START)
        self.reductions.append(moment)

    def sync(self, event: Event) -> None:
        """SYNC starts after the last reduction of its block."""
        self.syncs.append(self.write_grads(event, self.issue(event, self.reduced.get(event.block, START))))

    def hold(self, event: Event) -> None:
        """REDUCE or SYNC in gaps: part 0 is sent at once."""
        self.note(event)
        if event.op is Op.REDUCE:
            self.reductions.append(_HELD)
        self.held.hold(event, len(event.parts))
        self.leave(0)

    def note(self, event: Event) -> None:
        """Hook for recordings: a message in gaps is issued."""

    def leave(self, gap: int) -> None:
        """Send the parts of messages that are due in a gap."""
        for event, part in self.held.due(gap):
            if event.parts[part].seconds:
                self.part(event, event.parts[part])
            if event.op is Op.REDUCE and part == len(event.parts) - 1:
                # Compute waits for reductions in the order of issue, once all their parts are sent.
                self.reductions[self.reductions.index(_HELD)] = self.reduced[event.block]

    def part(self, event: Event, part: Event) -> None:
        """Issue one part of a REDUCE, or of a SYNC, which waits for the same part of its block's REDUCE."""
        if event.op is Op.REDUCE:
            self.reduced[event.block] = self.issue(part, START)
        else:
            self.syncs.append(self.issue(part, self.reduced.get(event.block, START)))

    def count(self, event: Event) -> None:
        """COUNT starts at once: all forwards have run."""
        self.counts = self.issue(event, START), event.category

    def clip(self, event: Event) -> None:
        """CLIP waits for every gradient, then for its own message."""
        self.settle()
        self.wait(self.issue(event, START), event.category)

    def settle(self) -> None:
        """Wait for every gradient, and for the counts of routers."""
        self.settle_gradients()
        self.wait_grads_written(1)
        if self.counts is not None:
            self.wait(*self.counts)
            self.counts = None

    def settle_gradients(self) -> None:
        for moment in self.reductions:
            self.wait(moment, "wait reduce")
        for moment in self.syncs:
            self.wait(moment, "wait sync")
        self.reductions.clear()
        self.syncs.clear()

    def exchange(self, event: Event) -> None:
        """TIE takes no lane: both stages have arrived and wait for their exchange."""
        self.wait((self.now_s + event.seconds, -1), event.category)

    def orthogonalise(self, event: Event) -> None:
        """ORTHOGONALISE starts at once, or when states and gradients that are kept below the device are there."""
        self.take(event)
        self.pass_pieces(event)
        self.directions[event.block] = self.issue(event, START), event.category

    def update(self, event: Event) -> None:
        """UPDATE reads the gradients that CLIP waited for, and the whole matrices of its block."""
        if event.block in self.directions:
            self.wait(*self.directions.pop(event.block))
        self.take(event)
        self.wait_updated()
        self.pass_pieces(event)
        self.compute(event)

    def outer_count(self, event: Event) -> None:
        """OUTER_COUNT computes the changes, then sends its counts at once."""
        self.compute(event.parts[0])
        self.counts_end = self.issue(event, START)

    def outer_start(self, event: Event) -> None:
        """OUTER_START follows its OUTER_COUNT on the lane: the parameters have been updated."""
        self.changes[event.block] = self.issue(event, self.counts_end), event.category

    def outer_apply(self, event: Event) -> None:
        """OUTER_APPLY reads the mean change, and overwrites memory that a refresh of the previous step may still
        read.
        """
        self.wait(*self.changes.pop(event.block))
        if event.block in self.refreshes:
            self.wait(self.refreshes.pop(event.block), "wait refresh")
        self.compute(event)

    def restore(self, event: Event) -> None:
        """REFRESH of a restoring program: compute waits for it."""
        self.wait(self.write_params(event, self.issue(event, self.read_first(event, START))), event.category)
        self.params_written.clear()

    def issue(self, event: Event, ready: Moment) -> Moment:
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
        if self.bus is not None:
            self.bus.add(lane, start_s, done_s)
        if done_s > self.busy_s:
            self.busy_s = done_s
        return done_s, -1

    def wait(self, moment: Moment, category: str) -> None:
        seconds = moment[0] - self.now_s
        if seconds > 0.0 and not self.stops:
            self.time_s[category] += seconds
            self.now_s = moment[0]
        elif seconds > 0.0:
            # Several lanes may want the cores.
            longer_s = max(0.0, self.needed_s(seconds) - seconds) if self.mutual else 0.0
            self.time_s[category] += self.wall_s(seconds)
            self.now_s = moment[0]
            self.time_s[category] += self.stand(longer_s)

    def compute(self, event: Event) -> None:
        seconds = event.seconds
        if self.busy_s <= self.now_s:  # every lane is idle
            self.time_s[event.category] += seconds
            self.now_s += seconds
        elif self.mutual:
            clock_s = self.clock_s(seconds)
            longer_s = self.needed_s(clock_s)
            self.now_s += clock_s
            self.time_s[event.category] += seconds + self.stand(longer_s)
        else:
            seconds += self.slowed_s(seconds)
            self.time_s[event.category] += seconds
            self.now_s += self.clock_s(seconds)

    def stand(self, longer_s: float) -> float:
        """Seconds for which the clock stands still: `longer_s`, plus core time of exchanges that progress meanwhile.

        Exact for one lane with such an exchange. With several, each lane also counts the time that earlier lanes added.
        """
        if not longer_s:
            return 0.0
        for lane in self.outside:
            left_s = self.lanes_s[lane] - self.now_s
            # A message that has not started does not progress.
            if left_s > 0.0 and self.begins_s[lane] <= self.now_s:
                penalty = self.penalties[lane]
                on_s = progress_s(penalty, longer_s, left_s)
                longer_s += penalty * on_s
                self.ahead_s += on_s
                self.lanes_s[lane] -= on_s
                self.changes = {block: ((at - on_s, span), why) for block, ((at, span), why) in self.changes.items()}
                if self.bus is not None:
                    self.bus.go_on(lane, on_s)
        return longer_s

    def clock_s(self, wall_s: float) -> float:
        """Clock seconds that pass during the next `wall_s` wall seconds."""
        return wall_s if self.bus is None else self.bus.clock_s(self.now_s, wall_s)

    def wall_s(self, clock_s: float) -> float:
        """Wall seconds that the next `clock_s` clock seconds take."""
        return clock_s if self.bus is None else clock_s + self.bus.longer_s(self.now_s, clock_s)

    def needed_s(self, seconds: float) -> float:
        """Core-seconds that messages need during the next `seconds`, from the penalties of their lanes."""
        total_s, now_s = 0.0, self.now_s
        for begin_s, end_s, penalty in zip(self.begins_s, self.lanes_s, self.penalties, strict=True):
            if end_s > now_s:
                total_s += penalty * max(0.0, min(end_s, now_s + seconds) - max(begin_s, now_s))
        return total_s

    def slowed_s(self, seconds: float) -> float:
        """Extra seconds, due to messages, of compute that starts now and takes `seconds` without them."""
        most_s, now_s = 0.0, self.now_s
        for end_s, penalty in zip(self.lanes_s, self.penalties, strict=True):
            if end_s > now_s:
                shared_s = end_s - now_s if self.bus is None else self.wall_s(end_s - now_s)
                slowed_s = penalty * (shared_s if shared_s < seconds else seconds)
                # Messages on several lanes run at once; only the strongest slow-down counts.
                if slowed_s > most_s:
                    most_s = slowed_s
        return most_s

    def inside(self, category: str, seconds: float) -> None:
        """Wait for messages inside a block; their position among its kernels does not affect the sum."""
        self.time_s[category] += seconds
        self.now_s += self.clock_s(seconds)


_HELD: Moment = (math.inf, -1)  # of a reduction with parts that have not left

"""The automatic zero-bubble schedule (Qi et al. 2401.10241, section 3.1): finds an order from times and a memory limit.

1. Before its first I, a stage runs as many forwards as memory and time allow; a switch allows one more that delays
   that I.
2. Then F and I alternate. A W runs in a gap that it fits into, when memory is full, and in a smaller gap if idling
   would make this stage the one that has idled most. As far as memory allows, a stage stays at least one forward ahead
   of the next; if it is further ahead, a switch skips a forward that would delay the next I.
3. The remaining W run last.

A third switch allows W in smaller gaps. All settings of the switches are tried, and the order whose longest stage span
is shortest is returned (the cost of section 5.3).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, product

from terrace.base.errors import PlanError
from terrace.plan.stage import Pass
from terrace.program.schedules.orders import Orders, StageTask, build, looped, positive
from terrace.program.schedules.registry import schedule
from terrace.program.schedules.seconds import TaskSeconds, check_seconds

_ROUNDING = 1e-9  # sums of the same terms in another order differ by a smaller share


@schedule("zb-auto")
def zb_auto(num_stages: int, num_micros: int, seconds: TaskSeconds, weight_share: float, memory_limit: float) -> Orders:
    """The best order found for these times if a stage may keep the activations of `memory_limit` micro-batches.

    `weight_share` is the share of a micro-batch's activations kept until its W (M_W / M_B); times of whole backwards
    are not used.

    Invariants: no stage ever keeps more than `memory_limit`; the order of F, of I and of W is first in, first
    out. Raises `PlanError` for a limit below 1, a share outside 0 to 1 and seconds that do not fit the stages.
    """
    positive(num_stages=num_stages, num_micros=num_micros)
    check_seconds(seconds, num_stages)
    if not 0 <= weight_share <= 1:
        raise PlanError(f"weight_share = {weight_share}: it is a share of the activations; write 0 to 1")
    if memory_limit < 1:
        raise PlanError(f"memory_limit = {memory_limit}: a stage keeps one micro-batch's activations; write 1 or more")
    problem = _Problem(
        num_stages=num_stages, num_micros=num_micros, seconds=seconds, limit=memory_limit, weight_share=weight_share
    )
    # Eight settings are cheap, and no single one wins for all times.
    tries = [_attempt(problem, *switches) for switches in product((False, True), repeat=3)]
    best = min(tries, key=lambda stages: max(stage.span_s for stage in stages))
    return build("zb-auto", looped(num_stages, 1), num_micros, [stage.row for stage in best])


@schedule("zb-1p")
def zb_1p(num_stages: int, num_micros: int, seconds: TaskSeconds, weight_share: float) -> Orders:
    """The automatic schedule at the memory of 1F1B: `num_stages` micro-batches."""
    return replace(zb_auto(num_stages, num_micros, seconds, weight_share, num_stages), schedule="zb-1p")


@schedule("zb-2p")
def zb_2p(num_stages: int, num_micros: int, seconds: TaskSeconds, weight_share: float) -> Orders:
    """The automatic schedule at twice the memory of 1F1B."""
    return replace(zb_auto(num_stages, num_micros, seconds, weight_share, 2 * num_stages), schedule="zb-2p")


@dataclass(frozen=True, kw_only=True)
class _Problem:
    num_stages: int
    num_micros: int
    seconds: TaskSeconds
    limit: float
    weight_share: float


@dataclass
class _Stage:
    problem: _Problem
    index: int
    now_s: float = 0.0
    idle_s: float = 0.0  # since its first task
    kept: float = 0.0
    row: list[StageTask] = field(default_factory=list)
    forwards_s: list[float] = field(default_factory=list)  # when each ended
    inputs_s: list[float] = field(default_factory=list)
    num_weights: int = 0
    first_s: float = 0.0

    @property
    def span_s(self) -> float:
        return self.now_s - self.first_s

    @property
    def has_weight(self) -> bool:
        return self.num_weights < len(self.inputs_s)

    @property
    def is_full(self) -> bool:
        return self.kept + 1 > self.problem.limit * (1 + _ROUNDING)

    def _run(self, pass_: Pass, micro: int, arrival_s: float, lasts_s: float, kept: float) -> None:
        # A task starts when the stage is free and its input is there.
        start_s = max(self.now_s, arrival_s)
        # Idle time counts from the first task: the wait before it is the pipeline's ramp, which no order avoids.
        if self.row:
            self.idle_s += start_s - self.now_s
        else:
            self.first_s = start_s
        self.now_s = start_s + lasts_s
        self.kept += kept
        self.row.append(StageTask(pass_, 0, micro))

    def forward(self, arrival_s: float) -> None:
        self._run(Pass.FORWARD, len(self.forwards_s), arrival_s, self.problem.seconds.forward_s[self.index], 1.0)
        self.forwards_s.append(self.now_s)

    def input(self, arrival_s: float) -> None:
        freed = 1.0 - self.problem.weight_share
        self._run(Pass.BACKWARD_INPUT, len(self.inputs_s), arrival_s, self.problem.seconds.input_s[self.index], -freed)
        self.inputs_s.append(self.now_s)

    def weight(self) -> None:
        lasts_s, freed = self.problem.seconds.weight_s[self.index], self.problem.weight_share
        self._run(Pass.BACKWARD_WEIGHT, self.num_weights, self.now_s, lasts_s, -freed)
        self.num_weights += 1

    def fill(self, arrival_s: float, stages: "Sequence[_Stage]", small_gaps: bool) -> None:
        """Run W in the gap before `arrival_s`; idle times of `stages`, all stages, decide about smaller gaps."""
        while self.has_weight and self.now_s + self.problem.seconds.weight_s[self.index] <= arrival_s:
            self.weight()
        gap_s = arrival_s - self.now_s
        # A W that overruns the gap delays this stage, so only the stage that would idle most takes it.
        if small_gaps and gap_s > 0 and self.has_weight and self.idle_s + gap_s > max(one.idle_s for one in stages):
            self.weight()


def _attempt(problem: _Problem, delay: bool, skip: bool, small_gaps: bool) -> list[_Stage]:
    stages = [_Stage(problem, index) for index in range(problem.num_stages)]
    _warm_up(problem, stages, delay)
    # F goes down the pipeline and I comes back up, so arrivals are known when a stage is reached.
    for micro in range(1, problem.num_micros):
        for index, stage in enumerate(stages):
            if len(stage.forwards_s) < problem.num_micros and not (skip and _may_skip(problem, stages, index)):
                _steady_forward(problem, stages, index, small_gaps)
        for index in reversed(range(problem.num_stages)):
            arrival_s = _input_arrival(problem, stages, index, micro)
            stages[index].fill(arrival_s, stages, small_gaps)
            stages[index].input(arrival_s)
    for stage in stages:
        while stage.has_weight:
            stage.weight()
    return stages


def _forward_arrival(problem: _Problem, stages: Sequence[_Stage], index: int) -> float:
    if index == 0:
        return 0.0
    return stages[index - 1].forwards_s[len(stages[index].forwards_s)] + problem.seconds.edge_s[index - 1]


def _input_arrival(problem: _Problem, stages: Sequence[_Stage], index: int, micro: int) -> float:
    if index == problem.num_stages - 1:
        return stages[index].forwards_s[micro]
    return stages[index + 1].inputs_s[micro] + problem.seconds.edge_s[index]


def _warm_up(problem: _Problem, stages: Sequence[_Stage], delay: bool) -> None:
    counts = _warm_up_counts(problem, delay)
    for index, stage in enumerate(stages):
        for _ in range(counts[index]):
            stage.forward(_forward_arrival(problem, stages, index))
    for index in reversed(range(problem.num_stages)):
        stages[index].input(_input_arrival(problem, stages, index, 0))


def _warm_up_counts(problem: _Problem, delay: bool) -> list[int]:
    """Forwards of every stage before its first I, assuming that they run without gaps."""
    seconds, most = problem.seconds, min(problem.limit, problem.num_micros)
    ends_s = [lasts_s + edge_s for lasts_s, edge_s in zip(seconds.forward_s, (0.0, *seconds.edge_s), strict=True)]
    # Prefix sums: when each stage ends its first forward.
    ends_s = list(accumulate(ends_s))
    counts = [1] * problem.num_stages
    input_s = ends_s[-1] + seconds.input_s[-1]
    for index in reversed(range(problem.num_stages - 1)):
        now_s, arrival_s = ends_s[index], input_s + seconds.edge_s[index]
        # With `delay` a forward may start in the gap even if it ends after the I could have started.
        needed_s = 0.0 if delay else seconds.forward_s[index]
        while counts[index] + 1 <= most and now_s + needed_s < arrival_s * (1 - _ROUNDING):
            counts[index] += 1
            now_s += seconds.forward_s[index]
        input_s = max(now_s, arrival_s) + seconds.input_s[index]
    # A stage cannot warm up with more forwards than the one before it has sent on by then.
    for index in range(1, problem.num_stages):
        if counts[index - 1] < problem.num_micros:
            counts[index] = min(counts[index], max(1, counts[index - 1] - 1))
    return counts


def _may_skip(problem: _Problem, stages: Sequence[_Stage], index: int) -> bool:
    """Whether a stage is two forwards ahead of the next, and one more would end after its next I could start."""
    if index + 1 == problem.num_stages:
        return False
    seconds, stage, behind = problem.seconds, stages[index], stages[index + 1]
    # The next stage keeps at least one forward in hand.
    if len(stage.forwards_s) < len(behind.forwards_s) + 2:
        return False
    # Earliest I here: the next stage still runs one F and one I, then sends the gradient.
    arrival_s = behind.now_s + seconds.forward_s[index + 1] + seconds.input_s[index + 1] + seconds.edge_s[index]
    return stage.now_s + seconds.forward_s[index] > arrival_s


def _steady_forward(problem: _Problem, stages: Sequence[_Stage], index: int, small_gaps: bool) -> None:
    stage = stages[index]
    # Memory is full: W releases the rest of a micro-batch's activations.
    while stage.is_full and stage.has_weight:
        stage.weight()
    # A stage cannot run a forward that the one before has not run.
    before = len(stages[index - 1].forwards_s) if index else problem.num_micros
    if stage.is_full or before <= len(stage.forwards_s):
        return
    arrival_s = _forward_arrival(problem, stages, index)
    stage.fill(arrival_s, stages, small_gaps)
    stage.forward(arrival_s)

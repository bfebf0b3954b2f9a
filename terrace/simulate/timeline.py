"""The timeline: orders of a pipeline played with the seconds of its tasks.

The rules (Qi et al. 2401.10241, section 4; a stage computes one task at a time, messages do not slow it):

    F(k, m) starts after F(k-1, m) ended and the message of that edge has passed,
    B(k, m) or I(k, m) after that of k+1 and the message; on the last virtual stage after F(k, m),
    W(k, m) after I(k, m),

where k is a virtual stage and m a micro-batch, and every task after the previous one on its stage. The messages of a
stage are sent one at a time, as in terrace.simulate.stages, so over a slow link they may set the pace instead of the
tasks. Virtual stages of the same stage exchange no messages.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import NamedTuple

from terrace.base.errors import ProgramError
from terrace.plan.stage import Pass
from terrace.program.schedules.orders import Orders, StageTask
from terrace.program.schedules.seconds import TaskSeconds, check_seconds

_FORWARD, _BACKWARD, _INPUT, _WEIGHT = map(int, Pass)


class CriticalTask(NamedTuple):
    """A task on the critical path, and its cause: its own stage, or messages of another one.

    `edge_s`: seconds of these messages, 0 for none; `messages`: their number, including those queued before the
    task's own.
    """

    stage: int
    task: StageTask
    start_s: float
    end_s: float
    edge_s: float
    messages: int


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Start of every task: `starts_s[stage][position]`, with positions as in `orders.tasks`."""

    orders: Orders
    seconds: TaskSeconds
    starts_s: tuple[list[float], ...]

    @cached_property
    def ends_s(self) -> tuple[list[float], ...]:
        return tuple(map(self.ends_of, range(self.orders.num_stages)))

    def ends_of(self, stage: int) -> list[float]:
        row, each = self.orders.placement[stage], self.seconds
        passes = each.forward_s, each.backward_s, each.input_s, each.weight_s
        lasts = [[seconds[virtual] for virtual in row] for seconds in passes]
        tasks = zip(self.orders.tasks[stage], self.starts_s[stage], strict=True)
        return [start + lasts[pass_][chunk] for (pass_, chunk, _), start in tasks]

    @property
    def makespan_s(self) -> float:
        """Seconds from time 0 to the end of the last task."""
        found = 0.0
        for row, tasks, starts in zip(self.orders.placement, self.orders.tasks, self.starts_s, strict=True):
            pass_, chunk, _ = tasks[-1]
            found = max(found, starts[-1] + self.seconds.of(pass_)[row[chunk]])
        return found

    @property
    def spans_s(self) -> list[float]:
        """Seconds from the start of each stage's first task to the end of its last."""
        return [ends[-1] - starts[0] for starts, ends in zip(self.starts_s, self.ends_s, strict=True)]

    @cached_property
    def busy_s(self) -> list[float]:
        return [
            sum(end - start for start, end in zip(starts, ends, strict=True))
            for starts, ends in zip(self.starts_s, self.ends_s, strict=True)
        ]

    @property
    def bubble(self) -> float:
        """Idle share of the stages over the longest span (the cost of Qi et al. 2401.10241, section 5.3).

        With equal stages it is 1 - num_micros (T_F + T_B + T_W) / cost. With unequal stages, waits of the lighter ones
        count too.
        """
        # Every stage is charged for the longest span.
        offered_s = len(self.busy_s) * max(self.spans_s)
        return 1.0 - sum(self.busy_s) / offered_s if offered_s else 0.0

    def critical_path(self) -> list[CriticalTask]:
        """The chain of tasks and messages, first to last, that fills the time from 0 to the makespan.

        If there are several, waiting for the own stage takes precedence over waiting for a message.
        """
        orders, holders = self.orders, self.orders.holders()
        positions: dict[int, dict[StageTask, int]] = {}
        queues: dict[int, list[tuple[int, int]]] = {}
        stage = max(range(orders.num_stages), key=lambda index: self.ends_s[index][-1])
        position, path = len(orders.tasks[stage]) - 1, []
        while True:
            task, start_s = orders.tasks[stage][position], self.starts_s[stage][position]
            source, needed = _reads(orders, holders, stage, task)
            # Exact equality is safe: a start without a message is the same sum as the end it waited for.
            own = position > 0 and self.ends_s[stage][position - 1] == start_s
            if source not in positions:
                positions[source] = {made: at for at, made in enumerate(orders.tasks[source])}
            found = (positions[source][made] for made in needed if made in positions[source])
            before, messages = position - 1 if own else next(found, None), 0
            source = stage if own else source
            if before is not None and source != stage:
                if source not in queues:
                    queues[source] = self._queues(source)
                before, messages = queues[source][before]
            edge_s = start_s - self.ends_s[source][before] if before is not None else 0.0
            end_s = self.ends_s[stage][position]
            path.append(CriticalTask(stage, task, start_s, end_s, edge_s, messages))
            if before is None:
                return path[::-1]
            stage, position = source, before

    def _queues(self, stage: int) -> list[tuple[int, int]]:
        """For each task, the position of the task whose message heads its queue, and the queue's length so far.

        A queue is a run of messages that leave the stage without a pause.
        """
        found, sent_s, head, number = [], 0.0, 0, 0
        moves = _moves(self.orders, self.seconds, stage)
        for position, (task, end_s) in enumerate(zip(self.orders.tasks[stage], self.ends_s[stage], strict=True)):
            edge_s = moves[task.pass_][task.chunk][3]
            if edge_s:
                head, number = (head, number + 1) if sent_s > end_s else (position, 1)
                sent_s = max(end_s, sent_s) + edge_s
            found.append((head, number) if edge_s else (position, 1))
        return found


def play(orders: Orders, seconds: TaskSeconds) -> Timeline:
    """Start times of every task, in time linear in their number.

    Raises `PlanError` when `seconds` is for another number of virtual stages, and `ProgramError` when stages deadlock
    or wait for a task that is in no order; the message names each waiting stage and the task it needs.
    """
    check_seconds(seconds, orders.num_virtual)
    slots = orders.num_virtual * orders.num_micros
    arrived = [inf] * (3 * slots + orders.num_micros)  # inputs of F, of B or I, of W, and a sink
    arrived[: orders.num_micros] = [0.0] * orders.num_micros  # the first virtual stage has its inputs
    starts: tuple[list[float], ...] = tuple([[] for _ in range(orders.num_stages)])
    waiting: dict[int, int] = {}  # slot -> stage
    # A stack, so that the first stage runs first.
    ready = list(reversed(range(orders.num_stages)))
    stages = [
        _run(orders, seconds, stage, arrived, waiting, ready, starts[stage]) for stage in range(orders.num_stages)
    ]
    while ready:
        stage = ready.pop()
        slot = next(stages[stage], None)
        if slot is not None:
            waiting[slot] = stage
    if waiting:
        raise ProgramError(_who_waits(orders, [len(begun) for begun in starts], min(waiting.values())))
    return Timeline(orders=orders, seconds=seconds, starts_s=starts)


def _moves(orders: Orders, seconds: TaskSeconds, stage: int) -> list[list[tuple[int, int, float, float]]]:
    """Per pass and chunk of a stage: slot read, slot written, seconds, seconds of the message."""
    num_micros, last = orders.num_micros, orders.num_virtual - 1
    slots = (last + 1) * num_micros
    local = set(orders.placement[stage])
    moves: list[list[tuple[int, int, float, float]]] = [[], [], [], []]
    for virtual in orders.placement[stage]:
        # No message between virtual stages of the same stage.
        onward = 0.0 if virtual == last or virtual + 1 in local else seconds.edge_s[virtual]
        back = 0.0 if virtual == 0 or virtual - 1 in local else seconds.edge_s[virtual - 1]
        f_slot = virtual * num_micros
        b_slot, w_slot = slots + f_slot, 2 * slots + f_slot
        # The last forward feeds its own backward.
        f_next = b_slot if virtual == last else f_slot + num_micros
        b_next = 3 * slots if virtual == 0 else b_slot - num_micros
        moves[_FORWARD].append((f_slot, f_next, seconds.forward_s[virtual], onward))
        moves[_BACKWARD].append((b_slot, b_next, seconds.backward_s[virtual], back))
        moves[_INPUT].append((b_slot, b_next, seconds.input_s[virtual], back))
        moves[_WEIGHT].append((w_slot, 3 * slots, seconds.weight_s[virtual], 0.0))
    return moves


def _run(
    orders: Orders,
    seconds: TaskSeconds,
    stage: int,
    arrived: list[float],
    waiting: dict[int, int],
    ready: list[int],
    begun: list[float],
) -> Generator[int, None, None]:
    moves = _moves(orders, seconds, stage)
    w_slots = [source for source, *_ in moves[_WEIGHT]]
    begin, now, sent = begun.append, 0.0, 0.0
    for pass_, chunk, micro in orders.tasks[stage]:
        source, target, lasts_s, edge_s = moves[pass_][chunk]
        input_s = arrived[source + micro]
        if input_s > now:
            # inf: not produced yet. The stage resumes when another one fills the slot.
            if input_s == inf:
                yield source + micro
                input_s = arrived[source + micro]
            if input_s > now:
                now = input_s
        begin(now)
        now += lasts_s
        target += micro
        if edge_s:
            sent = max(now, sent) + edge_s
            arrived[target] = sent
        else:
            arrived[target] = now
        if target in waiting:
            ready.append(waiting.pop(target))
        # A split backward: the weight half may start at once, on this stage only.
        if pass_ == _INPUT:
            arrived[w_slots[chunk] + micro] = now


def _reads(
    orders: Orders, holders: Sequence[tuple[int, int]], stage: int, task: StageTask
) -> tuple[int, list[StageTask]]:
    """The stage that produces the input of `task`, and the task that does (or two candidates).

    Empty for a forward on the first virtual stage.
    """
    pass_, chunk, micro = task
    virtual = orders.placement[stage][chunk]
    if pass_ is Pass.BACKWARD_WEIGHT:
        return stage, [StageTask(Pass.BACKWARD_INPUT, chunk, micro)]
    if pass_ is Pass.FORWARD:
        if virtual == 0:
            return stage, []
        source, chunk = holders[virtual - 1]
        return source, [StageTask(Pass.FORWARD, chunk, micro)]
    if virtual == orders.num_virtual - 1:
        return stage, [StageTask(Pass.FORWARD, chunk, micro)]
    source, chunk = holders[virtual + 1]
    return source, [StageTask(half, chunk, micro) for half in (Pass.BACKWARD, Pass.BACKWARD_INPUT)]


def _who_waits(orders: Orders, positions: Sequence[int], stuck: int) -> str:
    words, seen, stage, holders = [], set(), stuck, orders.holders()
    while stage not in seen and positions[stage] < len(orders.tasks[stage]):
        seen.add(stage)
        task = orders.tasks[stage][positions[stage]]
        source, needed = _reads(orders, holders, stage, task)
        words.append(f"stage {stage} waits at position {positions[stage]}, {task}, for {needed[0]}, on stage {source}")
        stage = source
    end = "a circle: let one of these tasks come later" if stage in seen else f"stage {stage} has ended without it"
    return f"schedule {orders.schedule!r} does not end: {'; '.join(words)}: {end}"

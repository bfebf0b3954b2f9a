"""The closed price of a candidate: one sum that ranks plans before they are played.

    step = compute + bubble + exposed

compute   M u: M micro-batches through the busiest stage, whose blocks take u = f + b seconds for each. That is products
          and passes over memory, waits for messages inside blocks, recomputation, and the slow-down by messages to the
          next stage. Looped chunks pass the stages in rounds, so u is at least the sum of every round's longest chunk.
bubble    B times the mean of u over the other stages, while stages fill and drain, and what they wait for messages
          between them. Both are the schedule's, read off its own orders (terrace.planner.bubbles).
exposed   messages of states that nothing hides, on the first stage, which begins first and ends last. Before the first
          forward of block j: the update or the REFRESH of the blocks up to j, and a GATHER, less the computing before
          it, for the worst j. After the last backward likewise REDUCE and SYNC, then the exchange of a tied block's
          gradient between the ends of a pipeline, and the gradient norm. In every visit
          a gather beyond the forward that it overlaps, and gathers and reductions beyond the backward. All messages of
          states slow computing down by the overlap penalty of their tiers, and those of experts wait behind them.

No price is shown: the best plans are played (terrace.planner.search). What is not yet
chosen is ordered by the least prices of groups (terrace.planner.group_price).
"""

from collections.abc import Sequence
from typing import NamedTuple

from terrace.plan.mesh import Mesh
from terrace.plan.recompute import WHOLE
from terrace.planner.bubbles import shape_of
from terrace.planner.cuts import Cut, Cuts, windows
from terrace.planner.estimate import Estimator, Seconds
from terrace.planner.memory import Memory, total
from terrace.planner.messages import NO_MESSAGES, Sent, StateMessages
from terrace.planner.operations import operations_s
from terrace.planner.parts import Runs, Work, work_of_runs
from terrace.planner.stages import SERIAL, has_halves, passes_rounds, traits
from terrace.planner.task import Candidate, Task, num_micros
from terrace.program.schedules.registry import takes_unit
from terrace.simulate.work import Work as BlockWork


class Pace(NamedTuple):
    """Seconds of a step without messages of states, of blocks, and of the chunks of the first stage.

    The first forward of chunk c of the first stage is `before_s[c]` after the step begins, its last backward
    `after_s[c]` before it ends.
    """

    step_s: float
    works: Sequence[Work]
    cut: Cut
    before_s: tuple[float, ...]
    after_s: tuple[float, ...]


class Prices:
    """Closed prices of one task's candidates, cached by the numbers that each term depends on."""

    def __init__(self, task: Task, estimator: Estimator) -> None:
        self.task, self.estimator = task, estimator
        self.split, self.again = self.estimator.split, task.recomputations
        (self.whole,) = self.split.whole().chunks
        self.num_inner = len(task.inner)
        self._last = self.whole[-1][0] if self.split.after else -1  # kind of the logits
        blocks, inner = task.blocks, task.inner
        # Blocks before all layers to which a block after them is tied.
        self._owners = sorted(
            {
                owner
                for spec in blocks[inner.stop :]
                for owner in spec.tied_to
                if owner < inner.start and blocks[owner].num_trainable
            }
        )
        self._cuts = Cuts(self.split, [spec.has_stacks for spec in estimator.specs])
        self.messages = StateMessages(self.estimator)
        self.memory = Memory(task, estimator)
        self._works: dict[tuple[object, ...], list[Work]] = {}

    def step_s(self, candidate: Candidate) -> float:
        return self.placed_s(candidate, self.pace(candidate, self.works(candidate)))

    def placed_s(self, candidate: Candidate, pace: Pace) -> float:
        return pace.step_s + self.exposed_s(candidate, pace)

    # Seconds of blocks and stages.

    def works(self, candidate: Candidate) -> list[Work]:
        """Seconds of a block of each kind on one micro-batch."""
        return self.works_of(
            candidate.mesh,
            candidate.micro_batch,
            candidate.recompute,
            candidate.first,
            halves=has_halves(candidate.schedule),
        )

    def works_of(
        self,
        mesh: Mesh,
        micro_batch: int,
        recompute: int = 0,
        first: int = 0,
        *,
        context: bool = True,
        exact: bool = True,
        halves: bool = False,
    ) -> list[Work]:
        # Of layers that differ in recomputation, the mean.
        how = (context, exact, exact and halves) if mesh.divides_stacks else (context,)
        key = (mesh.inside, micro_batch, recompute, first, self.estimator.accumulates(mesh, micro_batch), *how)
        found = self._works.get(key)
        if found is None:
            kinds = range(len(self.estimator.specs))
            blocks = [
                self.estimator.block(kind, mesh, micro_batch, context=context, exact=exact, halves=halves)
                for kind in kinds
            ]
            work = self.estimator.work(mesh, micro_batch)
            again, rest = self.again.all_layers(recompute, least=False), self.again.all_layers(recompute, least=True)
            found = [self._recomputing(kind, blocks[kind], work, again) for kind in kinds]
            if rest != again:
                others = [self._recomputing(kind, blocks[kind], work, rest) for kind in kinds]
                share = first / self.num_inner
                found = [
                    (one[0], share * one[1] + (1 - share) * other[1], one[2])
                    for one, other in zip(found, others, strict=True)
                ]
            self._works[key] = found
        return found

    def _recomputing(self, kind: int, block: Seconds, work: BlockWork, recompute: int) -> Work:
        spec, recompute_s = self.estimator.specs[kind], 0.0
        if recompute and not spec.at_an_end:
            parts = self.again.values[recompute].parts
            recompute_s = (
                block.recompute_s if parts == WHOLE else operations_s(self.task.cluster.device, spec, work, parts)
            )
        return block.forward_s, block.backward_s + recompute_s, block.weight_s

    def pace(self, candidate: Candidate, works: Sequence[Work]) -> Pace:
        """The stages of a candidate whose blocks take `works`. Raises `PlanError` for more stages than blocks."""
        mesh, micros = candidate.mesh, num_micros(self.task, candidate)
        if candidate.schedule == SERIAL:
            total_s = micros * sum(work_of_runs(works, self.whole)[:2])
            return Pace(total_s, works, self._cuts.serial, (0.0,), (0.0,))
        stages, chunks = mesh.total("pipeline"), candidate.chunks
        cut = self._cuts.of(candidate.schedule, stages, chunks, self.split.counts(works, stages * chunks))
        total_s = busiest_s = extra_s = 0.0
        has_logits = False
        busiest: Work = (0.0, 0.0, 0.0)
        for runs, times in cut.stages:
            own = work_of_runs(works, runs)
            own_s = own[0] + own[1]
            total_s += times * own_s
            if own_s > busiest_s:
                busiest, busiest_s, has_logits = own, own_s, runs[-1][0] == self._last
        others_s = (total_s - busiest_s) / (stages - 1)
        if has_logits:
            busiest = (busiest[0] * others_s / busiest_s, busiest[1] * others_s / busiest_s, busiest[2])
            extra_s = busiest_s - others_s
        if cut.rounds and passes_rounds(candidate.schedule, stages, chunks, micros):
            # Each round takes as long as its longest chunk.
            rounds_s = [max([sum(work_of_runs(works, runs)[:2]) for runs in each]) for each in cut.rounds]
            busiest_s = max(busiest_s, sum(rounds_s))
        edge_s = self.estimator.boundary_s(mesh, candidate.micro_batch)
        shape = shape_of(candidate.schedule, stages, chunks, micros, busiest, edge_s, extra_s)
        busiest_s += 2 * chunks * self.estimator.sending_s(mesh, candidate.micro_batch)
        # Messages take as long whatever the other stages take.
        step_s = micros * busiest_s + shape.bubble * others_s + shape.waits * (busiest[0] + busiest[1])
        before_s, after_s = (tuple([each * others_s for each in part]) for part in (shape.before, shape.after))
        return Pace(step_s, works, cut, before_s, after_s)

    def contents(self, candidate: Candidate) -> tuple[Runs, ...]:
        if candidate.schedule == SERIAL:
            return (self.whole,)
        works = self.works(candidate._replace(first=0))
        counts = self.split.counts(works, candidate.mesh.total("pipeline") * candidate.chunks)
        return self.split.contents(counts)

    # Messages of states.

    def exposed_s(self, candidate: Candidate, pace: Pace) -> float:
        """Seconds by which messages of states make a step longer."""
        mesh, unit = candidate.mesh, candidate.unit
        messages, control_s = self.messages.of(mesh, candidate.placement)
        units = num_micros(self.task, candidate) // unit
        # Chunks that pass in units leave the last messages of a chunk the time of other chunks.
        waiting = units - takes_unit(candidate.schedule) if candidate.schedule != SERIAL else units
        halves = has_halves(candidate.schedule)
        owned = [sum([total(sizes, runs) for runs in pace.cut.first]) for sizes in self.memory.groups(mesh)[:3]]
        update_s = self.estimator.update_s(mesh, candidate.placement, owned)
        starts_s = ends_s = refreshed_s = synced_s = more_s = 0.0
        slowed_s = [0.0, 0.0]  # by refreshes and by syncs, if computing went on beside all of them
        for runs, before_s, after_s in zip(pace.cut.first, pace.before_s, pace.after_s, strict=True):
            for kind, count in runs:
                sent = messages[kind]
                refresh, gather, reduce, sync = sent[0].seconds, sent[1].seconds, sent[2].seconds, sent[3].seconds
                forward_s, backward_s, weight_s = (unit * each for each in pace.works[kind])
                behind_s = weight_s if halves else backward_s
                last = count - 1
                # The worst block of a run of equal ones is its first or its last.
                ready_s = max(update_s, refreshed_s + refresh) + gather - before_s
                last_ready_s = max(update_s, refreshed_s + count * refresh) + gather - before_s - last * forward_s
                starts_s = max(starts_s, ready_s, last_ready_s)
                done_s = reduce + synced_s + sync - after_s
                ends_s = max(ends_s, done_s, done_s + last * (sync - behind_s))
                refreshed_s += count * refresh
                synced_s += count * sync
                slowed_s[0] += count * sent[0].slowed_s
                slowed_s[1] += count * sent[3].slowed_s
                before_s += count * forward_s
                after_s += count * behind_s
            for times, before, kind, after in windows(runs, wraps=len(pace.cut.first) > 1):
                forward_s, backward_s = unit * pace.works[kind][0], unit * pace.works[kind][1]
                near = [NO_MESSAGES if each < 0 else messages[each] for each in (before, after)]
                more_s += times * _window_s(messages[kind], near[0], near[1], waiting, forward_s, backward_s)
        for slow_s, alone_s, all_s in zip(slowed_s, (starts_s, ends_s), (refreshed_s, synced_s), strict=True):
            if all_s:
                more_s += slow_s * max(0.0, 1.0 - alone_s / all_s)
        if mesh.divides_stacks:
            late_s = self._late_s(candidate, pace, messages)
            starts_s, ends_s, more_s = max(starts_s, late_s[0]), max(ends_s, late_s[1]), more_s + late_s[2]
        return starts_s + ends_s + self._tie_s(candidate) + control_s + more_s

    def _tie_s(self, candidate: Candidate) -> float:
        """Seconds in which the first and the last stage sum the gradient of a block that both hold."""
        # In a V both ends are on one stage.
        if candidate.schedule == SERIAL or traits()[candidate.schedule].folded:
            return 0.0
        return sum([self.estimator.tie_s(candidate, owner) for owner in self._owners])

    def _late_s(self, candidate: Candidate, pace: Pace, sent: Sequence[Sequence[Sent]]) -> tuple[float, float, float]:
        """Seconds that messages of experts wait behind messages of states on their lanes: at the start, at the end, and
        in between.

        The first forward's wait for the REFRESH of all blocks of the stage. In the last backward, each dispatch waits
        for the gradients of the block after it, on all virtual stages in turn, or on one stage; not if weight gradients
        come later. So do those of every other backward if gradients are reduced in each.
        """
        lanes, halves = candidate.mesh.stack_tiers, has_halves(candidate.schedule)
        refresh_s = [each[0].seconds * (each[0].lane in lanes) for each in sent]
        reduce_s = [each[2].seconds * (each[2].lane in lanes) for each in sent]
        last_s = [
            each[2].seconds + each[3].seconds if each[3].seconds and each[3].lane in lanes else reduce_s[kind]
            for kind, each in enumerate(sent)
        ]
        start_s = sum([count * refresh_s[kind] for runs in pace.cut.first for kind, count in runs])
        ends = [sum([count * last_s[kind] for kind, count in runs]) for runs in (pace.cut.behind, pace.cut.most_behind)]
        each_s = sum([count * reduce_s[kind] for kind, count in pace.cut.most_behind])
        if halves:
            return start_s, 0.0, 0.0
        return start_s, max(ends), (num_micros(self.task, candidate) // candidate.unit - 1) * each_s


def _window_s(
    own: Sequence[Sent], before: Sequence[Sent], after: Sequence[Sent], units: int, forward_s: float, backward_s: float
) -> float:
    """Seconds by which messages that a block's passes overlap lengthen a step, beyond the first and last of the step.

    They are the next block's gather in the forward; in the backward the gather of the block `before` it and the
    reduction of the one `after` it. `forward_s` and `backward_s` are of a unit of micro-batches.
    """
    reduce, further, back = after[2], after[4], before[5]
    slowed_s = max(0, units - 1) * (own[2].slowed_s + further.slowed_s) + units * back.slowed_s
    if before is not NO_MESSAGES:
        # Nothing is computed beside the first gather of all, and the last reduction.
        slowed_s += own[1].slowed_s + own[2].slowed_s
    # On one lane they follow each other.
    beside_s = back.seconds + reduce.seconds if back.lane == reduce.lane else max(back.seconds, reduce.seconds)
    waits_s = max(0.0, further.seconds - forward_s) + max(0.0, beside_s - backward_s)
    return slowed_s + units * waits_s

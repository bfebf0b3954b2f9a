"""The closed price of a candidate: one sum that ranks plans before they are played.

    step = compute + bubble + exposed

compute   M u: M micro-batches through the busiest stage, whose blocks take u = f + b seconds for each. That is products
          and passes over memory, waits for messages inside blocks, recomputation, and the slow-down by messages to the
          next stage. Looped chunks pass the stages in rounds, so u is at least the sum of every round's longest chunk.
bubble    B times the mean of u over the other stages: stages fill and drain, and wait for messages between them. B is
          the schedule's, read off its own orders (terrace.planner.bubbles).
exposed   messages of states that nothing hides, on the first stage, which begins first and ends last. Before the first
          forward of block j: the update or the REFRESH of the blocks up to j, and a GATHER, less the computing before
          it, for the worst j. After the last backward likewise REDUCE and SYNC, then the exchange of a tied block's
          gradient between the ends of a pipeline, and the gradient norm. In every visit
          a gather beyond the forward that it overlaps, and gathers and reductions beyond the backward. All messages of
          states slow computing down by the overlap penalty of their tiers, and those of experts wait behind them.

Memory is the states of the fullest stage, each over the ranks that shard it, and what its micro-batches in flight keep.

No price is shown: the best plans are played (terrace.planner.search). A price also orders what is not yet chosen: that
of a group (terrace.planner.space) counts the least messages of context ranks over its shapes.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from terrace.base.errors import PlanError
from terrace.plan.mesh import Mesh
from terrace.plan.recompute import WHOLE
from terrace.planner.bubbles import bubble_of, in_flight, least_bubble, shape_of, shares_of
from terrace.planner.cuts import Cut, Cuts
from terrace.planner.estimate import Estimator, Seconds
from terrace.planner.floors import Counts, Floors
from terrace.planner.inner import PassSeconds
from terrace.planner.messages import Elements, Lines, Sent, StateMessages
from terrace.planner.operations import operations_s
from terrace.planner.parts import Runs, Work, work_of_runs
from terrace.planner.space import Group, Space, context_forms
from terrace.planner.stages import MOST_PASSES, SERIAL, has_halves, traits
from terrace.planner.task import Candidate, Task, num_micros
from terrace.program.schedules.registry import takes_unit
from terrace.simulate.work import Work as BlockWork

Schedules = tuple[tuple[str, int], ...]  # names, and chunks of a stage


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
        self.floors = Floors(self.estimator, self.messages, self.whole[0][0])
        self._works: dict[tuple[object, ...], list[Work]] = {}
        self._contexts: dict[tuple[object, ...], dict[int, PassSeconds]] = {}
        self._held: dict[tuple[object, ...], list[tuple[float, float, float]]] = {}

    def step_s(self, candidate: Candidate) -> float:
        """The price of a whole candidate."""
        return self.placed_s(candidate, self.pace(candidate, self.works(candidate)))

    def placed_s(self, candidate: Candidate, pace: Pace) -> float:
        """The price of a candidate, from its pace."""
        return pace.step_s + self.exposed_s(candidate, pace)

    # Seconds of blocks and stages.

    def works(self, candidate: Candidate) -> list[Work]:
        """Seconds of a block of each kind on one micro-batch."""
        return self._works_of(
            candidate.mesh,
            candidate.micro_batch,
            candidate.recompute,
            candidate.first,
            halves=has_halves(candidate.schedule),
        )

    def _works_of(
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

    def of_group(
        self, space: Space, group: Group, candidate: Candidate, *, context: bool = True, exact: bool = True
    ) -> list[Work]:
        """`works` of a group of shapes with a candidate's numbers, the least over the shapes.

        Without `context` also without messages of context ranks, and if not `exact` as in `Estimator.block`: both take
        less time. If the group is open, with the best experts.
        """
        mesh, micro_batch = group.shape.mesh, group.micro_batch
        numbers, halves = (candidate.recompute, candidate.first), has_halves(candidate.schedule or SERIAL)
        found = self._works_of(mesh, micro_batch, *numbers, context=False, exact=exact, halves=halves)
        if group.shape.divides:
            found = [self._with_least_stacks(kind, work, mesh, micro_batch) for kind, work in enumerate(found)]
        if not context or any(shape.mesh.total("context") == 1 for shape, _ in group.alike):
            return found
        whole = self.again.values[candidate.recompute].parts == WHOLE
        for kind, (forward_s, backward_s, recompute_s) in self._least_context(space, group).items():
            own = found[kind]
            found = list(found)
            found[kind] = own[0] + forward_s, own[1] + backward_s + whole * recompute_s, own[2]
        return found

    def _least_context(self, space: Space, group: Group) -> dict[int, PassSeconds]:
        key = group.alike
        found = self._contexts.get(key)
        if found is None:
            forms = {(form.inside, size) for shape, size in group.alike for form in context_forms(space, shape)}
            found = self._contexts[key] = {
                kind: min(
                    (self.estimator.context(kind, *form) for form in forms), key=lambda waits: waits[0] + waits[1]
                )
                for kind, spec in enumerate(self.estimator.specs)
                if spec.attends
            }
        return found

    def _with_least_stacks(self, kind: int, work: Work, mesh: Mesh, micro_batch: int) -> Work:
        estimator = self.estimator
        if not estimator.specs[kind].has_stacks:
            return work
        accumulate = estimator.accumulates(mesh, micro_batch)
        more = estimator.experts.least_longer(kind, estimator.work(mesh, micro_batch), accumulate)
        return work[0] + more[0], work[1] + more[1] + more[2], work[2] + more[2]

    def least_s(self, works: Sequence[Work], stages: int, micros: int, schedules: Schedules) -> float:
        """The least price over schedules and placements, if stages are equal but for whole layers."""
        work = work_of_runs(works, self.whole)
        if stages == 1:
            return micros * (work[0] + work[1])
        busiest_s, others_s = self._equal_stages(works, work, stages)
        most_chunks = (self.num_inner + self.task.ends) // stages
        return micros * busiest_s + least_bubble(most_chunks, schedules, *shares_of(work)) * others_s * (stages - 1)

    def least_of_each(self, works: Sequence[Work], stages: int, micros: int, schedules: Schedules) -> list[float]:
        """`least_s` of each schedule; infinite if it does not take the numbers."""
        work = work_of_runs(works, self.whole)
        if stages == 1:
            return [micros * (work[0] + work[1]) for _ in schedules]
        busiest_s, others_s = self._equal_stages(works, work, stages)
        shares, most_chunks = shares_of(work), (self.num_inner + self.task.ends) // stages
        found = []
        for schedule, chunks in schedules:
            least_s = math.inf
            if chunks <= most_chunks and stages * chunks * micros <= MOST_PASSES:
                with suppress(PlanError):
                    least_s = micros * busiest_s + bubble_of(schedule, stages, chunks, micros, *shares) * others_s
            found.append(least_s)
        return found

    def _equal_stages(self, works: Sequence[Work], work: Work, stages: int) -> tuple[float, float]:
        """Seconds of the busiest stage and the mean of the others."""
        whole_s = work[0] + work[1]
        busiest_s = whole_s / stages
        if self.split.alike is not None:
            layer = works[self.split.alike]
            busiest_s = max(busiest_s, -(-self.num_inner // stages) * (layer[0] + layer[1]))
        return busiest_s, (whole_s - busiest_s) / (stages - 1)

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
        if cut.rounds:
            # Looped chunks pass all stages in rounds, each of which takes as long as its longest chunk.
            rounds_s = [max([sum(work_of_runs(works, runs)[:2]) for runs in each]) for each in cut.rounds]
            busiest_s = max(busiest_s, sum(rounds_s))
        edge_s = self.estimator.boundary_s(mesh, candidate.micro_batch)
        shape = shape_of(candidate.schedule, stages, chunks, micros, busiest, edge_s, extra_s)
        busiest_s += 2 * chunks * self.estimator.sending_s(mesh, candidate.micro_batch)
        step_s = micros * busiest_s + shape.bubble * others_s
        before_s, after_s = (tuple([each * others_s for each in part]) for part in (shape.before, shape.after))
        return Pace(step_s, works, cut, before_s, after_s)

    def contents(self, candidate: Candidate) -> tuple[Runs, ...]:
        """Blocks of each virtual stage."""
        if candidate.schedule == SERIAL:
            return (self.whole,)
        works = self.works(candidate._replace(first=0))
        counts = self.split.counts(works, candidate.mesh.total("pipeline") * candidate.chunks)
        return self.split.contents(counts)

    # Messages of states.

    def exposed_s(self, candidate: Candidate, pace: Pace) -> float:
        """Seconds by which messages of states make a step longer."""
        mesh, unit = candidate.mesh, candidate.unit
        lines, numels = self.messages.of(mesh, candidate.placement), self.messages.numels(mesh)
        units = num_micros(self.task, candidate) // unit
        halves = has_halves(candidate.schedule)
        owned = sum([numels.own[kind] * count for runs in pace.cut.first for kind, count in runs])
        update_s = self.estimator.update_s(mesh.state, candidate.placement, owned)
        starts_s = ends_s = refreshed_s = synced_s = more_s = 0.0
        for runs, before_s, after_s in zip(pace.cut.first, pace.before_s, pace.after_s, strict=True):
            for kind, count in runs:
                sent = lines.of(numels.own[kind], numels.stacks[kind])
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
                before_s += count * forward_s
                after_s += count * behind_s
                more_s += count * _visits_s(sent, units, forward_s, backward_s)
        if mesh.divides_stacks:
            late_s = self._late_s(candidate, pace, lines, numels)
            starts_s, ends_s, more_s = max(starts_s, late_s[0]), max(ends_s, late_s[1]), more_s + late_s[2]
        return starts_s + ends_s + self._tie_s(candidate) + lines.control_s + more_s

    def _tie_s(self, candidate: Candidate) -> float:
        """Seconds in which the first and the last stage sum the gradient of a block that both hold."""
        # In a V both ends are on one stage.
        if candidate.schedule == SERIAL or traits()[candidate.schedule].folded:
            return 0.0
        return sum([self.estimator.tie_s(candidate, owner) for owner in self._owners])

    def _late_s(self, candidate: Candidate, pace: Pace, lines: Lines, numels: Elements) -> tuple[float, float, float]:
        """Seconds that messages of experts wait behind messages of states on their lanes: at the start, at the end, and
        in between.

        The first forward's wait for the REFRESH of all blocks of the stage. In the last backward, each dispatch waits
        for the gradients of the block after it, on all virtual stages in turn, or on one stage; not if weight gradients
        come later. So do those of every other backward if gradients are reduced in each.
        """
        lanes, halves = candidate.mesh.stack_tiers, has_halves(candidate.schedule)
        sent = [lines.of(*each) for each in zip(*numels, strict=True)]
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

    # Memory.

    def memory_bytes(self, candidate: Candidate, pace: Pace) -> float:
        """Estimated memory of the fullest stage."""
        mesh, micro_batch, placement = candidate.mesh, candidate.micro_batch, candidate.placement
        estimator, micros = self.estimator, num_micros(self.task, candidate)
        states = estimator.state_bytes(mesh.state, placement)
        of_stacks = estimator.state_bytes(mesh.stack_state, placement)
        flying = float(candidate.unit)
        if candidate.schedule != SERIAL:
            flying = in_flight(candidate.schedule, mesh.total("pipeline"), candidate.chunks, micros)
            flying = max(flying, candidate.unit) if takes_unit(candidate.schedule) else flying
        most = 0.0
        for numel, stacks, kept in self._stages_held(candidate, pace):
            most = max(most, numel * states + stacks * of_stacks + flying * micro_batch * kept)
            flying = 1.0  # later stages keep fewer, and at least one
        layout, _ = estimator.layout(mesh.state, placement)
        gathered = max(self.messages.numels(mesh).own) * estimator.item if layout.frees else 0
        return estimator.whole_bytes(most + gathered)

    def least_held(self, mesh: Mesh, counts: Counts, recompute: int) -> tuple[float, float, float]:
        """Elements, those of stacks, and bytes kept of a sequence, of blocks of each kind that all `recompute`."""
        again = self.again.all_layers(recompute, least=False)
        own, stacks = self.messages.numels(mesh)
        numel = held = kept = 0.0
        for kind, count in counts:
            numel += count * own[kind]
            held += count * stacks[kind]
            kept += count * self._kept(kind, mesh, again)
        return numel, held, kept

    def _stages_held(self, candidate: Candidate, pace: Pace) -> list[tuple[float, float, float]]:
        """Elements, those of stacks, and bytes kept of a sequence, of each distinct stage; of the first stage first."""
        mesh = candidate.mesh
        key = (mesh.inside_degrees, mesh.stack_degrees, candidate.recompute, candidate.first, pace.cut.stages)
        found = self._held.get(key)
        if found is None:
            own, stacks = self.messages.numels(mesh)
            again, rest = (self.again.all_layers(candidate.recompute, least=least) for least in (False, True))
            kinds = range(len(own))
            kept = [float(self._kept(kind, mesh, again)) for kind in kinds]
            if rest != again:
                share = candidate.first / self.num_inner
                kept = [share * kept[kind] + (1 - share) * self._kept(kind, mesh, rest) for kind in kinds]
            found = self._held[key] = [
                (_total(own, runs), _total(stacks, runs), _total(kept, runs)) for runs, _ in pace.cut.stages
            ]
        return found

    def _kept(self, kind: int, mesh: Mesh, recompute: int) -> int:
        return 0 if self.estimator.specs[kind].at_an_end else self.estimator.kept_bytes(kind, mesh, 1, recompute)


def _total(sizes: Sequence[float], runs: Runs) -> float:
    return sum([count * sizes[kind] for kind, count in runs])


def _visits_s(sent: Sequence[Sent], units: int, forward_s: float, backward_s: float) -> float:
    """Seconds by which a block's messages lengthen a step in all its visits, beyond the first and the last of the step.

    `forward_s` and `backward_s` are of a unit of micro-batches.
    """
    refresh, gather, reduce, sync, further, back = sent
    slowed_s = refresh.slowed_s + gather.slowed_s + sync.slowed_s
    if not (reduce.seconds or further.seconds or back.seconds):
        return slowed_s
    # On one lane they follow each other.
    beside_s = back.seconds + reduce.seconds if back.lane == reduce.lane else max(back.seconds, reduce.seconds)
    waits_s = max(0.0, further.seconds - forward_s) + max(0.0, beside_s - backward_s)
    slowed_s += (units - 1) * further.slowed_s + units * (reduce.slowed_s + back.slowed_s)
    return slowed_s + units * waits_s

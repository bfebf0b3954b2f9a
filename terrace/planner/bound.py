"""Lower bounds on the step time and the memory of candidates; of data-parallel messages in terrace.planner.chains.

Pipeline time. Let f and b be the forward and backward of a stage on one micro-batch, including tensor and context
messages (nothing hides them), and f0 and b0 the forward and backward of the lightest virtual stage with the message
after it. Stage r of p is idle for the first r f0 seconds and for the last r b0 seconds (with a split backward, delayed
weight gradients may fill the end). So with M micro-batches a pipeline takes at least each of

    M (mean of f + b over stages) + (p - 1)/2 (f0 + b0),
    M (f + b of the last stage)   + (p - 1)   (f0 + b0),       M (f + b of the busiest stage),
    (f + b of all virtual stages but the last, and its messages) + M (f + b of the last virtual stage);

in the last one a split b counts without its weight gradient. Later bounds play the orders with f and b or, cheaper, sum
the tasks on the critical path of a pipeline already played with the same orders and other seconds.

Many shapes at once. A group (terrace.planner.space) counts only the compute of its tokens on tensor ranks, a lower
bound
for all members: products and passes over memory depend only on tokens, and attention takes at least as many products
and rounds. An open shape adds the least messages of any of its context forms; it counts the smallest memory, and hides
messages behind the largest forward and backward. The layer split depends on the context form only through the cost of
the logits in layers, and is monotone in it, so a bound on schedules is the minimum over all splits in between.

Memory. Each state divided by the ranks it is sharded over, one gathered block, and the activations in flight.
"""

import math
from collections.abc import Sequence
from heapq import heapify, heapreplace

from terrace.base.errors import PlanError
from terrace.plan.mesh import Mesh
from terrace.planner.candidate import SLACK, PartialCandidate
from terrace.planner.chains import Chains, Choices
from terrace.planner.delays import Delay
from terrace.planner.estimate import Estimator
from terrace.planner.parts import BlockWorks, Part, parts_of
from terrace.planner.paths import Paths
from terrace.planner.pipelines import Pipeline, build_pipeline
from terrace.planner.space import Group, OpenMesh
from terrace.planner.spans import Span, Spans
from terrace.planner.stages import SERIAL, has_halves, held, placement_of, traits
from terrace.planner.task import Placement
from terrace.planner.works import Works
from terrace.program.schedules.registry import takes_unit

Excess = tuple[float, Placement, int]  # seconds beyond the computing, of a placement and a unit


class Bounds:
    """Lower bounds for the candidates of one task, with a cache of pipelines."""

    def __init__(self, estimator: Estimator) -> None:
        self.estimator, self.task = estimator, estimator.task
        self.split = estimator.split
        self.num_inner = len(self.task.inner)
        self.works = Works(estimator)
        self.chains = Chains(estimator, self.works)
        self.spans_of, self.paths = Spans(self.split), Paths(self.split)
        self._pipelines: dict[tuple[object, ...], Pipeline] = {}
        self._parts: dict[tuple[tuple[int, ...], bool, int], tuple[Part, ...]] = {}
        self._delays: dict[tuple[object, ...], Delay] = {}

    def root(self, shape: OpenMesh, micro_batch: int, recompute: int) -> PartialCandidate:
        """Bound of a shape over all schedules, with the stages of the lightest possible pipeline.

        For an open shape it also bounds all its context forms.
        """
        return self.bounded(self.outline(shape, micro_batch, recompute))

    def outline(self, shape: OpenMesh, micro_batch: int, recompute: int) -> PartialCandidate:
        """A root without its time bound."""
        sizes = self.works.sizes(shape, recompute)
        stages, alike = sizes.num_stages, self.split.alike
        micros = self.task.batch // (sizes.data * micro_batch)
        all_kept = micro_batch * sizes.all_kept
        least_held: tuple[tuple[float, float, float], ...]
        if stages == 1:
            least_held = ((sizes.all_numel, all_kept, sizes.all_stacks),)
        elif alike is not None:
            # Some stage has at least the mean number of layers; a micro-batch has passed all of them before its first
            # backward.
            most = -(-self.num_inner // stages)
            kept = most * micro_batch * sizes.kept[alike]
            least_held = ((most * sizes.numels[alike], kept, most * sizes.stacks[alike]),)
        else:
            # Some stage holds at least the mean of the parameters, and some stage keeps at least the mean.
            least_held = (
                (sizes.all_numel / stages, 0, 0),
                (0, all_kept / stages, 0),
                (0, 0, sizes.all_stacks / stages),
            )
        heavy = self.works.whole if stages == 1 else None
        # Positional arguments for speed: a search builds thousands of these.
        return PartialCandidate(shape, micro_batch, recompute, "", 1, micros, heavy, 0.0, least_held, sizes)

    def bounded(self, outline: PartialCandidate) -> PartialCandidate:
        """The root of an outline, with its time bound."""
        shape, micro_batch, recompute, _, _, micros, heavy, _, least_held, sizes, _, _, _ = outline
        works, stages = self.works.of(shape, micro_batch, recompute, micros > 1), sizes.num_stages
        edge_s = self.estimator.boundary_s(shape.mesh, micro_batch) if stages > 1 else 0.0
        _, span_s = self.spans_of.least_s(works, edge_s, stages, micros)
        return PartialCandidate(shape, micro_batch, recompute, "", 1, micros, heavy, span_s, least_held, sizes)

    def core(self, root: PartialCandidate, schedule: str, chunks: int) -> PartialCandidate | None:
        """The core of a root with one schedule; None if `spans` excludes it."""
        found = [self.spanning(root, span) for span in self.spans(root, [(schedule, chunks)], exact=True)]
        return found[0] if found else None

    def spanning(self, root: PartialCandidate, span: Span) -> PartialCandidate:
        """The core of a root with the schedule of a span."""
        schedule, chunks, span_s, _, heavy = span
        shape, micro_batch, recompute, _, _, micros, _, _, least_held, sizes, _, _, _ = root
        played = schedule == SERIAL
        return PartialCandidate(
            shape, micro_batch, recompute, schedule, chunks, micros, heavy, span_s, least_held, sizes, played
        )

    def spans(self, root: PartialCandidate, schedules: Sequence[tuple[str, int]], *, exact: bool = False) -> list[Span]:
        """Bounds of a root with each schedule; schedules with more virtual stages than layers, or too many passes,
        are skipped.

        With `exact`, the bound considers how the forms of an open shape split the layers, which takes longer.
        """
        mesh, edge_s = root.shape.mesh, self.estimator.boundary_s(root.shape.mesh, root.micro_batch)
        found: dict[tuple[str, int], Span] = {}
        for halves in (False, True):
            # Layers cost more with split backwards, which may change their distribution.
            own = [each for each in schedules if has_halves(each[0], mesh) == halves]
            if own:
                works, dearest = self._split_by(root, halves, exact)
                each = self.spans_of.each(works, dearest, edge_s, root.sizes.num_stages, root.num_micros, own)
                found |= {(span.schedule, span.chunks): span for span in each}
        return [found[each] for each in schedules if each in found]

    def _split_by(self, root: PartialCandidate, halves: bool, exact: bool) -> tuple[BlockWorks, float | None]:
        # Minimum seconds of the blocks and, if forms differ, the smallest cost of the logits in layers.
        shape, numbers = root.shape, (root.micro_batch, root.recompute, root.num_micros > 1)
        if not shape.is_open:
            return self.works.of(shape, *numbers, halves=halves), None
        # Context messages make layers more expensive, so the logits cost fewer layers: any smaller number is possible.
        # Divisions of stacks make layers cheaper or more expensive, by an amount unknown here.
        dearest = 0.0
        if exact and self.split.alike is not None and not shape.divides:
            dearest = self.split.logits_in_layers(self.works.most(shape, *numbers, halves=halves))
        return self.works.of(shape, *numbers), dearest

    def partly(self, core: PartialCandidate, first: int) -> PartialCandidate:
        """A core without a pipeline whose recomputation is limited to its `first` layers.

        The other layers keep more. One of them is excluded from `stages`: at the peak its backward may have begun.
        """
        numbers = core.micro_batch, core.recompute, core.num_micros > 1
        least, most = self.works.of(core.shape, *numbers).each, self.works.most(core.shape, *numbers)
        kinds = [self.split.order[index] for index in self.task.inner]
        more_s = core.num_micros * sum(most[kind][1] - least[kind][1] for kind in kinds[:first])
        others = self.works.sizes(core.shape, self.works.again.all_layers(core.recompute, least=True)).kept
        more = core.micro_batch * sum(others[kind] - core.sizes.kept[kind] for kind in kinds[first + 1 :])
        ((numel, kept, stack),) = core.stages
        return core._replace(first=first, span_s=core.span_s + more_s, stages=((numel, kept + more, stack),))

    def tightened(self, core: PartialCandidate) -> PartialCandidate:
        """The core with its `exact` span, along a critical path of its orders.

        About as tight as a play; for an open shape it bounds all forms. Raises `PlanError` as the schedule does.
        """
        shape = core.shape
        if shape.is_open:
            exact = self.core(core, core.schedule, core.chunks)
            assert exact is not None, "a core has a span"
            core = exact if not core.unit else core._replace(span_s=exact.span_s)
        if shape.divides or core.schedule == SERIAL:
            return core
        key = core.schedule, shape.mesh.total("pipeline"), core.chunks, core.num_micros, core.unit or 1
        works, dearest = self._split_by(core, has_halves(core.schedule, shape.mesh), exact=True)
        edges_s = (each(shape.mesh, core.micro_batch) for each in (self.estimator.boundary_s, self.estimator.sending_s))
        return core._replace(span_s=max(core.span_s, self.paths.least(key, works, dearest, *edges_s).span_s))

    def group_s(self, group: Group) -> float:
        """Lower bound in seconds over a whole group."""
        return self.spans_of.least_s(*self._least(group, exact=False))[1] * SLACK

    def group_spans(self, group: Group, schedules: Sequence[tuple[str, int]], *, exact: bool = False) -> list[Span]:
        """Bounds over a whole group with each schedule; `exact` as in `Estimator.least_block`."""
        works, edge_s, stages, micros = self._least(group, exact)
        return self.spans_of.each(works, 0.0, edge_s, stages, micros, schedules)

    def group_scheduled_s(
        self, group: Group, spans: Sequence[Span], choices: Choices, *, exact: bool = False
    ) -> list[float]:
        """`Chains.scheduled_s` over a whole group, whose members shard their states over the same ranks."""
        works, *_ = self._least(group, exact)
        return self.chains.scheduled_s(group.member, works.each, group.recompute, group.num_micros, spans, choices)

    def group_along_s(self, group: Group, spans: Sequence[Span], choices: Choices, *, exact: bool = False) -> float:
        """Minimum of `group_scheduled_s`, refined along critical paths where a schedule's closed form is loose."""
        each_s = self.group_scheduled_s(group, spans, choices, exact=exact)
        # Only the minimum is needed, so entries are refined lazily.
        heap = [(own_s, number, False) for number, own_s in enumerate(each_s)]
        heapify(heap)
        while True:
            least_s, number, is_known = heap[0]
            span = spans[number]
            if is_known or not self._has_paths(group, span):
                return least_s
            (own_s,) = self.group_scheduled_s(group, [self._along(group, span, exact)], choices, exact=exact)
            heapreplace(heap, (max(least_s, own_s), number, True))

    def _has_paths(self, group: Group, span: Span) -> bool:
        # Without split backwards, closed forms are within a few percent.
        return (
            (span.schedule != SERIAL and traits()[span.schedule].split)
            and not takes_unit(span.schedule)
            and not group.shape.divides
            and self.split.alike is not None
        )

    def _along(self, group: Group, span: Span, exact: bool) -> Span:
        works, edge_s, stages, micros = self._least(group, exact)
        try:
            path = self.paths.least((span.schedule, stages, span.chunks, micros, 1), works, 0.0, edge_s, 0.0)
        except PlanError:  # the schedule cannot run these numbers
            return span._replace(span_s=math.inf, chained_s=math.inf)
        # If layers cost more, a chain of messages hides that much more behind all but one, and a path grows as much.
        hides = path.hiding >= -(-self.num_inner // stages) - 1
        chained_s = max(span.chained_s, path.span_s) if hides else span.chained_s
        return span._replace(span_s=max(span.span_s, path.span_s), chained_s=chained_s)

    def root_scheduled_s(self, root: PartialCandidate, spans: Sequence[Span], choices: Choices) -> list[float]:
        """`Chains.scheduled_s` of a root."""
        shape, micro_batch, recompute, micros = root.shape, root.micro_batch, root.recompute, root.num_micros
        works = self.works.of(shape, micro_batch, recompute, micros > 1)
        return self.chains.scheduled_s(shape, works.each, recompute, micros, spans, choices)

    def _least(self, group: Group, exact: bool) -> tuple[BlockWorks, float, int, int]:
        shape, micro_batch, recompute, micros, _ = group
        works = self.works.of(shape, micro_batch, recompute, micros > 1, context=False, exact=exact)
        stages = shape.mesh.total("pipeline")
        return works, self.estimator.boundary_s(shape.mesh, micro_batch) if stages > 1 else 0.0, stages, micros

    def staged(self, core: PartialCandidate) -> PartialCandidate:
        """The core with the parameters and activations of its stages. Raises `PlanError` as the schedule does."""
        stages = core.shape.mesh.total("pipeline")
        placement, most = held(core.schedule, stages, core.chunks, core.num_micros, core.unit or 1)
        sizes, counts = core.sizes, self._counts(core)
        parts = parts_of(self.split.contents(counts), placement)
        numels, kept = sizes.numels, [core.micro_batch * each for each in sizes.kept]
        # A set, since the inner stages of a deep pipeline are mostly equal.
        needs = {
            (
                sum(count * numels[kind] for kind, count in part.runs),
                sum(
                    waits * count * kept[kind]
                    for runs, waits in zip(part.chunks, waiting, strict=True)
                    for kind, count in runs
                ),
                sum(count * sizes.stacks[kind] for kind, count in part.runs),
            )
            for part, waiting in zip(parts, most, strict=True)
        }
        heavy = self.split.heaviest([part.runs for part in parts])
        return core._replace(heavy=None if core.unit else heavy, stages=tuple(sorted(needs)))

    def play(self, core: PartialCandidate) -> PartialCandidate:
        """The core bounded by the makespan of its played orders. Raises `PlanError` as the schedule does."""
        numbers = (core.micro_batch, core.recompute, core.schedule, core.chunks, core.unit or 1)
        pipeline = self.pipeline(core.shape.mesh, *numbers)
        return self.staged(core)._replace(span_s=pipeline.span_s, played=True)

    def pipeline(
        self, mesh: Mesh, micro_batch: int, recompute: int, schedule: str, chunks: int, unit: int = 1
    ) -> Pipeline:
        """The pipeline of a core, cached. Raises `PlanError` as the schedule does."""
        key = (mesh, micro_batch, recompute, schedule, chunks, unit)
        if key not in self._pipelines:
            micros = self.task.batch // (mesh.total("data") * micro_batch)
            self._pipelines[key] = build_pipeline(
                self.estimator, mesh, micro_batch, recompute, schedule, chunks, micros, unit
            )
        return self._pipelines[key]

    def placed_s(self, core: PartialCandidate, placement: Placement, unit: int) -> float:
        """Lower bound in seconds for a core with a placement and a unit."""
        found = self.delayed(core, [(self.chains.excess_s(core, placement, unit), placement, unit)])
        return self.least_s(core, found[0][0])

    def delayed(self, core: PartialCandidate, excesses: list[Excess]) -> list[Excess]:
        """Add the waits of routed messages on their lanes (terrace.planner.delays) to excesses of a core; ascending."""
        shape, schedule = core.shape, core.schedule
        mesh, delays = shape.mesh, self.chains.delays
        if (
            shape.divides
            or not mesh.divides_stacks
            or schedule in ("", SERIAL)
            or not (delays.tells or not shape.is_open)
        ):
            return excesses
        counts = () if shape.is_open else self._counts(core)
        trait, of_stages = traits()[schedule], not core.recompute
        stages = mesh.total("tensor"), mesh.total("pipeline"), core.chunks, trait.split, trait.folded, of_stages
        found = []
        for excess_s, placement, unit in excesses:
            prices = delays.prices(mesh, placement)
            key = (prices, stages, counts)
            delay = self._delays.get(key)
            if delay is None:
                if counts:
                    delay = delays.of(mesh, schedule, prices, self._parts_of(core, counts), of_stages=of_stages)
                else:
                    delay = delays.at_least(mesh, schedule, core.chunks, prices, of_stages=of_stages)
                self._delays[key] = delay
            found.append((delay.added_s(excess_s, core.num_micros), placement, unit))
        return sorted(found)

    def _counts(self, core: PartialCandidate) -> tuple[int, ...]:
        mesh, numbers = core.shape.mesh, (core.micro_batch, core.recompute, core.num_micros > 1)
        works = self.works.of(core.shape, *numbers, halves=has_halves(core.schedule, mesh)).each
        return self.split.counts(works, mesh.total("pipeline") * core.chunks)

    def _parts_of(self, core: PartialCandidate, counts: tuple[int, ...]) -> tuple[Part, ...]:
        stages, schedule = core.shape.mesh.total("pipeline"), core.schedule
        key = (counts, traits()[schedule].folded, stages)
        found = self._parts.get(key)
        if found is None:
            placement = placement_of(schedule, stages, core.chunks)
            found = self._parts[key] = parts_of(self.split.contents(counts), placement)
        return found

    @staticmethod
    def least_s(core: PartialCandidate, excess_s: float) -> float:
        """Lower bound in seconds for a step that exceeds its compute by at least `excess_s`."""
        return (core.span_s + excess_s) * SLACK

    def least_bytes(self, core: PartialCandidate, placement: Placement, unit: int) -> float:
        """Lower bound in bytes on the memory of a core with a placement and a unit."""
        mesh = core.shape.mesh
        states = self.estimator.state_bytes(mesh.state, placement)
        of_stacks = self.estimator.state_bytes(mesh.stack_state, placement)
        layout, _ = self.estimator.layout(core.shape.mesh.state, placement)
        gathered = core.sizes.gathered_bytes if layout.frees else 0
        times = 1 if core.unit else unit
        least = (
            max([numel * states + times * kept + stack * of_stacks for numel, kept, stack in core.stages]) + gathered
        )
        return self.estimator.whole_bytes(least) * SLACK

"""Lower bounds: no choice is faster or smaller than these say.

Time. Let f and b be the forward and backward of a block on one micro-batch, tensor and context messages included
(nothing hides them), and f0 and b0 those of the lightest virtual stage with the message after it. Stage r of p does
nothing before r times f0 has passed, and nothing in the last r times b0 (but with a split backward, a delayed
weight gradient may). So with M micro-batches no pipeline ends before

    M (mean of f + b over stages) + (p - 1)/2 (f0 + b0),
    M (f + b of the last stage)   + (p - 1)   (f0 + b0),       M (f + b of the busiest stage),
    (f + b of all virtual stages but the last, and its messages) + M (f + b of the last virtual stage),

the last with the weight gradient's part left out of a split b.

A later bound plays the orders with f and b, so that only messages between data ranks are left out; waiting for these
makes tasks longer, and longer tasks never make a step shorter. And no lane of messages is shorter than the sum of
what it carries, and no step shorter than its computing and its update.

Memory. Each state over the ranks it is sharded over, one block gathered, and the activations that wait.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from terrace.plan import MessageClass
from terrace.plan.layout import DEVICE
from terrace.planner.estimate import EMBEDDING, HEAD, KINDS, LAYER, Estimator
from terrace.planner.pipelines import Pipeline, Work, block_work, build_pipeline, head_layers
from terrace.planner.space import Rows, Shape
from terrace.planner.stages import MOST_CHUNKS, SERIAL, SIMPLEST, share_layers, traits
from terrace.planner.task import Choice, Placement

_SLACK = 1 - 1e-9  # sums in another order may differ in their last bits


class Core(NamedTuple):
    """A choice without placement and unit: what its computing takes at least.

    `heavy` counts (embeddings, layers, heads) of a stage that no other outworks, `compute_s` are its seconds for all
    micro-batches and `ramp_s` what the pipeline adds to them. `stages` holds (parameters per tensor rank,
    bytes of one micro-batch that wait at the peak) of stages of which one needs most memory.
    """

    shape: Shape
    micro_batch: int
    recompute: int
    schedule: str
    chunks: int
    num_micros: int
    heavy: tuple[int, int, int]
    compute_s: float
    ramp_s: float
    backward_s: float  # of one micro-batch in that stage
    stages: tuple[tuple[int, int], ...]
    played: bool

    @property
    def bound_s(self) -> float:
        """Seconds that no choice of placement gets below."""
        return (self.compute_s + self.ramp_s) * _SLACK

    @property
    def key(self) -> tuple[int, str, int, int, Shape]:
        """What orders cores of one bound."""
        return self.recompute, self.schedule, self.chunks, self.micro_batch, self.shape

    def choice(self, placement: Placement, unit: int) -> Choice:
        """Return the whole choice; a root stands for its simplest schedule."""
        schedule = self.schedule or (SIMPLEST if self.shape.pipeline > 1 else SERIAL)
        return Choice(self.recompute, unit, schedule, self.chunks, self.micro_batch, placement, self.shape.rows)


class _Shares(NamedTuple):
    """Layers of the lightest virtual stage and of the last, and of looped stages: of the busiest and of the last."""

    least: int
    last: int
    most: int
    last_stage: int


@lru_cache(maxsize=65536)
def _shares(num_layers: int, num_stages: int, chunks: int, head_layers: float, is_looped: bool) -> _Shares:
    counts = share_layers(num_layers, num_stages * chunks, head_layers)
    layers = [sum(counts[stage::num_stages]) for stage in range(num_stages)] if is_looped else [0]
    return _Shares(min(counts), counts[-1], max(layers), layers[-1])


class Bounds:
    """Bounds for the choices of one task, and the pipelines that were built for them."""

    def __init__(self, estimator: Estimator) -> None:
        self.estimator, self.task = estimator, estimator.task
        self.num_layers = self.task.model.num_layers
        self._block_works: dict[tuple[Rows, int, int, bool], list[Work]] = {}
        self._pipelines: dict[tuple[object, ...], Pipeline] = {}

    def root(self, shape: Shape, micro_batch: int, recompute: int) -> Core:
        """Return the bound over all schedules of a shape; its stages are those of the lightest pipeline there is."""
        works = self._works(shape, micro_batch, recompute)
        numels = self.estimator.own_numels(shape)
        micros = self.task.batch // (shape.data * micro_batch)
        kept = self.estimator.kept_bytes(LAYER, shape.rows, micro_batch, recompute)
        stages, layers = shape.pipeline, self.num_layers
        (embedding_s, layer_s, head_s) = ((work[0] + work[1]) for work in works)
        total_s = layers * layer_s + head_s + embedding_s
        least = max(1, layers // (stages * MOST_CHUNKS))
        edge_s = self.estimator.boundary_s(shape.rows, micro_batch) if stages > 1 else 0.0
        ramp_s = (stages - 1) / 2 * (least * works[LAYER][0] + edge_s)
        if stages == 1:
            # A head keeps its logits only while it runs; layers keep until their backward.
            held, counts = ((sum(numels) + (layers - 1) * numels[LAYER], layers * kept),), (1, layers, 1)
        else:
            # Some stage has the mean of the layers or more; before its first backward a micro-batch is in them all.
            most = -(-layers // stages)
            held, counts = ((most * numels[LAYER], most * kept),), (0, layers // stages, 0)
        return Core(
            shape=shape,
            micro_batch=micro_batch,
            recompute=recompute,
            schedule="",
            chunks=1,
            num_micros=micros,
            heavy=counts,
            compute_s=micros * total_s / stages,
            ramp_s=ramp_s,
            backward_s=counts[0] * works[0][1] + counts[1] * works[1][1] + counts[2] * works[2][1],
            stages=held,
            played=False,
        )

    def core(self, root: Core, schedule: str, chunks: int) -> Core | None:
        """Return the bound of a root with a schedule; None when it has more virtual stages than layers."""
        if schedule == SERIAL:
            return root._replace(schedule=SERIAL, played=True)
        shape, num_layers = root.shape, self.num_layers
        if shape.pipeline * chunks > num_layers:
            return None
        works = self._works(shape, root.micro_batch, root.recompute)
        trait = traits()[schedule]
        shares = _shares(num_layers, shape.pipeline, chunks, head_layers(works), trait.looped)
        forward_s, backward_s, weight_s = works[LAYER]
        head_forward_s, head_s = works[HEAD][0], works[HEAD][0] + works[HEAD][1]
        edge_s = self.estimator.boundary_s(shape.rows, root.micro_batch)
        stages, micros, least = shape.pipeline, root.num_micros, shares.least
        back_s = backward_s - weight_s if trait.split else backward_s
        hop_s = least * forward_s + edge_s + (0.0 if trait.split else least * backward_s + edge_s)
        busiest_s, last_s = root.compute_s, micros * chunks * least * (forward_s + backward_s)
        if trait.looped:
            last_s = micros * (shares.last_stage * (forward_s + backward_s) + head_s)
            busiest_s = max(busiest_s, micros * shares.most * (forward_s + backward_s), last_s)
        # A micro-batch passes all virtual stages and comes back; the last of them does so with each.
        hops = stages * chunks - 1 - (0 if trait.looped else chunks - 1)
        before = num_layers - shares.last
        path_s = before * (forward_s + back_s) + 2 * hops * edge_s
        path_s += micros * (shares.last * (forward_s + back_s) + head_forward_s)
        bound_s = max(root.compute_s + (stages - 1) / 2 * hop_s, last_s + (stages - 1) * hop_s, busiest_s, path_s)
        return root._replace(schedule=schedule, chunks=chunks, compute_s=busiest_s, ramp_s=bound_s - busiest_s)

    def cores(self, root: Core, schedules: Sequence[tuple[str, int]]) -> Iterator[Core]:
        """Yield the bounds of a root with each of the schedules; those of the same traits share one."""
        known: dict[tuple[bool, bool, int], Core | None] = {}
        for schedule, chunks in schedules:
            trait = None if schedule == SERIAL else traits()[schedule]
            key = (trait is not None and trait.split, trait is None or trait.looped, chunks)
            if key not in known:
                known[key] = self.core(root, schedule, chunks)
            core = known[key]
            if core is not None:
                yield core if core.schedule == schedule else core._replace(schedule=schedule)

    def play(self, core: Core) -> Core:
        """Return the bound of a core whose orders have been played; raises `PlanError` as the schedule does."""
        pipeline = self.pipeline(core.shape, core.micro_batch, core.recompute, core.schedule, core.chunks)
        loads = pipeline.stages_s
        heavy = max(range(core.shape.pipeline), key=loads.__getitem__)
        compute_s = core.num_micros * loads[heavy]
        kept = self.estimator.kept_bytes(LAYER, core.shape.rows, core.micro_batch, core.recompute)
        numels = self.estimator.own_numels(core.shape)
        stages = {
            (
                sum(count * numel for count, numel in zip(part.counts, numels, strict=True)),
                kept * sum(layers * waits for layers, waits in zip(part.layers, waiting, strict=True)),
            )
            for part, waiting in zip(pipeline.parts, pipeline.waiting, strict=True)
        }
        return core._replace(
            heavy=pipeline.parts[heavy].counts,
            compute_s=compute_s,
            ramp_s=pipeline.span_s - compute_s,
            backward_s=sum(work[1] for work in pipeline.works[heavy]),
            stages=tuple(sorted(stages)),
            played=True,
        )

    def pipeline(self, shape: Shape, micro_batch: int, recompute: int, schedule: str, chunks: int) -> Pipeline:
        """Return the pipeline of a core, built once; raises `PlanError` as the schedule does."""
        key = (shape, micro_batch, recompute, schedule, chunks)
        if key not in self._pipelines:
            micros = self.task.batch // (shape.data * micro_batch)
            self._pipelines[key] = build_pipeline(
                self.estimator, shape, micro_batch, recompute, schedule, chunks, micros
            )
        return self._pipelines[key]

    def placed_s(self, core: Core, placement: Placement, unit: int) -> float:
        """Return the seconds that a choice takes at least."""
        estimator, degrees = self.estimator, core.shape.state
        numels = self.estimator.own_numels(core.shape)
        units = core.num_micros // unit
        lanes: defaultdict[int, float] = defaultdict(float)
        syncs: defaultdict[int, float] = defaultdict(float)
        first_s = last_s = 0.0  # what is sent before the first block runs, and after the last backward, its own
        for kind, count in enumerate(core.heavy):
            if not count:
                continue
            opens = not any(core.heavy[:kind])
            numel = numels[kind]
            if placement.grads > DEVICE:
                lane, seconds = estimator.message(degrees, placement, MessageClass.REDUCE, numel)
                lanes[lane] += count * units * seconds
                last_s += opens * seconds
            lane, seconds = estimator.message(degrees, placement, MessageClass.SYNC, numel)
            syncs[lane] += count * seconds
            last_s += opens * seconds
            lane, seconds = estimator.message(degrees, placement, MessageClass.REFRESH, numel)
            lanes[lane] += count * seconds
            if placement.params > DEVICE:
                seconds = self._gather(lanes, core, placement, kind, units)
                first_s += opens * seconds
        held = sum(numel * count for numel, count in zip(numels, core.heavy, strict=True))
        update_s = estimator.update_s(degrees, placement, held)
        # Synchronisation starts when the last unit's first backward is done; update follows all of it.
        before_s = core.compute_s - core.backward_s * unit
        bounds = [first_s + core.compute_s + last_s + update_s]
        bounds += [before_s + seconds + update_s for seconds in syncs.values()]
        bounds += [seconds + syncs.get(lane, 0.0) for lane, seconds in lanes.items()]
        return (core.ramp_s + max(bounds)) * _SLACK

    def _gather(self, lanes: dict[int, float], core: Core, placement: Placement, kind: int, units: int) -> float:
        """Add the gathers of the blocks of one kind: forward and backward of every unit, where they stay apart.

        The first and the last block of a stage keep their parameters between two of their visits; of a stage of
        layers alone that may be all of them. Returns the seconds of one gather for a first forward.
        """
        numel, count = self.estimator.own_numels(core.shape)[kind], core.heavy[kind]
        ends = 0 if kind != LAYER else (not core.heavy[EMBEDDING]) + (not core.heavy[HEAD])
        apart = max(0, count - ends) if kind == LAYER else 0
        opening, forward, backward = count, apart * (units - 1), apart * units + (count - apart) * (units - 1)
        secondary = placement.backward > DEVICE
        for message, repeats, second in (
            (MessageClass.GATHER, opening, False),
            (MessageClass.GATHER, forward, secondary),
            (MessageClass.GATHER_BACKWARD, backward, secondary),
        ):
            lane, seconds = self.estimator.message(core.shape.state, placement, message, numel, second)
            lanes[lane] += repeats * seconds
        return self.estimator.message(core.shape.state, placement, MessageClass.GATHER, numel)[1]

    def least_bytes(self, core: Core, placement: Placement, unit: int) -> float:
        """Return the memory that a choice takes at least."""
        states = self.estimator.state_bytes(core.shape.state, placement)
        gathered = (
            self.estimator.own_numels(core.shape)[LAYER] * self.estimator.item if placement.params > DEVICE else 0
        )
        least = max(numel * states + unit * kept for numel, kept in core.stages) + gathered
        return self.estimator.whole_bytes(least) * _SLACK

    def _works(self, shape: Shape, micro_batch: int, recompute: int) -> list[Work]:
        key = (shape.inner, micro_batch, recompute, shape.data * micro_batch < self.task.batch)
        found = self._block_works.get(key)
        if found is None:
            found = [block_work(self.estimator, kind, shape, micro_batch, recompute) for kind in KINDS]
            self._block_works[key] = found
        return found

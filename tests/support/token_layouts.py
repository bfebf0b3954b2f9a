"""Documents of a batch dealt out by hand, as `balance = "cost"` may: to rings of any places."""

from itertools import pairwise

from terrace.model.attention_plans import AttentionPlans
from terrace.plan.context import ContextGroup, local_tokens
from terrace.runtime.batch import Batch
from terrace.runtime.context.axis import ContextAxis
from terrace.runtime.engine import Engine
from terrace.sequence.build import build_token_layout
from terrace.sequence.group_layout import GroupLayout
from terrace.sequence.segments import Segment
from terrace.sequence.token_layout import cut_runs
from tests.support.parity import Case, cut_rows


def dealt_out(engine: Engine, case: Case, step: int) -> list[Batch]:
    """This rank's micro-batches: the rows of all data ranks are one set of documents."""
    size = case.plan.micro_batch * engine.program.layout.data_degree
    batch = case.rows.batch(step, size * case.num_micros)
    return [assigned(engine, cut_rows(batch, size * micro, size * (micro + 1))) for micro in range(case.num_micros)]


def assigned(engine: Engine, batch: Batch) -> Batch:
    """This rank's part of a batch whose documents go to rings of all places, of a node and to single places in turn.

    Tokens are held as they come, so that most are attended to elsewhere.
    """
    program = engine.program
    group = ContextGroup.of(program.cluster, program.plan, engine.rank)
    ring_ranks, inner = group.num_ring_ranks, next(degree for degree in group.ring_degrees if degree > 1)
    rings = [
        (tuple(range(ring_ranks)), tuple(degree for degree in group.ring_degrees if degree > 1)),
        (tuple(range(ring_ranks - inner, ring_ranks)), (inner,)),
        *(((ring_rank,), (1,)) for ring_rank in range(ring_ranks)),
    ]
    total, num_local_tokens = batch.labels.numel(), local_tokens(program.plan, program.mesh, program.model.sequence)
    begins = batch.document_begins()
    segments = tuple(
        Segment(start, stop, *rings[index % len(rings)])
        for index, (start, stop) in enumerate(pairwise((*begins, total)))
    )
    held = tuple(
        cut_runs([(0, total)], m * num_local_tokens, (m + 1) * num_local_tokens) for m in range(len(group.members))
    )
    layout = GroupLayout(
        segments=segments,
        documents=(),
        local_runs=held,
        ulysses=group.ulysses,
        num_local_tokens=num_local_tokens,
        window=window_of(engine),
    )
    return batch.local(build_token_layout(layout, group.members.index(engine.rank)))


def window_of(engine: Engine) -> int:
    """The window of the engine's model."""
    axis = next(each for each in engine.axes if isinstance(each, ContextAxis))
    return next((plans.window for _, plans in axis._replaced if isinstance(plans, AttentionPlans)), 0)

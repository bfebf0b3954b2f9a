"""Training with tokens that are spread over ranks, and the same in one plain process."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn

from terrace.base.errors import ProgramError
from terrace.cluster import Cluster
from terrace.launch.start import World
from terrace.model.attention import AttentionPlans
from terrace.model.decoder import count_tokens, run_blocks
from terrace.plan import MessageClass, Plan
from terrace.plan.context import Pool, local_tokens
from terrace.runtime.batch import Batch, documents_of, localise, positions_of
from terrace.runtime.engine import Engine
from terrace.sequence.build import spread
from terrace.sequence.layout import Layout
from terrace.sequence.segments import Segment
from terrace.sequence.view import cut_runs
from tests.support.lanes import use_lane
from tests.support.parity import ADAMW, FEW_STEPS, Outcome, _optimizer, _trainable, assemble, flatten
from tests.support.toys import MODELS, VOCAB

Sizes = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What is trained on: `sequence` tokens a row, in row i documents of the lengths `documents[i % ...]`."""

    model: str = "wide llama, 2 kv heads"
    sequence: int = 24
    documents: tuple[Sizes, ...] = ()
    freeze: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SpreadCase:
    """One training run."""

    plan: Plan
    rows: Rows = Rows()
    num_micros: int = 1
    sabotage: str = ""
    lane: str = "thread"


def make_rows(rows: Rows, step: int, num_rows: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Tokens, labels and, where there are documents, positions (rows, sequence); some labels are ignored."""
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(0, VOCAB, (num_rows, rows.sequence), generator=generator)
    labels = tokens.roll(-1, dims=1)
    labels[:, -1] = -100
    labels[0, 1:3] = -100
    if not rows.documents:
        return tokens, labels, None
    positions = torch.zeros_like(tokens)
    for row in range(num_rows):
        end = 0
        for size in rows.documents[row % len(rows.documents)]:
            positions[row, end : end + size] = torch.arange(size)
            end += size
            labels[row, end - 1] = -100
        assert end == rows.sequence, f"documents of {end} tokens in a row of {rows.sequence}"
    return tokens, labels, positions


def train_spread(world: World, cluster: Cluster, cases: Sequence[SpreadCase]) -> list[Outcome]:
    """Run every case on this rank."""
    outcomes = []
    for case in cases:
        with use_lane(case.lane):
            outcomes.append(_train(world, cluster, case))
    return outcomes


def engine_of(world: World, cluster: Cluster, case: SpreadCase, blocks: Sequence[nn.Module]) -> Engine:
    """The engine of a case on this rank."""
    model = MODELS[case.rows.model]
    return Engine(
        blocks,
        names=[spec.name for spec in model.declared],
        cluster=cluster,
        plan=case.plan,
        num_micros=case.num_micros,
        objective=model.objective,
        rank=world.rank,
        adamw=ADAMW,
        declared=model.declared,
        sequence=case.rows.sequence,
        freeze=case.rows.freeze,
    )


def _train(world: World, cluster: Cluster, case: SpreadCase) -> Outcome:
    blocks = MODELS[case.rows.model].blocks(torch.float64)
    engine = engine_of(world, cluster, case, blocks)
    if case.sabotage:
        FAULTS[case.sabotage](engine)
    layout, size = engine.program.layout, case.plan.micro_batch
    losses, norms = [], []
    for step in range(FEW_STEPS):
        whole = make_rows(case.rows, step, size * layout.data_degree * case.num_micros)
        batches: list[Batch] = []
        for micro in range(case.num_micros):
            first = size * (micro * layout.data_degree + layout.data_place(world.rank))
            rows = slice(first, first + size)
            if case.plan.balance == "cost":  # then the rows of all data ranks are one set of documents
                first = size * micro * layout.data_degree
                rows = slice(first, first + size * layout.data_degree)
            part = cast(Batch, tuple(x[rows] for x in whole if x is not None))
            batches.append(assigned(engine, part) if case.plan.balance == "cost" else part)
        result = engine.step(batches, ADAMW.lr)
        losses.append(result.loss)
        norms.append(result.grad_norm)
    complaint = ""
    try:
        engine.check_bytes()
    except ProgramError as error:
        complaint = str(error)
    if layout.params >= 0:
        for state in engine.states:
            state.gather(engine.collectives, MessageClass.GATHER, False)
    is_whole = engine.program.tensor.degree == engine.program.stage.num_stages == 1
    parameters = flatten(blocks) if is_whole else assemble(engine)
    engine.close()
    return Outcome(losses, norms, parameters, complaint)


def assigned(engine: Engine, batch: Batch) -> Batch:
    """This rank's part of a batch whose documents go to rings of all places, of a node and to single places in turn.

    Tokens are held as they come, so that most are attended to elsewhere.
    """
    program = engine.program
    pool = Pool.of(program.cluster, program.plan, engine.rank)
    places, inner = pool.num_places, next(degree for degree in pool.place_degrees if degree > 1)
    rings = [
        (tuple(range(places)), tuple(degree for degree in pool.place_degrees if degree > 1)),
        (tuple(range(places - inner, places)), (inner,)),
        *(((place,), (1,)) for place in range(places)),
    ]
    total, num_held = batch[1].numel(), local_tokens(program.plan, program.mesh, program.sequence)
    begins = documents_of(batch)
    segments = tuple(
        Segment(start, stop, *rings[index % len(rings)])
        for index, (start, stop) in enumerate(pairwise((*begins, total)))
    )
    held = tuple(cut_runs([(0, total)], m * num_held, (m + 1) * num_held) for m in range(len(pool.members)))
    layout = Layout(
        segments=segments, documents=(), held=held, ulysses=pool.ulysses, num_held=num_held, window=window_of(engine)
    )
    return localise(batch, spread(layout, pool.members.index(engine.rank)))


def window_of(engine: Engine) -> int:
    """The window of the engine's model."""
    axis = engine._context
    assert axis is not None
    return next((plans.window for _, plans in axis._replaced if isinstance(plans, AttentionPlans)), 0)


@cache
def in_one_process(rows: Rows, num_rows: int) -> Outcome:
    """Train in fp64 on whole batches in this process, with torch's own clipping and AdamW."""
    model = MODELS[rows.model]
    blocks = model.blocks(torch.float64)
    parameters = _trainable(blocks)
    optimizer = _optimizer(parameters)
    losses, norms = [], []
    for step in range(FEW_STEPS):
        tokens, labels, positions = make_rows(rows, step, num_rows)
        loss = model.objective(run_blocks(blocks, tokens, positions), labels) / count_tokens(labels)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        norms.append(float(nn.utils.clip_grad_norm_(parameters, ADAMW.clip)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return Outcome(losses, norms, flatten(blocks))


def wrong_position(engine: Engine) -> None:
    """Have the last token of every rank stand one place later."""
    axis = engine._context
    assert axis is not None
    take = axis.take

    def shifted(batches: Sequence[Batch]) -> list[Batch]:
        local = take(batches)
        for batch in local:
            positions = positions_of(batch)
            assert positions is not None
            positions[0, -1] += 1
        return local

    axis.take = shifted  # type: ignore[method-assign]


def dropped_pair(engine: Engine) -> None:
    """Leave out what the first rank of the pool makes of the keys of the last round."""
    axis = engine._context
    assert axis is not None
    take = axis.take

    def fewer(batches: Sequence[Batch]) -> list[Batch]:
        local = take(batches)
        for course in axis._courses if engine.rank == 0 else ():
            course.turns[-1] = replace(course.turns[-1], pairs=())
        return local

    axis.take = fewer  # type: ignore[method-assign]


FAULTS: dict[str, Callable[[Engine], None]] = {fault.__name__: fault for fault in (wrong_position, dropped_pair)}

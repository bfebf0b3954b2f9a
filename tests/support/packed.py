"""Rows that hold several documents: batches, the runtime's steps on them, and every document alone in one process."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from unittest.mock import patch

import torch
from torch import Tensor, nn

from terrace.base.errors import ProgramError
from terrace.cluster import Cluster
from terrace.launch.start import World
from terrace.model import attention
from terrace.plan import MessageClass
from terrace.runtime.engine import Engine
from tests.support.parity import ADAMW, Case, Outcome, _optimizer, _trainable, assemble, flatten
from tests.support.toys import MODELS, VOCAB

LENGTH = 12
MICRO_BATCH = 2  # rows

# Documents of a row; a GPT-2 here has eight positions, so its rows are longer than any document may be.
ROWS = {
    "gpt2": [(5, 1, 6), (8, 4), (1, 1, 3, 7), (7, 5)],
    "other": [(5, 1, 6), (12,), (1, 1, 3, 7), (7, 5), (12,), (12,), (4, 8), (4, 8)],
}


def documents_of(model: str, row: int) -> tuple[int, ...]:
    """The lengths of the documents in a row of the global batch."""
    kinds = ROWS["gpt2" if "gpt2" in model else "other"]
    return kinds[row % len(kinds)]


def make_rows(model: str, step: int, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, labels and positions (rows, LENGTH); a document's last token has no label."""
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(0, VOCAB, (num_rows, LENGTH), generator=generator)
    labels, positions = tokens.roll(-1, dims=1), torch.zeros_like(tokens)
    for row in range(num_rows):
        end = 0
        for size in documents_of(model, row):
            positions[row, end : end + size] = torch.arange(size)
            end += size
            labels[row, end - 1] = -100
    return tokens, labels, positions


def short_pieces(size: int = 4) -> AbstractContextManager[object]:
    """Let tiny documents be pieces of their own."""
    return patch.object(attention, "_SHORT_PIECE", size)


def train_packed(world: World, cluster: Cluster, cases: Sequence[Case], masked: bool = True) -> list[Outcome]:
    """Run every case on this rank; without `masked` the engine is not told of the documents."""
    with short_pieces():
        return [_train(world, cluster, case, masked) for case in cases]


def _train(world: World, cluster: Cluster, case: Case, masked: bool) -> Outcome:
    model = MODELS[case.model]
    blocks = model.blocks(torch.float64)
    engine = Engine(
        blocks,
        cluster=cluster,
        plan=case.plan,
        num_micros=case.num_micros,
        objective=model.objective,
        rank=world.rank,
        adamw=ADAMW,
        declared=model.declared,
        sequence=LENGTH,
    )
    losses, norms = [], []
    layout = engine.program.layout
    for step in range(case.num_steps):
        whole = make_rows(case.model, step, MICRO_BATCH * layout.data_degree * case.num_micros)
        batches = []
        for micro in range(case.num_micros):
            first = MICRO_BATCH * (micro * layout.data_degree + layout.data_place(world.rank))
            tokens, labels, positions = (part[first : first + MICRO_BATCH] for part in whole)
            batches.append((tokens, labels, positions) if masked else (tokens, labels))
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


def every_document_alone(name: str, num_rows: int, num_steps: int) -> Outcome:
    """Train in fp64 in this process on one document after the other, which knows of no positions."""
    model = MODELS[name]
    blocks = model.blocks(torch.float64)
    parameters = _trainable(blocks)
    optimizer = _optimizer(parameters)
    losses, norms = [], []
    for step in range(num_steps):
        tokens, labels, _ = make_rows(name, step, num_rows)
        count = (labels != -100).sum()
        optimizer.zero_grad()
        total = 0.0
        for row in range(num_rows):
            sizes = list(documents_of(name, row))
            for x, y in zip(torch.split(tokens[row], sizes), torch.split(labels[row], sizes), strict=True):
                out = x[None]
                for block in blocks:
                    out = block(out)
                loss = model.objective(out, y[None]) / count
                torch.autograd.backward(loss)
                total += float(loss.detach())
        norms.append(float(nn.utils.clip_grad_norm_(parameters, ADAMW.clip)))
        optimizer.step()
        losses.append(total)
    return Outcome(losses, norms, flatten(blocks))

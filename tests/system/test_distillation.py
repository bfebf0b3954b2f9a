"""Distillation on ranks: steps equal plain PyTorch with whole logits of both models, wherever the two are placed.

The teacher has another hidden size, other heads and a cap on its logits, and a plan of its own. The rows that change
ranks are counted by hand.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from terrace.cluster.cluster import Cluster
from terrace.launch.start import LocalPool, World
from terrace.model.blocks import block_specs, reading_hidden, with_loss_beside
from terrace.model.config import ModelConfig, parse_model
from terrace.model.decoder import build_blocks
from terrace.model.init import initialise
from terrace.plan.layout import Layout
from terrace.plan.plan import Plan
from terrace.plan.wire import MessageClass
from terrace.runtime.batch import Batch
from terrace.runtime.beside import ForwardBeside
from terrace.runtime.distilled import HIDDEN, Blend, Distilled, distilled
from terrace.runtime.engine import Engine
from terrace.runtime.hidden import hidden_reader
from terrace.runtime.setup import Blocks, RankSetup, Training, Workload
from tests.support.nightly import nightly
from tests.support.parity import ADAMW, exact, flatten, gathered, make_adamw, trainable
from tests.support.toy_tables import VOCAB
from tests.support.toys import SEQUENCE, cluster_of, make_batch, run_blocks

ROWS, NUM_STEPS, TOLERANCE = 8, 3, 1e-10
BLEND = Blend(weight=0.7, temperature=2.5)
STUDENT: dict[str, Any] = {"model_type": "llama", "vocab_size": VOCAB, "hidden_size": 8, "num_hidden_layers": 2}
STUDENT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 10, "tie_word_embeddings": True}
TEACHER: dict[str, Any] = {"model_type": "gemma2", "vocab_size": VOCAB, "hidden_size": 12, "num_hidden_layers": 3}
TEACHER |= {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 16, "head_dim": 6}
TEACHER |= {"sliding_window": 3, "final_logit_softcapping": 1.5}


@dataclass(frozen=True)
class Place:
    """Plans of both models, and how many rows change ranks over each tier in a step, over all ranks."""

    student: Plan
    teacher: Plan
    moved: dict[str, int]
    is_mixed: bool = False


SQUARE = cluster_of(2, 2)
PIPELINE, TENSOR = {"node": {"pipeline": 2}}, {"package": {"tensor": 2}}
PLACES = {
    "both zero3": Place(exact("zero3", SQUARE), exact("zero3", SQUARE), {}),
    "other micro-batches": Place(
        exact("zero3", SQUARE), exact("ddp", SQUARE, micro_batch=2), {"package": 2, "node": 4}
    ),
    # Rank 2 reads rows 0, 2, 4, 6 and holds 2 and 6; 0 and 4 are on rank 0, on the other node. Rank 3 likewise.
    "a student in a pipeline": Place(
        exact("zero3", SQUARE, mapping=PIPELINE, schedule="1f1b"), exact("zero3", SQUARE), {"node": 4}
    ),
    # Each rank reads 4 rows and holds 2, of which ranks 1 and 2 read none: they also ask the other of their package.
    "a student in tensor rows": Place(
        exact("zero3", SQUARE, mapping=TENSOR), exact("zero3", SQUARE), {"package": 4, "node": 8}
    ),
    "both in tensor rows": Place(
        exact("zero3", SQUARE, mapping=TENSOR), exact("ddp", SQUARE, mapping=TENSOR, micro_batch=2), {"node": 8}
    ),
    "both in pipelines": Place(
        exact("zero3", SQUARE, mapping=PIPELINE, schedule="1f1b"),
        exact("ddp", SQUARE, mapping=PIPELINE, schedule="1f1b"),
        {},
    ),
    # Pairs of rows mixed in both models, whose micro-batches have one pair or two.
    "mixed, both zero3": Place(
        exact("zero3", SQUARE, micro_batch=2), exact("zero3", SQUARE, micro_batch=2), {}, is_mixed=True
    ),
    # Rank 2 reads rows 0 to 3, which ranks 0 and 1 hold, and rank 3 reads 4 to 7, of which rank 2 holds two.
    "mixed, a student in a pipeline": Place(
        exact("zero3", SQUARE, mapping=PIPELINE, schedule="1f1b", micro_batch=4),
        exact("zero3", SQUARE, micro_batch=2),
        {"package": 2, "node": 4},
        is_mixed=True,
    ),
    "mixed, both in tensor rows": Place(
        exact("zero3", SQUARE, mapping=TENSOR, micro_batch=2),
        exact("zero3", SQUARE, mapping=TENSOR, micro_batch=2),
        {},
        is_mixed=True,
    ),
}
# What they show is shown by the others as well: "mixed, both zero3" by its sibling in a pipeline.
SELDOM: tuple[str, ...] = (
    "both zero3",
    "other micro-batches",
    "both in tensor rows",
    "both in pipelines",
    "mixed, both zero3",
)
SELDOM += ("a student in a pipeline", "mixed, both in tensor rows")


def config_of(table: dict[str, Any]) -> ModelConfig:
    return replace(parse_model(table), init_std=0.3)


def blocks_of(table: dict[str, Any], seed: int) -> list[nn.Module]:
    blocks = build_blocks(config_of(table), dtype=torch.float64)
    initialise(blocks, config_of(table), seed=seed, dtype=torch.float64)
    return blocks


def shares_of(step: int) -> Tensor:
    """The share that each row has of itself: one for the pair."""
    return torch.rand(ROWS // 2, generator=torch.Generator().manual_seed(step)).double().repeat_interleave(2)


def rows_of(engine: Engine, step: int, is_mixed: bool) -> list[Batch]:
    """The micro-batches of a rank."""
    inputs, labels = make_batch(step, ROWS)
    layout, size = engine.program.layout, engine.program.plan.micro_batch
    places = [micro * layout.data_degree + layout.data_rank(engine.rank) for micro in range(engine.program.num_micros)]
    parts = [slice(size * at, size * (at + 1)) for at in places]
    return [Batch(inputs[part], labels[part], mix=shares_of(step)[part] if is_mixed else None) for part in parts]


def engines(
    world: World, cluster: Cluster, place: Place, blocks: Sequence[nn.Module]
) -> tuple[Engine, ForwardBeside, Distilled]:
    """The student over these blocks, the teacher beside it, and the student's objective."""

    def workload(plan: Plan) -> Workload:
        degree = Layout.of(cluster, plan).data_degree
        return Workload(cluster=cluster, plan=plan, num_micros=ROWS // (degree * plan.micro_batch), sequence=SEQUENCE)

    num_labels = 2 if place.is_mixed else 1
    objective = distilled(BLEND, num_labels)
    specs, of_teacher = block_specs(config_of(STUDENT)), block_specs(config_of(TEACHER))
    student = Engine(
        Blocks(
            blocks,
            names=[spec.name for spec in specs],
            declared=with_loss_beside(specs, config_of(TEACHER), num_labels),
        ),
        workload(place.student),
        objective,
        Training(optimizer=ADAMW),
        RankSetup(rank=world.rank),
    )
    teacher = Engine(
        Blocks(
            blocks_of(TEACHER, 1),
            names=[spec.name for spec in of_teacher],
            declared=reading_hidden(of_teacher),
            freeze=["*"],
        ),
        workload(place.teacher),
        hidden_reader(),
        setup=RankSetup(rank=world.rank),
    )
    return student, ForwardBeside(teacher, student.program, timedelta(seconds=60)), objective


Found = tuple[list[float], list[float], Tensor, dict[str, int], list[float]]


def on_rank(world: World, cluster: Cluster, place: Place) -> Found:
    """Losses, norms, parameters, bytes of hidden states of a step on this rank by tier, and losses of evaluations."""
    blocks = blocks_of(STUDENT, 0)
    student, beside, objective = engines(world, cluster, place, blocks)
    losses, norms, evaluated = [], [], []
    for step in range(NUM_STEPS):
        evaluated.append(student.evaluate(rows_of(student, step, is_mixed=False)).loss)
        own = rows_of(student, step, place.is_mixed)
        hidden, matrix = beside.run(rows_of(beside.engine, step, place.is_mixed))
        objective.matrix.take(matrix)
        if hidden:
            own = [replace(each, columns={HIDDEN: more}) for each, more in zip(own, hidden, strict=True)]
        result = student.step(own, ADAMW.lr)
        losses.append(result.loss)
        norms.append(result.grad_norm)
    student.check_bytes()
    report = beside.report()
    sent = {tier: size for (message, tier), size in report.sent_bytes.items() if message is MessageClass.HIDDEN}
    assert sent == beside.declared(SEQUENCE * TEACHER["hidden_size"] * 8)
    beside.close()
    parameters = gathered(student, blocks)
    student.close()
    return losses, norms, parameters, sent, evaluated


@cache
def directly(is_mixed: bool) -> tuple[list[float], list[float], Tensor, list[float]]:
    """The same steps in one process, from whole logits."""
    if is_mixed:
        return directly_mixed()
    student, teacher = blocks_of(STUDENT, 0), blocks_of(TEACHER, 1)
    adamw, losses, norms, evaluated, t = make_adamw(trainable(student)), [], [], [], BLEND.temperature
    for step in range(NUM_STEPS):
        tokens, labels = make_batch(step, ROWS)
        counted = labels != -100
        logits = run_blocks(student, tokens)[counted]
        with torch.no_grad():
            chances = torch.softmax(run_blocks(teacher, tokens)[counted] / t, -1)
        hard = F.cross_entropy(logits, labels[counted])
        soft = F.kl_div(torch.log_softmax(logits / t, -1), chances, reduction="batchmean")
        loss = (1 - BLEND.weight) * hard + BLEND.weight * t**2 * soft
        adamw.zero_grad()
        torch.autograd.backward(loss)
        norms.append(float(nn.utils.clip_grad_norm_(trainable(student), ADAMW.clip)))
        adamw.step()
        losses.append(loss.item())
        evaluated.append(hard.item())
    return losses, norms, flatten(student), evaluated


def of_mixed(blocks: list[nn.Module], pair: Tensor, share: Tensor) -> Tensor:
    """Logits (S, V) of the embeddings of two rows (2, S), the first with this share."""
    own, other = blocks[0](pair)
    return run_blocks(blocks[1:], (share * own + (1 - share) * other).unsqueeze(0))[0]


def directly_mixed() -> tuple[list[float], list[float], Tensor, list[float]]:
    """Rows are mixed where they are embedded, and a row has the losses of both labels of a token."""
    student, teacher, t = blocks_of(STUDENT, 0), blocks_of(TEACHER, 1), BLEND.temperature
    adamw, losses, norms, evaluated = make_adamw(trainable(student)), [], [], []
    for step in range(NUM_STEPS):
        tokens, labels = make_batch(step, ROWS)
        num, shares = (labels != -100).sum(), shares_of(step)
        hard = F.cross_entropy(run_blocks(student, tokens).transpose(1, 2), labels, reduction="sum") / num
        evaluated.append(hard.item())
        loss = torch.zeros(()).double()
        for row in range(ROWS):
            other, share = row + 1 - 2 * (row % 2), shares[row]

            pair = tokens[[row, other]]
            logits = of_mixed(student, pair, share)
            with torch.no_grad():
                log_p = torch.log_softmax(of_mixed(teacher, pair, share) / t, -1)
            soft = (log_p.exp() * (log_p - torch.log_softmax(logits / t, -1))).sum(-1)  # (S)
            for at, weight in ((row, share), (other, 1 - share)):
                counted = labels[at] != -100
                own = F.cross_entropy(logits[counted], labels[at][counted], reduction="sum")
                both = (1 - BLEND.weight) * own + BLEND.weight * t**2 * soft[counted].sum()
                loss = loss + weight * both / num
        adamw.zero_grad()
        torch.autograd.backward(loss)
        norms.append(float(nn.utils.clip_grad_norm_(trainable(student), ADAMW.clip)))
        adamw.step()
        losses.append(loss.item())
    return losses, norms, flatten(student), evaluated


@pytest.mark.parametrize("name", [*(name for name in PLACES if name not in SELDOM), *nightly(*SELDOM)])
def test_a_step_equals_plain_torch_with_whole_logits(pool: LocalPool, name: str) -> None:
    place = PLACES[name]
    wanted = directly(place.is_mixed)
    outcomes = pool.run(4, on_rank, SQUARE, place, timeout_s=120.0)
    moved: dict[str, int] = {}
    for losses, norms, parameters, sent, evaluated in outcomes:
        assert losses == pytest.approx(wanted[0], rel=TOLERANCE)
        assert norms == pytest.approx(wanted[1], rel=TOLERANCE)
        assert evaluated == pytest.approx(wanted[3], rel=TOLERANCE)
        torch.testing.assert_close(parameters, wanted[2], rtol=0, atol=TOLERANCE)
        moved = {tier: moved.get(tier, 0) + sent.get(tier, 0) for tier in {*moved, *sent}}
    row_bytes = SEQUENCE * TEACHER["hidden_size"] * 8
    assert {tier: size for tier, size in moved.items() if size} == {
        tier: rows * row_bytes for tier, rows in place.moved.items() if rows
    }

"""Steps of losses of values under plans equal a loop over responses, one at a time and unpadded, in plain PyTorch."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from terrace.base.errors import ModelError
from terrace.launch.start import LocalPool, World
from terrace.model.blocks import block_specs, forward_flops, num_params
from terrace.model.config import ModelConfig
from terrace.model.decoder import ValueHead, build_blocks
from terrace.plan.plan import Plan
from terrace.rl.algorithms.aggregation import Aggregation
from terrace.rl.algorithms.batches import WEIGHTS, at_valid_tokens, batch_of, values_objective_of
from terrace.rl.algorithms.losses import value_loss
from terrace.rl.values.ragged import Ragged
from terrace.rl.values.rows import Rows
from terrace.runtime.batch import Batch
from terrace.runtime.objective import TokenObjective, ValueObjective, cross_entropy
from tests.support.nightly import nightly
from tests.support.parity import (
    ADAMW,
    NUM_STEPS,
    Case,
    engine_of,
    exact,
    flatten,
    gathered,
    make_adamw,
    of_size,
    rows_of_all,
    trainable,
)
from tests.support.pipelines import OUTER, pipelined
from tests.support.toy_tables import VOCAB
from tests.support.toys import MODELS, SEQUENCE, Model, cluster_of, run_blocks

TOLERANCE = 1e-10
COLUMNS = ("before", "returns")
# Tokens of prompts and responses; one is empty.
LENGTHS = [(1, 4), (2, 0), (3, 4), (1, 6), (2, 3), (3, 1), (1, 2), (2, 5)]
CLIP = 0.3
ALONE = World(0, 1, 0, 1, None)  # type: ignore[arg-type]  # no store: nobody to meet
AGGREGATION = Aggregation("seq-mean-token-mean")


def rollout(step: int) -> Rows:
    draw = torch.Generator().manual_seed(step)

    def numbers() -> Ragged:
        return Ragged.of([torch.randn(num, generator=draw, dtype=torch.float64) for _, num in LENGTHS])

    def tokens(part: int) -> Ragged:
        return Ragged.of([torch.randint(0, VOCAB, (lengths[part],), generator=draw) for lengths in LENGTHS])

    return Rows({"prompts": tokens(0), "responses": tokens(1), "before": numbers(), "returns": numbers()})


def clipped(values: Ragged, columns: Mapping[str, Tensor]) -> Tensor:
    return value_loss(values.values, columns["before"], columns["returns"], columns[WEIGHTS], clip=CLIP)


def alone(blocks: list[nn.Module], rows: Rows) -> list[Tensor]:
    """Values of the states before the tokens of each response, from its own tokens alone, by the head's definition."""
    found, head = [], blocks[-1]
    assert isinstance(head, ValueHead)
    for prompt, response in zip(rows.ragged("prompts").rows(), rows.ragged("responses").rows(), strict=True):
        hidden = run_blocks(blocks[:-1], torch.cat([prompt, response])[None])[0]
        values = (head.norm(hidden) * head.score.weight[0]).sum(-1)
        found.append(values[len(prompt) - 1 : len(prompt) - 1 + len(response)])
    return found


@cache
def serial(model: str) -> tuple[list[float], list[float], Tensor, list[Tensor]]:
    blocks = list(MODELS[model].blocks(torch.float64))
    parameters = trainable(blocks)
    optimizer, losses, norms = make_adamw(parameters), [], []
    for step in range(NUM_STEPS):
        rows, total = rollout(step), torch.zeros((), dtype=torch.float64)
        optimizer.zero_grad()
        num = sum(size > 0 for _, size in LENGTHS)
        columns = (rows.ragged(column).rows() for column in COLUMNS)
        for values, before, returns in zip(alone(blocks, rows), *columns, strict=True):
            near = torch.minimum(torch.maximum(values, before - CLIP), before + CLIP)
            worst = torch.maximum((values - returns).square(), (near - returns).square())
            total = total + (0.5 * worst.mean() / num if len(values) else 0.0)
        torch.autograd.backward(total)
        norms.append(float(nn.utils.clip_grad_norm_(parameters, ADAMW.clip)))
        optimizer.step()
        losses.append(float(total.detach()))
    with torch.no_grad():
        return losses, norms, flatten(blocks), alone(blocks, rollout(NUM_STEPS))


def trained(
    world: World, sizes: tuple[int, ...], plan: Plan, num_micros: int, model: str
) -> tuple[list[float], list[float], Tensor, dict[int, Tensor]]:
    blocks = MODELS[model].blocks(torch.float64)
    case = Case(plan, num_micros=num_micros, model=model)
    engine = engine_of(world, cluster_of(*sizes), case, blocks, objective=values_objective_of(clipped))
    layout, size = engine.program.layout, plan.micro_batch
    places = [micro * layout.data_degree + layout.data_rank(world.rank) for micro in range(num_micros)]

    def own(step: int) -> list[Rows]:
        return [rollout(step).take(range(place * size, (place + 1) * size)) for place in places]

    results = [
        engine.step([batch_of(rows, COLUMNS, AGGREGATION, sequence=SEQUENCE) for rows in own(step)], ADAMW.lr)
        for step in range(NUM_STEPS)
    ]
    mine = own(NUM_STEPS)
    values = engine.values([batch_of(rows, (), AGGREGATION, sequence=SEQUENCE) for rows in mine])
    read = [at_valid_tokens(each, rows).rows() for each, rows in zip(values, mine, strict=False)]
    found = {place * size + row: x for place, each in zip(places, read, strict=False) for row, x in enumerate(each)}
    engine.check_bytes()
    parameters = gathered(engine, blocks)
    engine.close()
    return [result.loss for result in results], [result.grad_norm for result in results], parameters, found


TENSOR = {"package": {"tensor": 2}}
COLUMNS_OF_RANKS = {"package": {"tensor": {"columns": 2}}}
PLANS = {
    "one": ((1,), of_size(exact("ddp", cluster_of(1)), 4), 2),
    "zero3": ((2, 2), of_size(exact("zero3", cluster_of(2, 2)), 1), 2),
    "pipeline": ((2, 2), of_size(pipelined("zero2", OUTER, "zb-h1"), 1), 4),
    "tensor": ((2, 2), of_size(exact("zero3", cluster_of(2, 2), mapping=TENSOR), 2), 2),
    "whole streams": (
        (2,),
        of_size(exact("zero1", cluster_of(2), mapping=TENSOR, sequence_parallel=False), 4),
        2,
    ),
    "columns": (
        (2, 2),
        of_size(exact("zero2", cluster_of(2, 2), mapping=COLUMNS_OF_RANKS), 2),
        2,
    ),
}
VALUES = ["llama values", "gpt2 values"]
EVERYDAY = [*((plan, "llama values") for plan in ("zero3", "pipeline", "columns")), ("tensor", "gpt2 values")]
REST = [(plan, model) for plan in PLANS for model in VALUES if (plan, model) not in EVERYDAY]


@pytest.mark.parametrize(("plan", "model"), [*EVERYDAY, *nightly(*REST)])
def test_steps_equal_a_loop_over_responses(pool: LocalPool, plan: str, model: str) -> None:
    sizes, value, num_micros = PLANS[plan]
    losses, norms, parameters, values = serial(model)
    found = pool.run(math.prod(sizes), trained, sizes, value, num_micros, model, timeout_s=120.0)
    read = rows_of_all(found, losses, norms, parameters)
    for row, expected in enumerate(values):
        torch.testing.assert_close(read[row], expected, rtol=0, atol=TOLERANCE)


def config_of(model: Model) -> ModelConfig:
    assert model.config is not None
    return model.config


@pytest.mark.parametrize("model", VALUES)
def test_specs_are_the_modules(model: str) -> None:
    config = config_of(MODELS[model])
    blocks, specs = build_blocks(config), block_specs(config)
    for block, spec in zip(blocks, specs, strict=True):
        assert [(n, tuple(p.shape)) for n, p in block.named_parameters()] == [(p.name, p.shape) for p in spec.params]
    # A row in place of the vocabulary's, and nothing is tied.
    head = specs[-1]
    assert head.tied_to == ()
    logits = replace(config, scalar_head=False, tied_embeddings=False)
    assert num_params(logits) - num_params(config) == (VOCAB - 1) * config.hidden_size
    last = config.num_blocks - 1
    assert forward_flops(logits, last, 2, 3) == VOCAB * forward_flops(config, last, 2, 3)


def test_an_objective_that_does_not_fit_the_head_is_refused() -> None:
    case = Case(exact("ddp", cluster_of(1)), model="llama values")
    with pytest.raises(
        ModelError, match="a loss of values needs a ValueHead as last block, and a ValueHead such a loss"
    ):
        engine_of(ALONE, cluster_of(1), case, objective=TokenObjective(cross_entropy))
    tokens = replace(case, model="llama tied")
    with pytest.raises(
        ModelError, match="this is a Head with a ValueObjective: give a ValueObjective, or another model"
    ):
        engine_of(ALONE, cluster_of(1), tokens, objective=values_objective_of(clipped))
    engine = engine_of(ALONE, cluster_of(1), tokens, objective=TokenObjective(cross_entropy))
    with pytest.raises(ModelError, match="reads values: give it a ValueObjective"):
        engine.values([Batch(torch.zeros(1, 2).long(), torch.zeros(1, 2).long())])
    engine.close()
    assert isinstance(values_objective_of(clipped), ValueObjective)

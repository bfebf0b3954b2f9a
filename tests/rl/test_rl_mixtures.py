"""Mixtures under losses of responses equal plain PyTorch over unpadded rows, one at a time: routers see no padding, and
their losses have the divisor of the main loss.
"""

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from terrace.data.batches import Batches, Source
from terrace.data.pair_tokens import prepare_pairs
from terrace.data.tokenizer import ByteTokenizer
from terrace.launch.start import LocalPool, World
from terrace.model.balance import BalanceConfig
from terrace.model.experts.mixture import Router
from terrace.program.lowering import build
from terrace.rl.algorithms.aggregation import Aggregation
from terrace.rl.algorithms.batches import WEIGHTS, batch_of, objective_of
from terrace.rl.algorithms.losses import reinforce
from terrace.rl.values.ragged import Ragged
from terrace.rl.values.rows import Rows
from terrace.runtime.batch import Batch, shares_of
from terrace.train.micro_batches import MicroBatches
from tests.support.allocations import seeded
from tests.support.nightly import nightly
from tests.support.parity import (
    ADAMW,
    NUM_STEPS,
    TOLERANCE,
    Case,
    engine_of,
    exact,
    flatten,
    gathered,
    make_adamw,
    trainable,
)
from tests.support.toy_tables import VOCAB
from tests.support.toys import MODELS, SEQUENCE, cluster_of, run_blocks

MODEL, BALANCE = "mixture tied", BalanceConfig(sequence=0.3, step=0.2, z=0.05)
LENGTHS = [(1, 4), (2, 0), (3, 4), (1, 6)]  # tokens of prompt and response; one response is empty
AGGREGATIONS = {"tokens": Aggregation("token-mean"), "responses": Aggregation("seq-mean-token-mean")}


def rollout(step: int) -> Rows:
    draw = seeded(step)

    def tokens(part: int) -> Ragged:
        return Ragged.of([torch.randint(0, VOCAB, (lengths[part],), generator=draw) for lengths in LENGTHS])

    prompts, responses = tokens(0), tokens(1)
    advantages = torch.randn(len(responses.values), generator=draw, dtype=torch.float64)
    return Rows({"prompts": prompts, "responses": responses, "advantages": responses.with_values(advantages)})


def trained(world: World, name: str, micro_batch: int) -> tuple[list[float], list[dict[str, float]], Tensor]:
    """Losses, losses of routers and parameters on this rank, with whole rows of its own."""
    blocks, aggregation = MODELS[MODEL].blocks(torch.float64), AGGREGATIONS[name]
    num_micros = len(LENGTHS) // world.world_size // micro_batch
    plan = exact("ddp", cluster_of(world.world_size), micro_batch=micro_batch)
    objective = objective_of(lambda x, _, columns: reinforce(x.values, columns["advantages"], columns[WEIGHTS]))
    case = Case(plan, num_micros=num_micros, model=MODEL, balance=BALANCE)
    engine = engine_of(world, cluster_of(world.world_size), case, blocks, objective=objective)
    results = []
    for step in range(NUM_STEPS):
        batches = []
        for micro in range(num_micros):
            first = (micro * world.world_size + world.rank) * micro_batch
            rows = rollout(step).take(range(first, first + micro_batch))
            batches.append(batch_of(rows, ("advantages",), aggregation, sequence=SEQUENCE))
        results.append(engine.step(batches, ADAMW.lr))
    parameters = gathered(engine, blocks)
    engine.close()
    return [each.loss for each in results], [each.router_losses for each in results], parameters


def serial(name: str) -> tuple[list[float], list[dict[str, float]], Tensor]:
    """The same by the definitions, on each row alone."""
    blocks = list(MODELS[MODEL].blocks(torch.float64))
    parameters = trainable(blocks)
    optimizer, losses, of_routers = make_adamw(parameters), [], []
    before: Mapping[Router, Tensor] = {}
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        rows, divisor, counts = rollout(step), 0.0, defaultdict[Router, Tensor](lambda: torch.zeros(()).double())
        total, sums = torch.zeros(()).double(), {key: torch.zeros(()).double() for key in BALANCE.losses}
        columns = (rows.ragged(column).rows() for column in ("prompts", "responses", "advantages"))
        for prompt, response, advantages in zip(*columns, strict=True):
            if not len(response):
                continue
            text, share = torch.cat([prompt, response]), len(response) if name == "tokens" else 1.0
            logits, seen = run_row(blocks, text[None, :-1])
            chosen = [logits.log_softmax(-1)[at - 1, text[at]] for at in range(len(prompt), len(text))]
            total = total - share / len(response) * (torch.stack(chosen) * advantages).sum()
            divisor += share
            for router, (given, experts) in seen.items():
                scores = given.softmax(-1)
                choices = torch.bincount(experts.flatten(), minlength=given.shape[1]).double()
                counts[router] = counts[router] + choices
                loads = choices * given.shape[1] / experts.numel()
                sums["sequence"] = sums["sequence"] + share * (loads * scores.mean(0)).sum()
                sums["z"] = sums["z"] + share * given.logsumexp(-1).square().mean()
                if router in before:
                    loads = before[router] * given.shape[1] / before[router].sum()
                    sums["step"] = sums["step"] + share * (loads * scores.mean(0)).sum()
        means = {key: getattr(BALANCE, key) * value / divisor for key, value in sums.items()}
        torch.autograd.backward(total / divisor + torch.stack(list(means.values())).sum())
        torch.nn.utils.clip_grad_norm_(parameters, ADAMW.clip)
        optimizer.step()
        losses.append(float(total.detach()) / divisor)
        of_routers.append({key: float(value.detach()) for key, value in means.items()})
        before = counts
    return losses, of_routers, flatten(blocks)


def run_row(blocks: list[nn.Module], tokens: Tensor) -> tuple[Tensor, dict[Router, tuple[Tensor, Tensor]]]:
    """Logits of a row, and the logits and choices of its routers."""
    seen: dict[Router, tuple[Tensor, Tensor]] = {}

    def look(router: nn.Module, given: tuple[Tensor, ...], choice: object) -> None:
        assert isinstance(router, Router)
        seen[router] = given[0] @ router.weight.t(), choice.experts  # type: ignore[attr-defined]

    routers = [module for block in blocks for module in block.modules() if isinstance(module, Router)]
    hooks = [router.register_forward_hook(look) for router in routers]
    logits = run_blocks(blocks, tokens)[0]
    for hook in hooks:
        hook.remove()
    return logits, seen


@pytest.mark.parametrize(
    ("name", "num_ranks", "micro_batch"), [("responses", 2, 1), ("tokens", 1, 4), *nightly(("responses", 1, 2))]
)
def test_steps_equal_rows_alone(pool: LocalPool, name: str, num_ranks: int, micro_batch: int) -> None:
    losses, of_routers, parameters = serial(name)
    for found in pool.run(num_ranks, trained, name, micro_batch, timeout_s=120.0):
        assert found[0] == pytest.approx(losses, abs=TOLERANCE)
        assert [*map(dict, found[1])] == [pytest.approx(each, abs=TOLERANCE) for each in of_routers]
        torch.testing.assert_close(found[2], parameters, rtol=0, atol=TOLERANCE)


def test_shares_are_of_weights_and_of_tokens_that_take_part() -> None:
    labels = torch.tensor([[-100, 7, 7, -100]])
    weights = torch.tensor([[9.0, 0.25, 0.5, 9.0]])
    assert shares_of(labels, weights=weights).tolist() == [[0.75 / 4] * 4]
    assert shares_of(labels, weights=weights, places=torch.tensor([[0, 1, 2, -1]])).tolist() == [[0.25] * 4]


def test_padding_keeps_no_place_in_the_run() -> None:
    batch = batch_of(rollout(0), (), AGGREGATIONS["tokens"], sequence=SEQUENCE)
    assert batch.places is not None
    assert [int((row >= 0).sum()) for row in batch.places] == [4, 0, 6, 6]
    later = batch.with_places(10).places
    assert later is not None
    assert later[0].tolist() == [60, 61, 62, 63, -1, -1]
    # Other batches have places of all tokens of a row.
    plain = Batch(batch.inputs, batch.labels).with_places(0).places
    assert plain is not None
    assert plain[0].tolist() == [*range(SEQUENCE)]


def test_padding_of_pairs_is_not_routed(tmp_path: Path) -> None:
    texts = [("1", "one", "seven"), ("22", "a", "b"), ("3", "ab", "a"), ("4", "abcd", "a")]
    lines = (json.dumps(dict(zip(("prompt", "chosen", "rejected"), each, strict=True))) for each in texts)
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    tokens = prepare_pairs(tmp_path / "pairs.jsonl", ByteTokenizer(), "bytes", "", tmp_path / "cache")
    batches = Batches([Source(tokens=tokens, documents="pairs", name="pairs")], 16, 4, seed=0)
    program = build(cluster_of(1), exact("ddp", cluster_of(1), micro_batch=2), MODELS[MODEL].declared, 2, sequence=16)
    made = [micro for step in range(2) for micro in MicroBatches(batches, program, 0, pinned=False).step(step).micros]
    found = sorted(
        int((row >= 0).sum()) for micro in made for row in (micro.places if micro.places is not None else [])
    )
    # A prompt, a response and its end.
    assert found == sorted(len(prompt) + len(response) + 1 for prompt, *both in texts for response in both)

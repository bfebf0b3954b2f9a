"""Steps of policy losses under plans equal a loop over responses, one at a time and unpadded, in plain PyTorch."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from terrace.base.errors import DataError, ModelError, PlanError
from terrace.launch.start import LocalPool, World
from terrace.model.attention import attend
from terrace.model.attention_plans import AttentionPlans
from terrace.model.decoder import token_loss
from terrace.plan.plan import Plan
from terrace.rl.algorithms.aggregation import Aggregation
from terrace.rl.algorithms.batches import WEIGHTS, TokenLoss, at_valid_tokens, batch_of, objective_of
from terrace.rl.algorithms.losses import cispo, clipped_surrogate, gspo, kl_loss
from terrace.rl.algorithms.shared_prefixes import LONGEST_SHARED, SharedPrefixPlans, places_of, share_prefixes
from terrace.rl.values.ragged import Ragged
from terrace.rl.values.rows import Rows
from terrace.runtime.batch import Batch
from terrace.runtime.batch_checks import check_batches
from terrace.runtime.token_numbers import TokenNumbers
from terrace.sequence.token_layout import NOTHING, TokenLayout
from tests.support.allocations import seeded
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
from tests.support.toys import MODELS, SEQUENCE, cluster_of, run_blocks

MODEL, TOLERANCE = "llama tied", 1e-10
COLUMNS = ("old", "advantages")
# Tokens of prompts and responses, and which of the latter the sampler emitted. One is empty, one of observations alone,
# and two have observations between what was emitted. Neighbours with prompts of one length have the same prompt, and
# responses that begin alike: one goes on where another ends.
LENGTHS = [(1, 4), (2, 0), (2, 4), (2, 5), (3, 3), (3, 1), (1, 2), (1, 6)]
PROMPT_OF = [0, 1, 1, 1, 4, 4, 6, 6]
ALIKE = {3: 2, 5: 1, 7: 2}  # first tokens of the response before
OBSERVED = {2: (1, 2), 3: (2, 3), 6: (0, 1)}


def rollout(step: int) -> Rows:
    draw = seeded(step)
    kept = [[token not in OBSERVED.get(row, ()) for token in range(num)] for row, (_, num) in enumerate(LENGTHS)]

    def numbers(scale: float, shift: float) -> Ragged:
        drawn = (torch.randn(sum(row), generator=draw, dtype=torch.float64) for row in kept)
        return Ragged.of([scale * each + shift for each in drawn])

    def tokens(part: int) -> Ragged:
        return Ragged.of([torch.randint(0, VOCAB, (lengths[part],), generator=draw) for lengths in LENGTHS])

    emitted = Ragged.of([torch.tensor(row, dtype=torch.bool) for row in kept])
    prompts = tokens(0).take(torch.tensor(PROMPT_OF))
    responses = tokens(1).rows()
    for row, num in ALIKE.items():
        responses[row][:num] = responses[row - 1][:num]
    columns = {"prompts": prompts, "responses": Ragged.of(responses), "emitted": emitted}
    return Rows({**columns, "old": numbers(0.3, -2.4), "advantages": numbers(1.0, 0.0)})


# By name: the loss under test and its aggregation; the loss of a response and its share of the divisor, in loops.
Alone = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, float]]  # (new, old, advantages), (T) each


def clip(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    return -torch.min(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def dapo(new: Tensor, old: Tensor, advantages: Tensor) -> tuple[Tensor, float]:
    tokens = [clip((x - y).exp(), a, 0.2, 0.28) for x, y, a in zip(new, old, advantages, strict=True)]
    return torch.stack(tokens).sum(), len(tokens)


def grpo(new: Tensor, old: Tensor, advantages: Tensor) -> tuple[Tensor, float]:
    total = torch.zeros((), dtype=torch.float64)
    for x, y, a in zip(new, old, advantages, strict=True):
        total = total + clip((x - y).exp(), a, 0.2, 0.2) + 0.1 * ((y - x).exp() - (y - x) - 1)
    return total / len(new), 1


def of_gspo(new: Tensor, old: Tensor, advantages: Tensor) -> tuple[Tensor, float]:
    ratio = ((new - old).sum() / len(new)).exp()
    return sum((clip(ratio, a, 0.3, 0.4) for a in advantages), torch.zeros(())) / len(new), 1


def of_cispo(new: Tensor, old: Tensor, advantages: Tensor) -> tuple[Tensor, float]:
    total = torch.zeros((), dtype=torch.float64)
    for x, y, a in zip(new, old, advantages, strict=True):
        total = total - min(math.exp(float(x.detach() - y)), 1.2) * a * x
    return total, 7


def with_k3(x: Ragged, _: Tensor | None, columns: Mapping[str, Tensor]) -> Tensor:
    old, weights = columns["old"], columns[WEIGHTS]
    return clipped_surrogate(x.values, old, columns["advantages"], weights) + 0.1 * kl_loss(
        x.values, old, weights, "k3"
    )


LOSSES: dict[str, tuple[TokenLoss, Aggregation, Alone]] = {
    "dapo": (
        lambda x, _, c: clipped_surrogate(x.values, c["old"], c["advantages"], c[WEIGHTS], clip_high=0.28),
        Aggregation("token-mean"),
        dapo,
    ),
    "grpo": (with_k3, Aggregation("seq-mean-token-mean"), grpo),
    "gspo": (
        lambda x, _, c: gspo(x.values, c["old"], c["advantages"], c[WEIGHTS], x.offsets, clip_low=0.3, clip_high=0.4),
        Aggregation("seq-mean-token-mean"),
        of_gspo,
    ),
    "cispo": (
        lambda x, _, c: cispo(x.values, c["old"], c["advantages"], c[WEIGHTS], clip_low=1, clip_high=0.2),
        Aggregation("seq-mean-token-sum-norm", 7),
        of_cispo,
    ),
}


def alone(blocks: list[torch.nn.Module], rows: Rows) -> list[Tensor]:
    """Log-probabilities of the emitted tokens of each response, computed from its own tokens alone."""
    found = []
    columns = (rows.ragged(name).rows() for name in ("prompts", "responses", "emitted"))
    for prompt, response, emitted in zip(*columns, strict=True):
        text = torch.cat([prompt, response])
        logs = run_blocks(blocks, text[None, :-1]).log_softmax(-1)[0] if len(text) > 1 else None
        chosen = [] if logs is None else [logs[at - 1, text[at]] for at in range(len(prompt), len(text))]
        kept = [x for x, keep in zip(chosen, emitted.tolist(), strict=True) if keep]
        found.append(torch.stack(kept) if kept else torch.zeros(0, dtype=torch.float64))
    return found


@cache
def serial(name: str) -> tuple[list[float], list[float], Tensor, list[Tensor]]:
    """Losses, norms, parameters, and log-probabilities after the last step."""
    blocks = list(MODELS[MODEL].blocks(torch.float64))
    parameters = trainable(blocks)
    optimizer, losses, norms = make_adamw(parameters), [], []
    for step in range(NUM_STEPS):
        rows = rollout(step)
        optimizer.zero_grad()
        columns = (rows.ragged(column).rows() for column in COLUMNS)
        each = [LOSSES[name][2](*row) for row in zip(alone(blocks, rows), *columns, strict=True) if len(row[0])]
        loss = sum((total for total, _ in each), torch.zeros(())) / sum(share for _, share in each)
        torch.autograd.backward(loss)
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, ADAMW.clip)))
        optimizer.step()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        return losses, norms, flatten(blocks), alone(blocks, rollout(NUM_STEPS))


def trained(
    world: World, sizes: tuple[int, ...], plan: Plan, num_micros: int, name: str, is_joined: bool
) -> tuple[list[float], list[float], Tensor, dict[int, Tensor]]:
    """The same on this rank of a plan; log-probabilities by row of the global batch."""
    blocks = MODELS[MODEL].blocks(torch.float64)
    if is_joined:
        share_prefixes(blocks)
    loss, aggregation, _ = LOSSES[name]
    case = Case(plan, num_micros=num_micros, model=MODEL)
    engine = engine_of(world, cluster_of(*sizes), case, blocks, objective=objective_of(loss))
    layout, size = engine.program.layout, plan.micro_batch
    places = [micro * layout.data_degree + layout.data_rank(world.rank) for micro in range(num_micros)]

    def own(step: int) -> list[Rows]:
        return [rollout(step).take(range(place * size, (place + 1) * size)) for place in places]

    def batches(parts: list[Rows], columns: tuple[str, ...]) -> list[Batch]:
        return [batch_of(rows, columns, aggregation, sequence=SEQUENCE, is_joined=is_joined) for rows in parts]

    results = [engine.step(batches(own(step), COLUMNS), ADAMW.lr) for step in range(NUM_STEPS)]
    mine = own(NUM_STEPS)
    scores = engine.score(batches(mine, ()))
    read = [at_valid_tokens(each.log_probs, rows, is_joined).rows() for each, rows in zip(scores, mine, strict=False)]
    found = {place * size + row: x for place, each in zip(places, read, strict=False) for row, x in enumerate(each)}
    parameters = gathered(engine, blocks)
    engine.close()
    return [result.loss for result in results], [result.grad_norm for result in results], parameters, found


PLANS = {
    "one": ((1,), of_size(exact("ddp", cluster_of(1)), 4), 2),
    "one, joined": ((1,), of_size(exact("ddp", cluster_of(1)), 4), 2),
    "zero3, joined": ((2,), of_size(exact("zero3", cluster_of(2)), 4), 1),
    "zero3": ((2, 2), of_size(exact("zero3", cluster_of(2, 2)), 1), 2),
    "pipeline": ((2, 2), of_size(pipelined("zero2", OUTER, "zb-h1"), 1), 4),
    "tensor": ((2, 2), of_size(exact("zero3", cluster_of(2, 2), mapping={"package": {"tensor": 2}}), 2), 2),
}
EVERYDAY = [
    ("one", "dapo"),
    ("one, joined", "gspo"),
    ("zero3, joined", "dapo"),
    ("zero3", "gspo"),
    ("pipeline", "grpo"),
    ("tensor", "cispo"),
]
REST = [(plan, name) for plan in PLANS for name in LOSSES if (plan, name) not in EVERYDAY]


@pytest.mark.parametrize(("plan", "name"), [*EVERYDAY, *nightly(*REST)])
def test_steps_equal_a_loop_over_responses(pool: LocalPool, plan: str, name: str) -> None:
    sizes, value, num_micros = PLANS[plan]
    losses, norms, parameters, logprobs = serial(name)
    found = pool.run(math.prod(sizes), trained, sizes, value, num_micros, name, "joined" in plan, timeout_s=120.0)
    scored = rows_of_all(found, losses, norms, parameters)
    for row, expected in enumerate(logprobs):
        torch.testing.assert_close(scored[row], expected, rtol=0, atol=TOLERANCE)


def test_a_batch_by_hand() -> None:
    rows = Rows({
        "prompts": Ragged.of([torch.tensor([5, 6]), torch.tensor([7])]),
        "responses": Ragged.of([torch.tensor([1, 2, 3]), torch.tensor([4])]),
        "emitted": Ragged.of([torch.tensor([True, False, True]), torch.tensor([True])]),
        "old": Ragged.of([torch.tensor([0.1, 0.3]), torch.tensor([0.4])]),
    })  # fmt: skip
    batch = batch_of(rows, ("old",), Aggregation("seq-mean-token-mean"), sequence=5)
    assert batch.inputs.tolist() == [[5, 6, 1, 2, 0], [7, 0, 0, 0, 0]]
    assert batch.labels.tolist() == [[-100, 1, -100, 3, -100], [4, -100, -100, -100, -100]]
    assert batch.columns["old"].tolist() == torch.tensor([[0, 0.1, 0, 0.3, 0], [0.4, 0, 0, 0, 0]]).tolist()
    assert batch.columns[WEIGHTS].tolist() == [[0, 0.5, 0, 0.5, 0], [1, 0, 0, 0, 0]]
    assert batch.weights is not None
    assert batch.weights.tolist() == batch.columns[WEIGHTS].tolist()


def test_parts_of_rows_are_refused() -> None:
    part = TokenLayout(member=0, tokens=((0, 2),), num_local_tokens=2, num_attention_tokens=2, into=NOTHING, rounds=())
    labels, numbers = torch.zeros(1, 2).long(), TokenNumbers(torch.zeros(1, 2), None)
    with pytest.raises(PlanError, match="losses of responses need whole rows"):
        objective_of(with_k3).loss(numbers, Batch(labels, labels, token_layout=part))


def test_rows_that_make_no_batch_are_refused() -> None:
    def rows(prompt: list[int], response: list[int], num_old: int) -> Rows:
        texts = {"prompts": torch.tensor(prompt).long(), "responses": torch.tensor(response).long()}
        columns = {**texts, "old": torch.zeros(num_old)}
        return Rows({name: Ragged.of([x]) for name, x in columns.items()})

    aggregation = Aggregation("token-mean")
    with pytest.raises(DataError, match="row 0 has no prompt: prompts of 1 token or more, and with their response at"):
        batch_of(rows([], [1], 1), ("old",), aggregation, sequence=4)
    with pytest.raises(DataError, match=r"row 0 is too long: .* at most 5; it has 3 and 3"):
        batch_of(rows([1, 2, 3], [1, 2, 3], 3), ("old",), aggregation, sequence=4)
    with pytest.raises(DataError, match=r"old of shape \(1,\) beside responses of shape \(2,\)"):
        batch_of(rows([1], [1, 2], 1), ("old",), aggregation, sequence=4)


def test_joined_rows_by_hand() -> None:
    prompts = [5, 6], [5, 6], [5, 6], [7], [5, 6]
    responses: list[list[int]] = [[1, 2], [3], [], [4], [1, 2]]
    rows = Rows({
        "prompts": Ragged.of([torch.tensor(each) for each in prompts]),
        "responses": Ragged.of([torch.tensor(each, dtype=torch.int64) for each in responses]),
        "old": Ragged.of([torch.tensor(each) for each in ([0.1, 0.2], [0.3], [], [0.4], [0.5, 0.6])]),
    })  # fmt: skip
    batch = batch_of(rows, ("old",), Aggregation("token-mean"), sequence=9, is_joined=True)
    assert batch.inputs.tolist() == [[5, 6, 1, 7]]
    assert batch.positions is not None
    assert batch.positions.tolist() == [[0, 1, 2, 0]]
    assert batch.labels.tolist() == [[1, 2, 3, 4, 1, 2]]
    assert batch.reads is not None
    assert batch.reads.tolist() == [[1, 2, 1, 3, 1, 2]]
    torch.testing.assert_close(batch.columns["old"], torch.tensor([[0.1, 0.2, 0.3, 0.4, 0.5, 0.6]]))


def test_joined_rows_without_a_valid_token_have_a_label_that_does_not_count() -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    rows = Rows({"prompts": Ragged.of([torch.tensor([5])] * 2), "responses": Ragged.of([nothing] * 2)})
    batch = batch_of(rows, (), Aggregation("token-mean"), sequence=9, is_joined=True)
    assert batch.inputs.shape == (1, 1)
    assert batch.labels.tolist() == [[-100]]
    assert len(at_valid_tokens(torch.zeros(1, 1), rows, is_joined=True).values) == 0


def test_labels_that_name_their_tokens_need_a_loss_that_knows() -> None:
    tokens = torch.zeros(1, 2).long()
    batch = Batch(tokens, tokens, reads=tokens)
    with pytest.raises(ModelError, match="only losses of token numbers or values know the reads of a batch"):
        check_batches([batch], [], token_loss)
    with pytest.raises(ModelError, match=r"reads \(1, 3\) of torch.int64 must be int64, one for each of the labels"):
        check_batches([replace(batch, reads=torch.zeros(1, 3).long())], [], objective_of(with_k3))


def test_long_texts_share_nothing() -> None:
    long = list(range(LONGEST_SHARED + 1))
    assert places_of([long[:3], long[:5]]) == [[0, 1, 2], [0, 1, 2, 3, 4]]
    assert places_of([long, long]) == [long, list(range(len(long), 2 * len(long)))]


def test_shared_prefixes_attend_as_texts_of_their_own() -> None:
    """Under a window, in pieces longer than a short one, over several trees; gradients too."""
    draw = seeded(5)
    # First position and end of the tokens that a text does not share with the one before it.
    texts = [(0, 70), (66, 90), (80, 95), (66, 68), (67, 69), (0, 3), (2, 40), (38, 60), (1, 4), (0, 20), (1, 90)]
    positions = torch.cat([torch.arange(first, end) for first, end in texts])[None]
    num = positions.shape[1]
    query = torch.randn(1, 4, num, 8, generator=draw, dtype=torch.float64, requires_grad=True)
    key, value = (torch.randn(1, 2, num, 8, generator=draw, dtype=torch.float64, requires_grad=True) for _ in range(2))
    for window in (0, 7, 50):
        mixed = attend(query, key, value, SharedPrefixPlans(window).plan(positions, query))
        begin, places, expected = 0, torch.zeros(0, dtype=torch.int64), []
        for first, end in texts:
            places = torch.cat([places[:first], torch.arange(begin, begin + end - first)])
            plan = AttentionPlans(window).plan(None, query[:, :, places])
            alone = attend(query[:, :, places], key[:, :, places], value[:, :, places], plan)
            expected.append(alone[:, :, first:])
            begin += end - first
        whole = torch.cat(expected, 2)
        torch.testing.assert_close(mixed, whole, rtol=0, atol=1e-12)
        weight = torch.randn(whole.shape, generator=draw, dtype=torch.float64)
        found, wanted = (torch.autograd.grad((each * weight).sum(), (query, key, value)) for each in (mixed, whole))
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)

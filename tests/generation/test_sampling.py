"""Which tokens are drawn, and with which log-probability."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from terrace.base.errors import ConfigError, TrainingError
from terrace.generation.request import Sampling
from terrace.generation.sampling import sample, seed_of, uniform

ODDS = [0.1, 0.5, 0.25, 0.15]


def reference(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution drawn from, for logits (V), token by token in plain Python."""
    order = sorted(range(len(logits)), key=lambda token: (-float(logits[token]), token))
    if sampling.top_k:
        order = order[: sampling.top_k]
    odds = {token: float(((logits[token] - logits.max()) / sampling.temperature).exp()) for token in order}
    total, reached, kept = sum(odds.values()), 0.0, {}
    for token in order:
        if reached < sampling.top_p and odds[token] >= sampling.min_p * odds[order[0]]:
            kept[token] = odds[token]
        reached += odds[token] / total
    return torch.tensor([kept.get(token, 0.0) / sum(kept.values()) for token in range(len(logits))]).double()


SAMPLINGS = [
    Sampling(temperature=1.0, top_k=0),
    Sampling(temperature=2.0, top_k=0),
    Sampling(temperature=0.3, top_k=4),
    Sampling(temperature=1.0, top_k=0, top_p=0.6),
    Sampling(temperature=1.0, top_k=5, top_p=0.6, min_p=0.3),
    Sampling(temperature=1.0, top_k=0, min_p=0.2),
    Sampling(temperature=1.0, top_k=0, top_p=1e-9),
    Sampling(temperature=1e-4, top_k=0),
]


def test_the_share_of_a_token_is_its_probability_exactly() -> None:
    """Even numbers over [0, 1) find every token as often as its probability says; all ways of drawing side by side."""
    logits = torch.randn(len(SAMPLINGS), 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    num, ways = 2000, len(SAMPLINGS)
    shares, wanted = torch.zeros_like(logits), torch.stack(list(map(reference, logits, SAMPLINGS)))
    numbers = [(step + 0.5) / num for step in range(num) for _ in range(ways)]
    tokens, logprobs = sample(logits.repeat(num, 1), SAMPLINGS * num, numbers)
    for index, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
        shares[index % ways, token] += 1 / num
        assert logprob == pytest.approx(float(wanted[index % ways, token].log()), abs=1e-6)
    torch.testing.assert_close(shares, wanted, atol=1.01 / num, rtol=0)


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.full((2, 6), -torch.inf)
    logits[:, 2], logits[:, 4] = 0.0, -1.0
    for number in (0.0, 1 - 2.0**-53):
        tokens, _ = sample(logits, [SAMPLINGS[0]] * 2, [number] * 2)
        assert tokens == [2 if not number else 4] * 2


def test_temperature_zero_takes_the_likeliest_with_certainty() -> None:
    tokens, logprobs = sample(torch.tensor([ODDS, ODDS[::-1]]).log(), [Sampling(temperature=0.0)] * 2, [0.9, 0.1])
    assert (tokens, logprobs) == ([1, 2], [0.0, 0.0])


@pytest.mark.parametrize("sampling", [SAMPLINGS[0], SAMPLINGS[2], Sampling(temperature=0.0)])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_logits_of_which_no_token_can_be_drawn_are_named(sampling: Sampling, value: float) -> None:
    logits = torch.zeros(3, 6)
    logits[1] = value
    with pytest.raises(TrainingError, match=f"the largest logit of 1 of 3 texts is {value}"):
        sample(logits, [sampling] * 3, [0.5] * 3)
    if value != -float("inf"):
        logits[1, 1:] = 0.0
        with pytest.raises(TrainingError, match="1 of 3 texts"):
            sample(logits, [sampling] * 3, [0.5] * 3)


def test_numbers_of_requests_and_positions_are_apart() -> None:
    """Even over [0, 1), and no number predicts its neighbour's, in seed or in position."""
    rows = [[uniform(seed, position) for position in range(200)] for seed in range(200)]
    assert len({number for row in rows for number in row if 0 <= number < 1}) == 200 * 200
    table = torch.tensor(rows, dtype=torch.float64)
    counts = torch.histc(table, 20, 0, 1)
    assert (counts - 2000).abs().max() < 5 * 2000**0.5
    for one, other in ((table[1:], table[:-1]), (table[:, 1:], table[:, :-1]), (table[1:, :-1], table[:-1, 1:])):
        assert abs(float(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1])) < 0.03
    assert uniform(2**63 + 5, 3) != uniform(5, 3)
    assert len({uniform(0, 2**40 + step) for step in range(3)}) == 3
    assert all(before != after for before, after in pairwise(table[0].tolist()))


def test_responses_of_one_run_are_not_those_of_the_next() -> None:
    seeds = {seed_of(run, request) for run in range(100) for request in range(100)}
    assert len({uniform(seed, 0) for seed in seeds}) == 100 * 100
    assert seed_of(1, 2) != seed_of(2, 1)


def test_values_out_of_range_are_refused() -> None:
    for options, said in (
        ({"top_p": 0.0}, "top_p = 0.0"),
        ({"top_k": -1}, "top_k = -1"),
        ({"seed": -1}, "seed"),
        ({"min_p": 1.5}, "min_p = 1.5"),
        ({"temperature": float("nan")}, "temperature = nan"),
        ({"temperature": 1e-7}, "temperature = 1e-07 must be 0"),
    ):
        with pytest.raises(ConfigError, match=said):
            Sampling(**options)


@pytest.mark.parametrize("top_k", [0, 40, 3])
def test_the_smallest_top_p_keeps_the_likeliest(top_k: int) -> None:
    """A probability that fp32 rounds to 0 is still above 0."""
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        sampling = Sampling(top_p=1e-300, top_k=top_k)
        tokens, logprobs = sample(logits.to(dtype), [sampling] * 5, [0.0, 0.3, 0.5, 0.7, 0.999])
        assert tokens == logits.to(dtype).argmax(1).tolist()
        assert logprobs == [0.0] * 5


@pytest.mark.parametrize(
    ("given", "idle"),
    [
        ({"temperature": 0.0, "top_p": 0.5}, "top_p = 0.5 has no effect: temperature = 0 "),
        ({"temperature": 0.0, "top_k": 40}, "top_k = 40 has no effect: temperature = 0 "),
        ({"temperature": 0.0, "seed": 3}, "seed = 3 has no effect: temperature = 0 "),
        ({"top_k": 1, "min_p": 0.1}, "min_p = 0.1 has no effect: top_k = 1 "),
        ({"top_k": 1, "temperature": 0.7}, "temperature = 0.7 has no effect: top_k = 1 "),
        ({"temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": 0}, ""),
        ({"temperature": 0.7, "top_k": 40, "top_p": 0.5, "min_p": 0.1, "seed": 1}, ""),
    ],
)
def test_fields_that_change_nothing_are_named(given: dict[str, float], idle: str) -> None:
    found = Sampling(**given).without_effect(given)  # type: ignore[arg-type]  # numbers of both kinds
    assert found.startswith(idle)
    assert bool(found) == bool(idle)

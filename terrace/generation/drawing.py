"""Draws tokens of many requests at once, each by a random number of its own.

A token is drawn by the number u in [0, 1) that belongs to its request and its position: the token at which the sum of
kept probabilities passes u. So it depends on the logits and on nothing else, and no generator has a state that would
have to be kept, whatever runs beside it and however often the request was read again.

Shape legend: B requests that draw, V vocabulary.
"""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from terrace.base.errors import TrainingError
from terrace.generation.request import Sampling

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) of a position: output `position` of SplitMix64, begun by the scrambled seed.

    Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014, figure 14.
    """
    return (_scrambled(_scrambled(seed + _GOLDEN) + (position + 1) * _GOLDEN) >> 11) * 2.0**-53


def seed_of(run_seed: int, seed: int) -> int:
    """The seed of a request from that of its run and its own: neighbours in both have nothing in common."""
    # The sum of both would give a request of one run the numbers of its neighbour in the next run.
    return _scrambled(run_seed) + seed


def draw(logits: Tensor, samplings: Sequence[Sampling], uniforms: Sequence[float]) -> tuple[list[int], list[float]]:
    """A token for each row of logits (B, V), and its log-probability under the distribution drawn from.

    A logit may be -inf, of a token that is never drawn. Raises `TrainingError` for rows with nan or inf, or of -inf
    alone.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    largest = logits.amax(1)  # nan where any is
    if not bool(largest.isfinite().all()):
        wrong = largest[~largest.isfinite()].tolist()
        raise TrainingError(
            f"the largest logit of {len(wrong)} of {len(samplings)} texts is {wrong[0]}, so no token can be drawn: the "
            "weights have diverged or are damaged, or their dtype overflows"
        )
    tokens, logprobs = [0] * len(samplings), [0.0] * len(samplings)

    def how(row: int) -> tuple[float, int, float, float]:
        sampling = samplings[row]
        return sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p

    for _, group in groupby(sorted(range(len(samplings)), key=how), how):
        rows = list(group)
        part = logits if len(rows) == len(samplings) else logits[rows]
        found = _draw(part, samplings[rows[0]], torch.tensor([uniforms[row] for row in rows], dtype=torch.float64))
        for row, token, logprob in zip(rows, found[0].tolist(), found[1].tolist(), strict=True):
            tokens[row], logprobs[row] = token, logprob
    return tokens, logprobs


def _draw(logits: Tensor, sampling: Sampling, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens and log-probabilities (B) for logits (B, V), drawn in one way by `uniforms` (B)."""
    if sampling.temperature <= 0:
        tokens = logits.argmax(1)
        return tokens, torch.zeros(len(tokens))
    values, tokens_of = logits, None
    if sampling.top_k > 0:
        values, tokens_of = logits.topk(min(sampling.top_k, logits.shape[1]))
    elif sampling.top_p < 1:
        # Equal logits keep the order of their tokens.
        values, tokens_of = logits.sort(descending=True, stable=True)
    # Subtracting the maximum keeps small temperatures from overflowing.
    logprobs = ((values - values.amax(1, keepdim=True)) / sampling.temperature).log_softmax(1)
    kept = torch.ones((), dtype=torch.bool, device=logits.device)
    if sampling.top_p < 1:
        odds = logprobs.exp()
        kept = kept & (odds.cumsum(1) - odds < sampling.top_p)
        kept[:, 0] = True  # the likeliest, also where `top_p` is 0 in this dtype
    if sampling.min_p > 0:
        kept = kept & (logprobs.exp() >= sampling.min_p * logprobs.amax(1, keepdim=True).exp())
    if kept.dim():
        logprobs = logprobs.masked_fill(~kept, -torch.inf).log_softmax(1)
    sums = logprobs.double().exp().cumsum(1)
    # Below the last sum, so that the place is one whose probability is above 0.
    wanted = (uniforms.to(sums.device)[:, None] * sums[:, -1:]).minimum(
        torch.nextafter(sums[:, -1:], sums.new_zeros(()))
    )
    places = torch.searchsorted(sums, wanted, right=True)
    tokens = places if tokens_of is None else tokens_of.gather(1, places)
    return tokens[:, 0], logprobs.gather(1, places)[:, 0]


def _scrambled(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)

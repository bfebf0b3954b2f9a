"""Samples tokens for a batch of requests with counter-based random numbers.

Each (request, position) has a fixed random number u in [0, 1); the sampled token is the one at which the cumulative
probability of the kept tokens passes u. Sampling is therefore stateless: it gives the same token whatever else is in
the batch, and however often the request was preempted and recomputed.

Shape legend: B requests sampled in this step, V vocabulary.
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
    """Random number in [0, 1) for a position: output `position` of SplitMix64 with the scrambled `seed`.

    Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014, figure 14.
    """
    return (_scrambled(_scrambled(seed + _GOLDEN) + (position + 1) * _GOLDEN) >> 11) * 2.0**-53


def seed_of(run_seed: int, seed: int) -> int:
    """Combine the seeds of a run and of a request, such that adjacent seeds give independent numbers."""
    # With a plain sum, (run 1, request 2) and (run 2, request 1) would get the same numbers.
    return _scrambled(run_seed) + seed


def sample(logits: Tensor, samplings: Sequence[Sampling], uniforms: Sequence[float]) -> tuple[list[int], list[float]]:
    """Sample one token per row of logits (B, V). Returns tokens and their log-probabilities after temperature and cuts.

    A logit of -inf excludes a token. Raises `TrainingError` for a row with nan or inf, or with -inf only.
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
        found = _sample(part, samplings[rows[0]], torch.tensor([uniforms[row] for row in rows], dtype=torch.float64))
        for row, token, logprob in zip(rows, found[0].tolist(), found[1].tolist(), strict=True):
            tokens[row], logprobs[row] = token, logprob
    return tokens, logprobs


def _sample(logits: Tensor, sampling: Sampling, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Sample rows that share one `sampling`: tokens and log-probabilities (B) from logits (B, V) and uniforms (B)."""
    if sampling.temperature <= 0:
        tokens = logits.argmax(1)
        return tokens, torch.zeros(len(tokens))
    values, tokens_of = logits, None
    if sampling.top_k > 0:
        values, tokens_of = logits.topk(min(sampling.top_k, logits.shape[1]))
    elif sampling.top_p < 1:
        # Stable: equal logits stay in order of token id.
        values, tokens_of = logits.sort(descending=True, stable=True)
    # Subtracting the maximum keeps small temperatures from overflowing.
    logprobs = ((values - values.amax(1, keepdim=True)) / sampling.temperature).log_softmax(1)
    kept = torch.ones((), dtype=torch.bool, device=logits.device)
    if sampling.top_p < 1:
        probabilities = logprobs.exp()
        kept = kept & (probabilities.cumsum(1) - probabilities < sampling.top_p)
        kept[:, 0] = True  # the likeliest, also where `top_p` is 0 in this dtype
    if sampling.min_p > 0:
        kept = kept & (logprobs.exp() >= sampling.min_p * logprobs.amax(1, keepdim=True).exp())
    if kept.dim():
        logprobs = logprobs.masked_fill(~kept, -torch.inf).log_softmax(1)
    sums = logprobs.double().exp().cumsum(1)
    # Strictly below the total, so that the index found has a probability above 0.
    wanted = (uniforms.to(sums.device)[:, None] * sums[:, -1:]).minimum(
        torch.nextafter(sums[:, -1:], sums.new_zeros(()))
    )
    indices = torch.searchsorted(sums, wanted, right=True)
    tokens = indices if tokens_of is None else tokens_of.gather(1, indices)
    return tokens[:, 0], logprobs.gather(1, indices)[:, 0]


def _scrambled(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)

"""Generation on a replica: turns rows into requests, runs them until enough groups are complete, and returns rows.

A replica stops by counts and never by the clock, so that the same calls give the same responses.
"""

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal, get_args

import torch
from torch import nn

from terrace.generation.cache_shape import cache_shape
from terrace.generation.engine import GenerationEngine
from terrace.generation.mapped import mapped_tokens, platform_pages
from terrace.generation.request import Completion, Request, Sampling
from terrace.model.blocks import block_specs
from terrace.model.config import ModelConfig
from terrace.rl.values.ragged import Ragged, offsets_of
from terrace.rl.values.rows import Rows

Finish = Literal["stop", "length", "aborted"]
FINISHES: tuple[Finish, ...] = get_args(Finish)
BEGUN = ("responses", "rollout", "versions")  # columns of partial responses
READS = ("prompts", "seeds", "greedy", "groups", "must", *BEGUN)
_PAGE_TOKENS = 16  # minimum tokens of a KV cache page
_MOST_REQUESTS = 256  # concurrent requests: larger batches are no faster per token on a CPU; a guess


def drawn(
    blocks: Sequence[nn.Module],
    model: ModelConfig,
    rows: Rows,
    *,
    context: int,
    num_tokens: int,
    stops: frozenset[int],
    seed: int,
    tensor_rows: int,
    version: int,
    leave: Fraction,
) -> Rows:
    """Generate responses of at most `num_tokens` tokens to this replica's share of rows, on `tensor_rows` ranks."""
    requests = requests_of(rows, num_tokens=num_tokens, stops=stops, seed=seed)
    if not requests:
        return rows_of_completions([])
    page_tokens = page_tokens_of(model, tensor_rows, next(blocks[0].parameters()).dtype)
    # Allocate only the pages that its requests need; every rank of the replica has the same requests.
    engine = GenerationEngine(
        blocks,
        model,
        rows=tensor_rows,
        context=context,
        num_pages=min(_MOST_REQUESTS, len(requests)) * -(-context // page_tokens),
        page_tokens=page_tokens,
        version=version,
        build_pool=platform_pages,
    )
    return rows_of_completions(completed(engine, requests, rows, leave))


def page_tokens_of(model: ModelConfig, tensor_rows: int, dtype: torch.dtype) -> int:
    """Tokens of a KV cache page on each of the `tensor_rows` ranks of a replica."""
    return mapped_tokens(cache_shape(block_specs(model), tensor_rows), dtype, _PAGE_TOKENS)


def requests_of(rows: Rows, *, num_tokens: int, stops: frozenset[int], seed: int) -> list[Request]:
    """One request per row, from columns `prompts`, `seeds` (R) int64, and optionally `greedy` (R) bool and BEGUN.

    Responses are sampled at temperature 1 without top-k, or greedily where `greedy`.
    """
    num = len(rows)
    greedy = rows.tensor("greedy").tolist() if "greedy" in rows.columns else [False] * num
    begun = _begun(rows) if "responses" in rows.columns else [None] * num
    samplings = [Sampling(temperature=temperature, top_k=0, seed=seed) for temperature in (1.0, 0.0)]
    return [
        Request(
            prompt=tuple(prompt.tolist()),
            num_tokens=num_tokens,
            seed=own_seed,
            sampling=samplings[is_greedy],
            stop_tokens=stops,
            begun=so_far,
        )
        for prompt, own_seed, is_greedy, so_far in zip(
            rows.ragged("prompts").rows(), rows.tensor("seeds").tolist(), greedy, begun, strict=True
        )
    ]


def _begun(rows: Rows) -> list[Completion | None]:
    tokens, logprobs, versions = ([tuple(each.tolist()) for each in rows.ragged(name).rows()] for name in BEGUN)
    return [
        Completion(*each, finish="aborted") if each[0] else None
        for each in zip(tokens, logprobs, versions, strict=True)
    ]


def completed(engine: GenerationEngine, requests: Sequence[Request], rows: Rows, leave: Fraction) -> list[Completion]:
    """Run requests and return their completions; unfinished ones have `finish` "aborted".

    A share `leave` of the groups (column `groups`), rounded down, may stay incomplete. Rows with `must` (R, bool) are
    always finished.
    """
    groups = rows.tensor("groups").tolist() if "groups" in rows.columns else list(range(len(requests)))
    must = rows.tensor("must").tolist() if "must" in rows.columns else [False] * len(requests)
    open_rows = Counter(groups)
    may_stay, num_must = int(len(open_rows) * leave), sum(must)
    row_of = {engine.add(request): row for row, request in enumerate(requests)}
    ended: dict[int, Completion] = {}
    while num_must or len(open_rows) > may_stay:
        found = engine.step()
        for number in found:
            row = row_of[number]
            num_must -= must[row]
            open_rows[groups[row]] -= 1
            if not open_rows[groups[row]]:
                del open_rows[groups[row]]
        ended |= found
    ended |= engine.abort()
    return [ended[number] for number in row_of]


def rows_of_completions(made: Sequence[Completion]) -> Rows:
    """Columns `responses`, their log-probabilities `rollout`, weight `versions`, and `finish`."""
    offsets = offsets_of(torch.tensor([len(each.tokens) for each in made], dtype=torch.int64))

    def ragged(kind: str, dtype: torch.dtype) -> Ragged:
        return Ragged(torch.tensor([x for each in made for x in getattr(each, kind)], dtype=dtype), offsets)

    return Rows({
        "responses": ragged("tokens", torch.int64),
        "rollout": ragged("logprobs", torch.float32),
        "versions": ragged("versions", torch.int64),
        "finish": tuple(each.finish for each in made),
    })  # fmt: skip

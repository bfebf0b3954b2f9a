"""Generation on a replica: turns rows into requests, runs them until enough groups are complete, and returns rows.

With an environment a row is a request for each turn (terrace.rl.workers.environments).

A replica stops by counts and never by the clock, so that the same calls give the same responses.
"""

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Literal, get_args

import torch
from torch import nn

from terrace.comm.process_group import OrderedGroup
from terrace.generation.cache_shape import cache_shape
from terrace.generation.engine import GenerationEngine
from terrace.generation.mapped import mapped_tokens, platform_pages
from terrace.generation.request import UNRECORDED, Completion, Request, Sampling
from terrace.generation.routes import Routes, unpacked
from terrace.model.blocks import block_specs
from terrace.model.config import ModelConfig
from terrace.model.facts import route_width
from terrace.rl.values.ragged import Ragged, offsets_of
from terrace.rl.values.rows import ROUTES, Rows, emitted_of
from terrace.rl.workers.environments import NO_ENVIRONMENT, NOBODY, EnvironmentSettings, OneTurn, partner_of

# "turns": after the most turns; "fault": its environment failed.
Finish = Literal["stop", "length", "aborted", "turns", "fault"]
FINISHES: tuple[Finish, ...] = get_args(Finish)
BEGUN = ("responses", "rollout", "versions")  # columns of partial responses
FOR_ENVIRONMENTS = ("prompt_texts", "data")  # columns that only environments read
READS = ("prompts", "seeds", "greedy", "groups", "must", *BEGUN, "emitted", *FOR_ENVIRONMENTS)
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
    environment: EnvironmentSettings = NO_ENVIRONMENT,
    group: OrderedGroup | None = None,
    keeps_routes: bool = False,
) -> Rows:
    """Generate responses of at most `num_tokens` tokens to this replica's share of rows, on `tensor_rows` ranks.

    `group` has those ranks, if there are several. With `keeps_routes`, also the column `ROUTES`.
    """
    requests = requests_of(rows, num_tokens=num_tokens, stops=stops, seed=seed)
    partner = partner_of(environment, rows, stops, group)
    width = route_width(model) if keeps_routes else None
    if not requests:
        return rows_of_completions([], partner.columns([]), width)
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
        routes=Routes(blocks) if keeps_routes else UNRECORDED,
    )
    made = completed(engine, requests, rows, leave, partner)
    return rows_of_completions(made, partner.columns(made), width)


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
    tokens, logprobs, versions = ([tuple(each) for each in rows.ragged(name).lists()] for name in BEGUN)
    return [
        Completion(all_tokens, _laid_out(own, mask), _laid_out(version, mask), finish="aborted") if all_tokens else None
        for all_tokens, own, version, mask in zip(tokens, logprobs, versions, emitted_of(rows).lists(), strict=True)
    ]


def _laid_out(numbers: Sequence[Any], emitted: Sequence[bool]) -> tuple[Any, ...]:
    """Numbers of the tokens that were drawn, with zeros at the others."""
    left = iter(numbers)
    return tuple(next(left) if is_own else 0 for is_own in emitted)


def completed(
    engine: GenerationEngine, requests: Sequence[Request], rows: Rows, leave: Fraction, partner: OneTurn = NOBODY
) -> list[Completion]:
    """Run requests and return their completions; unfinished ones have `finish` "aborted".

    A share `leave` of the groups (column `groups`), rounded down, may stay incomplete. Rows with `must` (R, bool) are
    always finished. `partner` answers turns.
    """
    groups = rows.tensor("groups").tolist() if "groups" in rows.columns else list(range(len(requests)))
    must = rows.tensor("must").tolist() if "must" in rows.columns else [False] * len(requests)
    open_rows = Counter(groups)
    may_stay, num_must = int(len(open_rows) * leave), sum(must)
    row_of = {engine.add(request): row for row, request in partner.first(requests)}
    made = [request.begun or Completion((), (), (), "aborted") for request in requests]
    while num_must or len(open_rows) > may_stay:
        over = list[int]()
        for row, goes_on in partner.answers(is_idle=not row_of):
            if goes_on is None:
                over.append(row)
            else:
                row_of[engine.add(goes_on)] = row
        for number, completion in engine.step().items():
            row = row_of.pop(number)
            made[row] = completion
            if not partner.hears(row, completion):
                over.append(row)
        for row in over:
            num_must -= must[row]
            open_rows[groups[row]] -= 1
            if not open_rows[groups[row]]:
                del open_rows[groups[row]]
    for number, completion in engine.abort().items():
        made[row_of[number]] = completion
    partner.close()
    return made


def rows_of_completions(
    made: Sequence[Completion], beside: Rows | None = None, width: tuple[int, int] | None = None
) -> Rows:
    """Columns `responses`, their log-probabilities `rollout`, weight `versions`, and `finish`.

    Where `beside`, of other columns (`OneTurn.columns`), has `emitted`, the numbers are those of emitted tokens alone.
    With a `width` (`terrace.model.facts.route_width`) also `ROUTES`, the experts of every token but the last.
    """
    offsets = offsets_of(torch.tensor([len(each.tokens) for each in made], dtype=torch.int64))
    beside = beside or NOBODY.columns(made)

    def ragged(kind: str, dtype: torch.dtype) -> Ragged:
        found = Ragged(torch.tensor([x for each in made for x in getattr(each, kind)], dtype=dtype), offsets)
        return found.kept(beside.ragged("emitted")) if "emitted" in beside.columns and kind != "tokens" else found

    responses, rollout = ragged("tokens", torch.int64), ragged("logprobs", torch.float32)
    found = Rows({"responses": responses, "rollout": rollout, "versions": ragged("versions", torch.int64)}) | beside
    if width is None:
        return found
    lengths = torch.tensor([len(each.routes) for each in made], dtype=torch.int64)
    packed = unpacked([token for each in made for token in each.routes], width[1], width[0])
    return found | Rows({ROUTES: Ragged(packed, offsets_of(lengths))})

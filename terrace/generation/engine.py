"""Generation engine: continuous batching over paged keys and values.

A step packs tokens of many sequences into one row, without padding; a finished sequence is replaced in the next step.
The completion of a request depends neither on the other requests nor on preemptions, except for rounding in matrix
products of different sizes.

With tensor-parallel slices every rank has its own engine and makes the same calls. All ranks sample the same tokens,
and therefore schedule identically.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from terrace.base.errors import ConfigError
from terrace.generation.attention import PagedLayer, Passing, order
from terrace.generation.cache_shape import cache_shape, layers_of, most_positions, window_of
from terrace.generation.pages import BuildPool, GatheredPages, Span
from terrace.generation.request import UNRECORDED, Completion, Recorder, Request
from terrace.generation.sampling import sample, seed_of, uniform
from terrace.generation.scheduler import Chunk, ScheduledStep, Scheduler
from terrace.generation.sequence_group import Decode
from terrace.generation.states import StateLayer, StatePool
from terrace.model.attention_plans import AttentionPlans
from terrace.model.blocks import block_specs
from terrace.model.config import ModelConfig
from terrace.model.facts import refuse_non_causal


class GenerationEngine:
    """Generates with the `blocks` of a model, or with one tensor rank's slices of them (`rows` ranks).

    A sequence attends to at most `context` tokens; see terrace.generation.scheduler for longer ones. The key-value
    cache has `num_pages` pages of `page_tokens` tokens, or as many pages as fit in `memory_bytes`; give one of the two.
    `token_budget` is the largest number of tokens per step, `version` the version of the weights. `decode` converts
    tokens to text and is needed for stop texts. With a recorder of `routes`, completions have the experts of
    their tokens. Raises `ConfigError` for invalid sizes, `ModelError` for a model that is not causal.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        config: ModelConfig,
        *,
        rows: int = 1,
        context: int,
        num_pages: int | None = None,
        memory_bytes: int | None = None,
        page_tokens: int = 16,
        token_budget: int = 2048,
        version: int = 0,
        decode: Decode | None = None,
        build_pool: BuildPool = GatheredPages,
        routes: Recorder = UNRECORDED,
    ) -> None:
        refuse_non_causal(config)
        specs = block_specs(config)
        layers, shape = layers_of(specs), cache_shape(specs, rows)
        # Learned positions have a last one, and some kinds of RoPE change with the sequence length.
        limit = most_positions(specs)
        context = min(context, limit) if limit else context
        self._window = window_of(specs)  # widest of all layers; pages behind it are freed
        is_rolling = 0 < self._window <= context and not limit
        weight = next(blocks[0].parameters())
        num_pages = _num_pages(num_pages, memory_bytes, shape.num_bytes(max(page_tokens, 1), weight.dtype))
        self._scheduler = Scheduler(
            num_pages=num_pages,
            page_tokens=page_tokens,
            token_budget=token_budget,
            context=context,
            window=self._window if is_rolling else 0,
            has_states=any(layer.delta.heads for layer in layers),
        )
        self._blocks, self._decode, self._routes = blocks, decode, routes
        self._device = weight.device
        attending = [layer for layer in layers if layer.core.heads]
        core = attending[0].core
        self._plans = {
            window: AttentionPlans(window, is_grouped=core.heads // rows != shape.heads, cap=core.cap)
            for window in {layer.core.window for layer in attending}
        }
        self._attending: dict[str, Any] = {
            "page_tokens": page_tokens,
            "key_size": shape.heads * shape.size,
            "head_dim": shape.size,
            "device": weight.device,
            "dtype": weight.dtype,
        }
        self.version = version
        self.pool = build_pool(shape, num_pages, page_tokens, weight.device, weight.dtype)
        deltas = [layer.delta for layer in layers if layer.delta.heads]
        self.states = StatePool(deltas, rows, weight.device, weight.dtype)
        paged, linear = count(), count()
        self._caches = [
            PagedLayer(self.pool, next(paged), layer.core.window)
            if layer.core.heads
            else StateLayer(self.states, next(linear))
            for layer in layers
        ]

    def is_idle(self) -> bool:
        return self._scheduler.is_idle()

    def run(self, requests: Sequence[Request]) -> list[Completion]:
        """Run requests to their end and return the completions in the same order.

        Raises `ConfigError` if the engine is not idle, or as `add` does; nothing has run then.
        """
        if not self.is_idle():
            raise ConfigError("requests are under way: step until they end, or abort them, before another run")
        for request in requests:
            self._check(request)
        numbers = [self.add(request) for request in requests]
        ended: dict[int, Completion] = {}
        while not self.is_idle():
            ended |= self.step()
        return [ended[number] for number in numbers]

    def add(self, request: Request) -> int:
        """Queue a request. Returns its id.

        Raises `ConfigError` if the request needs more pages than the pool has, or has stop texts although the engine
        has no `decode`.
        """
        self._check(request)
        return self._scheduler.add(request)

    @torch.inference_mode()
    def step(self) -> dict[int, Completion]:
        """Run one step. Returns the completions that ended, by request id."""
        step = self._scheduler.schedule()
        if not step.chunks:
            return {}
        spans = [self._span(chunk) for chunk in step.chunks]
        ordered = order(spans)
        spans = [spans[index] for index in ordered]
        step = replace(step, chunks=tuple(step.chunks[index] for index in ordered))
        for source, target in step.copies:
            self.pool.copy(source, target)
        for source, target in step.slot_copies:
            self.states.copy(source, target)
        self._routes.begin()
        logits = self._pass(step, spans)
        tokens: list[int] = []
        logprobs: list[float] = []
        if logits is not None:
            asked = [(len(chunk.group.tokens), request) for chunk in step.sampling for request in chunk.group.requests]
            uniforms = [uniform(seed_of(request.sampling.seed, request.seed), position) for position, request in asked]
            tokens, logprobs = sample(logits, [request.sampling for _, request in asked], uniforms)
        ended = self._scheduler.advance(step, tokens, logprobs, self.version, self._decode, self._routes.take())
        for number in ended:
            self.pool.forget(number)
        return ended

    def abort(self) -> dict[int, Completion]:
        """Abort all requests. Returns partial completions by request id, to be resumed as `Request.begun`."""
        found = self._scheduler.abort()
        for number in found:
            self.pool.forget(number)
        return found

    def set_version(self, version: int) -> None:
        """Report that the blocks now have the weights of `version`. Running sequences are prefilled again."""
        self.version = version
        self._scheduler.drop_pages()

    def _check(self, request: Request) -> None:
        self._scheduler.check(request)
        if request.stop_texts and self._decode is None:
            raise ConfigError(
                f"stop_texts = {request.stop_texts}: this engine cannot decode tokens: give it decode, or stop_tokens"
            )

    def _pass(self, step: ScheduledStep, spans: Sequence[Span]) -> Tensor | None:
        """Forward pass. Returns logits (B, V), one row per request that samples a token; None if none does."""
        self.pool.prepare(spans)
        slots = [chunk.group.slot for chunk in step.chunks]
        self.states.prepare([(slot, span.first, span.end) for slot, span in zip(slots, spans, strict=True)])
        passing = {window: Passing(spans, plans=plans, **self._attending) for window, plans in self._plans.items()}
        tokens: list[int] = []
        positions: list[int] = []
        last: list[int] = []
        for chunk, span in zip(step.chunks, spans, strict=True):
            begin = chunk.group.begin
            tokens += chunk.group.tokens[begin + span.first : begin + span.end]
            positions += range(span.first, span.end)
            if chunk.samples:
                last.append(len(tokens) - 1)
        position_ids = torch.tensor([positions], device=self._device)
        x: Tensor = self._blocks[0](torch.tensor([tokens], device=self._device), position_ids)
        for block, cache in zip(self._blocks[1:-1], self._caches, strict=True):
            if isinstance(cache, PagedLayer):
                cache.passing = passing[cache.window]
            x = block(x, position_ids, cache)
        if not last:
            return None
        # Logits are the largest tensor, so compute only those that are sampled.
        logits: Tensor = self._blocks[-1](x[:, torch.tensor(last, device=self._device)])[0]
        rows = [row for row, chunk in enumerate(step.sampling) for _ in chunk.group.members]
        return logits if len(rows) == len(last) else logits[torch.tensor(rows, device=self._device)]

    def _span(self, chunk: Chunk) -> Span:
        end = chunk.first + chunk.num_tokens
        begin = max(0, chunk.first - self._window + 1) if self._window else 0
        return Span(chunk.group.number, chunk.group.pages, begin, chunk.first, end)


def _num_pages(num_pages: int | None, memory_bytes: int | None, one_bytes: int) -> int:
    if num_pages is not None and memory_bytes is None:
        return num_pages
    if memory_bytes is None or num_pages is not None:
        raise ConfigError(
            f"num_pages = {num_pages}, memory_bytes = {memory_bytes}: give the memory of keys and values as one of them"
        )
    if memory_bytes < one_bytes:
        raise ConfigError(f"memory_bytes = {memory_bytes} is less than a page of keys and values, {one_bytes} bytes")
    return memory_bytes // one_bytes

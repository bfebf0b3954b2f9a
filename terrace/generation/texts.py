"""Generation for a fixed list of prompts, with a cache large enough for all of them."""

from collections.abc import Callable, Collection, Sequence

from torch import nn

from terrace.generation.cache_shape import cache_shape, most_positions, window_of
from terrace.generation.engine import GenerationEngine
from terrace.generation.mapped import mapped_tokens, pages_words, platform_pages
from terrace.generation.request import Completion, Request, Sampling
from terrace.generation.sequence_group import Decode
from terrace.model.arranged import arrange
from terrace.model.blocks import block_specs
from terrace.model.config import ModelConfig

_PASS_TOKENS = 2048  # per step: more is no faster, and the masks of prefill chunks grow with it
_WINDOW_PAGE = 64  # tokens; with a sliding window, pages are released during generation; a guess


def continue_texts(
    blocks: Sequence[nn.Module],
    config: ModelConfig,
    prompts: Sequence[Sequence[int]],
    *,
    num_tokens: int,
    context: int,
    sampling: Sampling,
    stops: Collection[int] = (),
    stop_texts: Collection[str] = (),
    decode: Decode | None = None,
    say: Callable[[str, bool], None] = lambda words, is_fallback: None,
) -> list[Completion]:
    """Continue every prompt by up to `num_tokens` tokens. Prompt i has the request seed i.

    A completion that ends at `stops` or `stop_texts` includes the token that ended it. The layout of frozen matrices of
    the blocks is changed in place (terrace.model.arranged). `say` receives the result of `pages_words`. Raises
    `ConfigError` for an empty prompt and as `Request` does.
    """
    requests = [
        Request(
            prompt=tuple(prompt),
            num_tokens=num_tokens,
            seed=text,
            sampling=sampling,
            stop_tokens=frozenset(stops),
            stop_texts=tuple(stop_texts),
        )
        for text, prompt in enumerate(prompts)
    ]
    if not requests:
        return []
    arrange(blocks, len(requests))
    longest = max(len(request.prompt) for request in requests) + num_tokens
    budget = max(_PASS_TOKENS, len(requests))
    weight, specs = next(blocks[0].parameters()), block_specs(config)
    shape, window, limit = cache_shape(specs), window_of(specs), most_positions(specs)
    if 0 < window <= context and not limit:
        page_tokens = mapped_tokens(shape, weight.dtype, min(_WINDOW_PAGE, longest))
        pages = -(-min(longest, window + budget + page_tokens) // page_tokens)
    else:
        # One page per sequence, so that nothing is ever gathered.
        page_tokens, pages = mapped_tokens(shape, weight.dtype, min(longest, context, limit or context)), 1
    say(*pages_words(shape, page_tokens, weight.device, weight.dtype))
    engine = GenerationEngine(
        blocks,
        config,
        context=context,
        num_pages=pages * len(requests),
        page_tokens=page_tokens,
        token_budget=budget,
        decode=decode,
        build_pool=platform_pages,
    )
    return engine.run(requests)

"""Continues texts token by token, with the whole model on one device and a KV cache.

`continue_texts` reads every prompt once, then runs one token of every text at a time; a text that ends leaves the
batch. A text attends to at most `context` tokens. When they are used up and no sliding window says which may be
dropped, the last half of them is read again as if the text began there. A token therefore costs one pass of one token,
plus a longer pass now and then, however long the text.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from terrace.base.errors import ConfigError
from terrace.model.arranged import arrange
from terrace.model.cache import KVCache, begin_rows, continue_rows
from terrace.model.config import ModelConfig

_PASS_TOKENS = 2048  # of prompts read together on a CPU; elsewhere a mask over all of them would grow with its square


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn; raises `ConfigError` for values out of range.

    From the `top_k` likeliest tokens (0: all), the likeliest that together reach probability `top_p` are kept, and one
    is drawn in proportion to p^(1 / temperature). Holtzman et al. 1904.09751, section 3.1, is top-p.
    """

    temperature: float = 0.8  # 0 takes the likeliest
    top_k: int = 40
    top_p: float = 1.0
    seed: int = 0  # text i draws from a generator seeded with seed + i, whatever the other texts are

    def __post_init__(self) -> None:
        for name, least in (("temperature", 0), ("top_k", 0), ("seed", 0)):
            if not least <= getattr(self, name) < 2**63:
                raise ConfigError(f"{name} = {getattr(self, name)} must be at least {least} and below 2^63")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p = {self.top_p} must be above 0 and at most 1, which keeps all")

    def draw_all(self, logits: Tensor, generators: Sequence[torch.Generator]) -> list[int]:
        """A token for each row of logits (B, V), drawn with the row's generator."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).cpu()
        if self.temperature <= 0:
            return [int(token) for token in logits.argmax(1).tolist()]
        return [self.draw(row, generator) for row, generator in zip(logits, generators, strict=True)]

    def draw(self, logits: Tensor, generator: torch.Generator) -> int:
        """A token drawn from logits (V), in fp32 or wider on the CPU."""
        # Greedy: no random number is drawn.
        if self.temperature <= 0:
            return int(logits.argmax())
        values, indices = logits.topk(min(self.top_k, logits.numel()) if self.top_k > 0 else logits.numel())
        # Subtracting the maximum keeps small temperatures from overflowing.
        odds = ((values - values[0]) / self.temperature).softmax(-1)
        if self.top_p < 1:
            before = odds.cumsum(0) - odds
            odds = odds.masked_fill(before >= self.top_p, 0.0)  # the likeliest always stays
        return int(indices[torch.multinomial(odds, 1, generator=generator)])


def continue_texts(
    blocks: Sequence[nn.Module],
    config: ModelConfig,
    prompts: Sequence[Sequence[int]],
    *,
    num_tokens: int,
    context: int,
    sampling: Sampling,
    stops: Collection[int] = (),
) -> list[list[int]]:
    """Up to `num_tokens` further tokens of every prompt; a text ends early at a token in `stops`, which is left out.

    Only the last `context` tokens of a prompt are read. A prompt needs at least one token. Frozen matrices of the
    blocks are rearranged in memory (terrace.model.arranged).
    """
    # Learned positions end; RoPE does not.
    context = min(context, config.max_positions) if config.learned_positions else context
    made: list[list[int]] = [[] for _ in prompts]
    if num_tokens < 1 or not prompts:
        return made
    arrange(blocks, len(prompts))
    writing = _Writing(blocks, config, prompts, num_tokens, context)
    # One generator a text, so that a continuation does not depend on the other prompts of the batch.
    generators = [torch.Generator().manual_seed(sampling.seed + text) for text in range(len(prompts))]
    logits = writing.begin()
    while True:
        tokens = sampling.draw_all(logits, [generators[text] for text in writing.texts])
        # From the last row on: the row that takes the place of one that ends has its token by then.
        for row, text in reversed(list(enumerate(writing.texts))):
            # The stopping token is not part of the text.
            if tokens[row] not in stops:
                made[text].append(tokens[row])
                writing.ids[text].append(tokens[row])
            if tokens[row] in stops or len(made[text]) == num_tokens:
                writing.end(row)
        if not writing.texts:
            return made
        logits = writing.further()


class _Writing:
    """Texts in the rows of a cache, without a gap: the last text takes the row of one that ends."""

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        config: ModelConfig,
        prompts: Sequence[Sequence[int]],
        num_tokens: int,
        context: int,
    ) -> None:
        self._blocks, self._context = blocks, context
        self.ids = [list(prompt) for prompt in prompts]
        self.texts = list(range(len(prompts)))  # of the rows
        weight = next(blocks[0].parameters())
        longest = max(map(len, prompts)) + num_tokens  # positions beyond the last token need no cache
        most = context if 0 < config.sliding_window <= context else min(context, longest)
        self._cache = KVCache(config, len(prompts), most, weight.device, weight.dtype)
        self._pass_tokens = _PASS_TOKENS if weight.device.type == "cpu" else 0

    def begin(self) -> Tensor:
        """Read all prompts; the logits (B, V) after them."""
        found: list[Tensor] = []
        texts: dict[int, list[int]] = {}
        for row, ids in enumerate(self.ids):
            # A ring cache drops old tokens by itself.
            text = ids if self._cache.is_ring else ids[-self._context :]
            if texts and sum(map(len, texts.values())) + len(text) > self._pass_tokens:
                found.append(begin_rows(self._blocks, texts, self._cache))
                texts = {}
            texts[row] = text
        found.append(begin_rows(self._blocks, texts, self._cache))
        return torch.cat(found)

    def further(self) -> Tensor:
        """Take the last token of every text; the logits (B, V) after them."""
        for row, text in enumerate(self.texts):
            # A full row is rebuilt from the last half of its context, whose last token passes with those of the others.
            if self._cache.is_full(row):
                self._cache.clear(row)
                half = self.ids[text][-max(1, self._context // 2) : -1]
                if half:
                    begin_rows(self._blocks, {row: half}, self._cache)
        return continue_rows(self._blocks, [self.ids[text][-1] for text in self.texts], self._cache)

    def end(self, row: int) -> None:
        """Have the text of a row leave."""
        last = self.texts.pop()
        if row < len(self.texts):
            self.texts[row] = last
            self._cache.move(len(self.texts), row)

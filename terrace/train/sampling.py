"""Continues texts token by token, with the whole model on one device and a KV cache.

`continue_texts` reads every prompt once, then runs one token of every text at a time. A text attends to at most
`context` tokens. When they are used up and no sliding window says which may be dropped, the last half of them is read
again as if the text began there. A token therefore costs one pass of one token, plus a longer pass now and then,
however long the text.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from terrace.base.errors import ConfigError
from terrace.model.cache import KVCache, run_cached
from terrace.model.config import ModelConfig


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

    Only the last `context` tokens of a prompt are read. A prompt needs at least one token.
    """
    # Learned positions end; RoPE does not.
    context = min(context, config.max_positions) if config.learned_positions else context
    writing = _Writing(blocks, config, prompts, num_tokens, context)
    # One generator a text, so that a continuation does not depend on the other prompts of the batch.
    generators = [torch.Generator().manual_seed(sampling.seed + row) for row in range(len(prompts))]
    made: list[list[int]] = [[] for _ in prompts]
    rows = set(range(len(prompts))) if num_tokens > 0 else set()
    logits = {row: writing.read(row, context) for row in sorted(rows)}
    while rows:
        for row, found in logits.items():
            token = sampling.draw(found.to(torch.promote_types(found.dtype, torch.float32)).cpu(), generators[row])
            # The stopping token is not part of the text.
            if token in stops:
                rows.remove(row)
                continue
            writing.texts[row].append(token)
            made[row].append(token)
            if len(made[row]) == num_tokens:
                rows.remove(row)
        logits = writing.further(rows)
    return made


class _Writing:
    def __init__(
        self,
        blocks: Sequence[nn.Module],
        config: ModelConfig,
        prompts: Sequence[Sequence[int]],
        num_tokens: int,
        context: int,
    ) -> None:
        self._blocks, self._context = blocks, context
        self.texts = [list(prompt) for prompt in prompts]
        weight = next(blocks[0].parameters())
        self._device = weight.device
        longest = max(map(len, prompts)) + num_tokens  # positions beyond the last token need no cache
        most = context if 0 < config.sliding_window <= context else min(context, longest)
        self.cache = KVCache(config, len(prompts), most, weight.device, weight.dtype)

    def read(self, row: int, length: int) -> Tensor:
        # A ring cache drops old tokens by itself.
        text = self.texts[row] if self.cache.is_ring else self.texts[row][-length:]
        self.cache.clear(row)
        return run_cached(self._blocks, torch.tensor([text], device=self._device), self.cache, row)[0]

    def further(self, rows: Collection[int]) -> dict[int, Tensor]:
        # A full cache is rebuilt from the last half of its context; the other texts advance together.
        full = [row for row in rows if self.cache.is_full(row)]
        going = [row for row in rows if row not in full]
        for row in set(range(len(self.texts))).difference(going):
            self.cache.clear(row)  # a cleared row costs least in the batched pass
        logits = {}
        if going:
            last = [[text[-1] if row in going else 0] for row, text in enumerate(self.texts)]
            found = run_cached(self._blocks, torch.tensor(last, device=self._device), self.cache)
            logits = {row: found[row] for row in going}
        return logits | {row: self.read(row, max(1, self._context // 2)) for row in full}

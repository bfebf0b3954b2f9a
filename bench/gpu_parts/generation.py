"""The rollout engine on the device: greedy tokens against those of the CPU, and tokens a second."""

import time
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from bench.common import decoder
from bench.gpu_parts.setting import Row, Setting
from terrace.generation.engine import GenerationEngine
from terrace.generation.request import Request, Sampling
from terrace.model.config import ModelConfig
from terrace.model.decoder import build_blocks
from terrace.model.init import initialise


def rows(setting: Setting) -> Iterator[Row]:
    """Exactness in fp64 on a small model, then the rate of a stack of 1 B parameters in bf16."""
    small = decoder(128, 3)
    made_on = {where: _blocks(small, torch.float64, where) for where in {"cpu", setting.device}}
    expected, found = (_made(small, made_on[where], _requests(6, 257, 12)) for where in ("cpu", setting.device))
    same = [list(a) for a in expected[0]] == [list(b) for b in found[0]]
    yield Row("greedy tokens in fp64", "those of the CPU" if same else "OTHERS", same)
    config = decoder(setting.size(2048, 64), setting.size(18, 2), setting.size(32000, 257))
    blocks = _blocks(config, torch.bfloat16, setting.device)
    for num in (1, setting.size(32, 2), setting.size(128, 3)):
        requests = _requests(num, config.vocab_size, setting.size(128, 4))
        made, seconds = _made(config, blocks, requests)
        rate = sum(map(len, made)) / seconds
        yield Row(
            f"{num} requests, bf16", f"{rate:.0f} tokens/s, {seconds / requests[0].num_tokens * 1e3:.1f} ms a pass"
        )


def _requests(num: int, vocab: int, num_tokens: int) -> list[Request]:
    generator = torch.Generator().manual_seed(1)
    greedy = Sampling(temperature=0.0)
    return [
        Request(
            prompt=tuple(torch.randint(1, vocab, (8 + 3 * index % 64,), generator=generator).tolist()),
            num_tokens=num_tokens,
            sampling=greedy,
        )
        for index in range(num)
    ]


def _blocks(config: ModelConfig, dtype: torch.dtype, device: str) -> list[nn.Module]:
    blocks: list[nn.Module] = build_blocks(config)
    initialise(blocks, config, seed=0, dtype=dtype, device=torch.device(device))
    return blocks


def _made(
    config: ModelConfig, blocks: list[nn.Module], requests: Sequence[Request]
) -> tuple[list[tuple[int, ...]], float]:
    engine = GenerationEngine(blocks, config, context=256, num_pages=64 * len(requests), token_budget=2048)
    engine.run(requests[:1])  # kernels are loaded
    begin_s = time.perf_counter()
    made = [each.tokens for each in engine.run(list(requests))]  # on the host, so the device has ended
    return made, time.perf_counter() - begin_s

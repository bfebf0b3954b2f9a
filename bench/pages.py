"""Mapped pages of keys and values against gathered ones, which the commands run on: `python -m bench.pages`.

16 requests over two prompts, as of a rollout with 8 responses a prompt. Each kind of pages has a process of its own,
one thread and fp32, and they take turns; tokens must be equal. Memory is the growth of the process' proportional set
size (a page that is mapped at several addresses counts once), the largest of all steps of a run of its own.
"""

import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from bench.claims import print_table, ratio_words
from bench.common import bench_parser
from bench.contest import Work, take_turns
from terrace.generation.engine import GenerationEngine
from terrace.generation.mapped import platform_pages
from terrace.generation.pages import GatheredPages, PagePool
from terrace.generation.request import Request, Sampling
from terrace.model.config import parse_model
from terrace.model.decoder import build_blocks
from terrace.model.init import initialise

POOLS: dict[str, Callable[..., PagePool]] = {"gathered": GatheredPages, "mapped": platform_pages}
PROMPTS = (16, 256, 1024)
REQUESTS, TOKENS = 16, 24


def of_pool(name: str, prompt: int, hidden: int, layers: int) -> Work:
    """The tokens of all requests and the bytes of memory, from an engine with these pages."""
    config = parse_model(
        {
            "model_type": "llama",
            "vocab_size": 4096,
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": hidden // 64,
            "intermediate_size": 3 * hidden,
        }
    )
    blocks = build_blocks(config)
    initialise(blocks, config, seed=0)
    generator = torch.Generator().manual_seed(1)
    prompts = [tuple(torch.randint(1, 4096, (prompt,), generator=generator).tolist()) for _ in range(2)]
    sampling = Sampling(temperature=1.0, top_k=0, seed=7)
    requests = [
        Request(prompt=prompts[each % 2], num_tokens=TOKENS, seed=each, sampling=sampling) for each in range(REQUESTS)
    ]

    def engine() -> GenerationEngine:
        return GenerationEngine(
            blocks, config, context=prompt + TOKENS, memory_bytes=2**28, build_pool=POOLS[name], page_tokens=16
        )

    def work() -> list[list[int]]:
        return [list(each.tokens) for each in engine().run(requests)]

    def memory() -> int:
        before, most, made = proportional_bytes(), 0, engine()
        for each in requests:
            made.add(each)
        left = len(requests)
        while left:
            left -= len(made.step())
            most = max(most, proportional_bytes())
        return most - before

    work()
    held = memory()
    return lambda: (work(), held)


def proportional_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def main() -> int:
    """Print the table; return 1 if tokens differ."""
    options = bench_parser(__doc__, rounds=5, hidden=256, layers=4).parse_args()
    rows, differ = [], False
    for prompt in PROMPTS:
        turns = {name: (of_pool, (name, prompt, options.hidden, options.layers)) for name in POOLS}
        seconds, made = take_turns(turns, options.rounds)
        (own, own_bytes), (theirs, their_bytes) = made["mapped"], made["gathered"]
        differ |= own != theirs
        medians = (f"{statistics.median(seconds[name]) * 1e3:.0f}" for name in POOLS)
        rows.append(
            [
                f"{prompt} tokens",
                *medians,
                ratio_words(seconds["mapped"], seconds["gathered"]),
                *(f"{size / 1e6:.1f}" for size in (their_bytes, own_bytes)),
                "differ" if own != theirs else "equal",
            ]
        )
    head = ["prompt", "CPU ms, gathered", "mapped", "ratio (quartiles)", "MB, gathered", "mapped", "tokens"]
    print_table(head, rows)
    return int(differ)


if __name__ == "__main__":
    sys.exit(main())

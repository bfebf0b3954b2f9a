"""Responses to 32 prompts of mixed lengths, each of a length of its own: `python -m bench.rollout`.

A Llama of 34 M parameters continues prompts of 8 to 199 tokens by 16 to 127 tokens, greedily, in fp32, on one thread,
by the rollout engine, by `transformers.generate` and by its continuous batching. `generate` pads prompts on the left
and goes on until the longest response has ended, as it does for responses that end by themselves. The three take turns
in processes of their own; the time is processor time of the whole call, with prompts and the making of batchers and
their pages.

Padded work are tokens that passed a model beyond those of prompts and responses, over all that passed.
"""

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from bench.claims import Claim, judge, measured, print_table, ratio_words, versioned
from bench.common import bench_parser
from bench.contest import Work, take_turns
from bench.generation import VOCAB, write_folder
from terrace.generation.engine import GenerationEngine
from terrace.generation.request import Request, Sampling
from terrace.model.arranged import arrange
from terrace.train.trained import load_trained

SPEEDUP, CONTINUOUS_SPEEDUP, PADDED = 3.0, 1.3, 0.02
_BUDGET = 512  # tokens of a pass, of both continuous batchers


def jobs_of(num_requests: int) -> list[tuple[list[int], int]]:
    """Prompts of random tokens, and the length of each response."""
    generator = torch.Generator().manual_seed(1)

    def drawn(low: int, high: int, num: int) -> list[int]:
        found: list[int] = torch.randint(low, high, (num,), generator=generator).tolist()
        return found

    sizes = zip(drawn(8, 200, num_requests), drawn(16, 128, num_requests), strict=True)
    return [(drawn(1, VOCAB, length), num_tokens) for length, num_tokens in sizes]


def own(folder: Path, jobs: list[tuple[list[int], int]]) -> Work:
    """Terrace; the work returns responses and the number of tokens that passed."""
    model = load_trained(folder, tokenizer="bytes")
    arrange(model.blocks, len(jobs))
    passed: list[int] = []
    model.blocks[0].register_forward_pre_hook(lambda _, args: passed.append(args[0].numel()))
    greedy = Sampling(temperature=0.0)
    requests = [Request(prompt=tuple(prompt), num_tokens=num, sampling=greedy) for prompt, num in jobs]

    def work() -> Any:
        passed.clear()
        # In the time, as the other continuous batcher makes its own.
        engine = GenerationEngine(
            model.blocks, model.config, context=model.context, num_pages=64 * len(jobs), token_budget=_BUDGET
        )
        made = [list(each.tokens) for each in engine.run(requests)]
        return made, sum(passed)

    return work


def padded(folder: Path, jobs: list[tuple[list[int], int]]) -> Work:
    """`transformers.generate`."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    longest, most = max(len(prompt) for prompt, _ in jobs), max(num for _, num in jobs)
    tokens = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt, _ in jobs])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt, _ in jobs])

    def work() -> Any:
        made = model.generate(tokens, attention_mask=mask, max_new_tokens=most, do_sample=False, pad_token_id=0)
        responses = [row[:num] for row, (_, num) in zip(made[:, longest:].tolist(), jobs, strict=True)]
        return responses, len(jobs) * (longest + most - 1)

    return work


def continuous(folder: Path, jobs: list[tuple[list[int], int]]) -> Work:
    """Continuous batching of transformers, each request with its own length."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    build: Any = transformers.GenerationConfig
    greedy = build(do_sample=False, eos_token_id=-1, pad_token_id=0)
    sizes = transformers.ContinuousBatchingConfig(num_blocks=2 * len(jobs), max_batch_tokens=_BUDGET)

    def work() -> Any:
        manager = model.init_continuous_batching(generation_config=greedy, continuous_batching_config=sizes)
        manager.start()
        names = [manager.add_request(prompt, max_new_tokens=num) for prompt, num in jobs]
        made: dict[str, list[int]] = {}
        while len(made) < len(names):
            found = manager.get_result(timeout=1)
            if found is not None and found.is_finished():
                made[found.request_id] = found.generated_tokens
        manager.stop(block=True)
        return [made[name] for name in names], 0

    return work


def main() -> int:
    """Print the table; return 1 when --check is given and a target is missed."""
    options = bench_parser(__doc__, rounds=5, hidden=512, layers=8, requests=32).parse_args()
    jobs = jobs_of(options.requests)
    num_tokens = sum(num for _, num in jobs)
    needed = sum(len(prompt) + num - 1 for prompt, num in jobs)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        num_params = write_folder(folder, options.hidden, options.layers)
        print(f"{num_params / 1e6:.1f} M parameters, {len(jobs)} prompts, {num_tokens} new tokens, fp32, one thread\n")
        contestants = {"own": own, "padded": padded, "continuous": continuous}
        seconds, made = take_turns({who: (f, (folder, jobs)) for who, f in contestants.items()}, options.rounds)
    names = {
        "own": "terrace",
        "padded": versioned("transformers", "generate"),
        "continuous": versioned("transformers", "continuous batching"),
    }
    claims: list[Claim] = []
    rows, wrong = [], []
    goals = (("padded", SPEEDUP, "generate"), ("continuous", CONTINUOUS_SPEEDUP, "continuous batching"))
    for who, goal, how in goals:
        claim = f"{len(jobs)} responses of mixed lengths, tokens a processor second over those of {how}"
        ratios = [theirs / ours for theirs, ours in zip(seconds[who], seconds["own"], strict=True)]
        claims.append(measured(claim, ratios, goal, at_least=True, rival=names[who]))
        differ = sum(a != b for a, b in zip(made["own"][0], made[who][0], strict=True))
        if differ:
            wrong.append(f"{differ} of {len(jobs)} responses differ from those of {names[who]}")
    for who, passed in ((who, made[who][1]) for who in contestants):
        rate = num_tokens / statistics.median(seconds[who])
        share = f"{1 - needed / passed:.3f}" if passed else "not counted"
        rows.append([names[who], f"{rate:.0f}", ratio_words(seconds[who], seconds["own"]), share])
    claims.append(measured("padded work of the rollout engine", [1 - needed / made["own"][1]], PADDED))
    print_table(["who", "tokens a CPU second", "its time over ours (quartiles)", "padded work"], rows)
    return judge(claims, options, wrong)


if __name__ == "__main__":
    sys.exit(main())

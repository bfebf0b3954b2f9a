"""The head with its loss in chunks, against whole logits through autograd: seconds and memory, alternating.

    python -m bench.head [--tokens 2048 --hidden 256 --vocabularies 256 32000 --dtype fp32 --rounds 5]

Each round runs forward and backward of both in turn; the best of all rounds counts.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from bench.models import llama_of
from terrace.comm.collectives import DTYPES
from terrace.model import loss_chunks
from terrace.model.decoder import build_blocks, token_loss
from terrace.runtime.head import chunked_head


def head_of(vocabulary: int, hidden: int, dtype: torch.dtype) -> nn.Module:
    """The head of a small decoder, with values."""
    config = llama_of(hidden, 1, 4, 4, hidden, vocabulary)
    head = build_blocks(config, device="cpu", dtype=dtype)[-1]
    for parameter in head.parameters():
        nn.init.normal_(parameter, std=0.02)
    return head


def best(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Shortest time of each run, taking turns, in seconds."""
    for run in runs.values():
        run()
    found = dict.fromkeys(runs, float("inf"))
    for _ in range(rounds):
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            found[name] = min(found[name], time.perf_counter() - begin)
    return found


def contest(
    head: nn.Module, tokens: int, hidden: int, dtype: torch.dtype, log2_chunks: Sequence[int], rounds: int
) -> dict[str, float]:
    """Shortest time of whole logits and of each chunk size, in seconds."""
    run_chunks = chunked_head(head, token_loss)
    assert run_chunks is not None, "a decoder's head has a form in chunks"
    inputs = torch.randn(1, tokens, hidden).to(dtype).requires_grad_()
    labels = torch.randint(0, head.get_parameter("weight").shape[0], (1, tokens))

    def whole() -> None:
        token_loss(head(inputs), labels).backward()  # type: ignore[no-untyped-call]
        head.zero_grad()

    def in_chunks(log2: int) -> None:
        loss_chunks.CHUNK_NUMEL["cpu"] = 1 << log2
        run_chunks(inputs, labels)
        head.zero_grad()

    runs: dict[str, Callable[[], object]] = {f"2^{log2}": partial(in_chunks, log2) for log2 in log2_chunks}
    return best({"whole": whole, **runs}, rounds)


def main() -> None:
    """Print one line of JSON per vocabulary and number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 2048])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[256, 32_000])
    parser.add_argument("--dtype", default="fp32", choices=sorted(DTYPES))
    parser.add_argument("--log2-chunks", type=int, nargs="+", default=[20, 21, 22, 23, 24])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    dtype = DTYPES[options.dtype]
    for vocabulary in options.vocabularies:
        head = head_of(vocabulary, options.hidden, dtype)
        for tokens in options.tokens:
            found = contest(head, tokens, options.hidden, dtype, options.log2_chunks, options.rounds)
            ms = {name: round(1e3 * seconds, 2) for name, seconds in found.items()}
            row = {"vocabulary": vocabulary, "tokens": tokens, "dtype": options.dtype, "ms": ms}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()

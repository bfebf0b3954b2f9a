"""Speed at which one core makes batches from a token cache: `python -m bench.feeding`.

A corpus of random ids in documents of geometric lengths is written to a temporary folder, then micro-batches are read
from it in the order of a run, in each mode of `data.documents` and from a mixture.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from terrace.data.batches import Batches, Source
from terrace.data.block_sums import write_sums
from terrace.data.feeding import Feeder
from terrace.data.token_file import TokenFile

TARGET_TOKENS_PER_S = 5e6


def corpus(folder: Path, name: str, num_tokens: int, mean_length: int) -> TokenFile:
    """Write a token file of random ids; documents have `mean_length` tokens on average."""
    rng = np.random.default_rng(0)
    lengths = rng.geometric(1 / mean_length, size=2 * num_tokens // mean_length)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    starts = starts[starts < num_tokens]
    path = folder / f"{name}.tokens"
    rng.integers(0, 50_000, size=num_tokens, dtype=np.uint16).tofile(path)
    starts.astype("<i8").tofile(path.with_suffix(".starts"))
    tokens = TokenFile(
        path=path,
        dtype="uint16",
        num_tokens=num_tokens,
        max_token=49_999,
        digest=name,
        num_documents=len(starts),
        starts=path.with_suffix(".starts"),
        sums_digest="",
    )
    return replace(tokens, sums_digest=write_sums(tokens))


def rate(make: Callable[[int], object], tokens_a_step: int, seconds: float) -> float:
    """Tokens per second of `make`, called for one step after the other."""
    make(0)
    begin, step = time.perf_counter(), 1
    while time.perf_counter() - begin < seconds:
        make(step)
        step += 1
    return (step - 1) * tokens_a_step / (time.perf_counter() - begin)


def ways(folder: Path, num_tokens: int, mean_length: int) -> dict[str, list[Source]]:
    """Sources to read: each way of putting documents into sequences, and a mixture of all."""
    tokens = {name: corpus(folder, name, num_tokens, mean_length) for name in ("join", "separate", "whole")}
    sources = {
        "join": Source(tokens=tokens["join"]),
        "separate": Source(tokens=tokens["separate"], documents="separate"),
        "whole": Source(tokens=tokens["whole"], documents="whole", too_long="split"),
    }
    mixture = [
        Source(tokens=each.tokens, documents=each.documents, too_long=each.too_long, weight=weight)
        for each, weight in zip(sources.values(), (5, 3, 2), strict=True)
    ]
    return {name: [each] for name, each in sources.items()} | {"mixture": mixture}


def main() -> None:
    """Measure and print one line of JSON per way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=50_000_000, help="of each corpus")
    parser.add_argument("--document", type=int, default=400, help="mean tokens of a document")
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name, sources in ways(Path(folder), options.tokens, options.document).items():
            begin = time.perf_counter()
            batches = Batches(sources, options.sequence, 8 * options.micro_batch, 0)
            opened_s = time.perf_counter() - begin

            def make(step: int, batches: Batches = batches) -> object:
                return batches.micro_batch(step, step % 8, 0, 1, options.micro_batch)

            tokens_a_step = options.sequence * options.micro_batch
            alone = rate(make, tokens_a_step, options.seconds)
            feeder = Feeder(make, 0, 1 << 40)

            def take(step: int, feeder: Feeder[object] = feeder) -> object:
                return feeder.next()

            fed = rate(take, tokens_a_step, options.seconds)
            feeder.close()
            far = 10**9
            begin = time.perf_counter()
            batches.micro_batch(far, 0, 0, 1, options.micro_batch)
            row = {
                "documents": name,
                "positions": batches.has_positions,
                "opened_s": round(opened_s, 3),
                "tokens_per_s": round(alone),
                "tokens_per_s_fed": round(fed),
                "step_1e9_s": round(time.perf_counter() - begin, 6),
                "met": min(alone, fed) >= TARGET_TOKENS_PER_S,
            }
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()

"""Speed at which one core makes batches from a token cache: `python -m bench.feeding`.

A corpus of random ids in documents of geometric lengths is written to a temporary folder, then micro-batches are read
from it in the order of a run, in each mode of `data.documents` and from a mixture: checksums, order, documents and ids
held against the vocabulary included. Torch's `DataLoader` reads the same number of tokens, shuffled, without any of
these. Each has a process of its own, they take turns, and the time is processor time.
"""

import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from bench.claims import judge, measured, print_table, ratio_words, versioned
from bench.common import bench_parser
from bench.contest import Contestant, Work, take_turns
from terrace.data.batches import Batches, Source
from terrace.data.block_sums import write_sums
from terrace.data.feeding import Feeder
from terrace.data.token_file import TokenFile

TARGET_MTOKENS_PER_S = 5.0


class Size(NamedTuple):
    """Tokens of a row, rows of a micro-batch."""

    sequence: int
    rows: int


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


def own(sources: list[Source], size: Size, num_calls: int, is_fed: bool) -> Work:
    """Micro-batches as a run takes them: one a step, as torch tensors, from a feeder's thread if `is_fed`."""
    batches = Batches(sources, size.sequence, size.rows, 0, vocab_size=50_000)

    def make(step: int) -> list[Tensor]:
        (arrays,) = batches.micro_batches(step, 0, 1, size.rows)
        return [torch.from_numpy(array) for array in arrays]

    first = 0

    def work() -> None:
        nonlocal first
        if is_fed:
            with closing(Feeder(make, first, first + num_calls)) as feeder:
                for _ in range(num_calls):
                    feeder.next()
        else:
            for step in range(first, first + num_calls):
                make(step)
        first += num_calls

    return work


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a token file, as torch's loader wants them: no checksums, no documents."""

    def __init__(self, tokens: TokenFile, sequence: int) -> None:
        self._ids, self._sequence = np.asarray(tokens.open()), sequence

    def __len__(self) -> int:
        return (len(self._ids) - 1) // self._sequence

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        first = index * self._sequence
        whole = torch.from_numpy(self._ids[first : first + self._sequence + 1].astype(np.int64))
        return whole[:-1], whole[1:]


def theirs(tokens: TokenFile, size: Size, num_calls: int) -> Work:
    """Torch's loader on the same tokens, shuffled, in the process itself."""
    rows = Rows(tokens, size.sequence)

    def forever() -> Iterator[Any]:
        while True:
            yield from DataLoader(rows, batch_size=size.rows, shuffle=True, drop_last=True)

    endless = forever()
    return lambda: [None for _ in zip(range(num_calls), endless, strict=False)] and None


def main() -> int:
    """Print the table; return 1 when --check is given and the target is missed."""
    parser = bench_parser(__doc__, rounds=7, corpus=20_000_000, document=400, rows=4, calls=1000)
    parser.add_argument("--sequence", type=int, nargs="+", default=[128, 2048])
    options = parser.parse_args()
    rival = versioned("torch", "DataLoader")
    table, claims = [], []
    for sequence in options.sequence:
        size = Size(sequence, options.rows)
        with tempfile.TemporaryDirectory() as name:
            sources = ways(Path(name), options.corpus, options.document)
            contestants: dict[str, Contestant] = {
                "theirs": (theirs, (sources["join"][0].tokens, size, options.calls)),
                "join, fed": (own, (sources["join"], size, options.calls, True)),
            }
            contestants |= {way: (own, (read, size, options.calls, False)) for way, read in sources.items()}
            seconds, _ = take_turns(contestants, options.rounds)
        for way, took_s in seconds.items():
            rates = [size.rows * sequence * options.calls / each / 1e6 for each in took_s]
            shape = f"{size.rows} x {sequence}"
            if way == "theirs":
                table.append([shape, rival, f"{statistics.median(rates):.1f}", ""])
                continue
            table.append([shape, way, f"{statistics.median(rates):.1f}", ratio_words(seconds["theirs"], took_s, 1)])
            said: dict[str, Any] = {"unit": "M tokens/s", "at_least": True, "rival": rival}
            claims.append(measured(f"feeding {shape} on one core, {way}", rates, TARGET_MTOKENS_PER_S, **said))
    print_table(["micro-batch", "documents", "M tokens/s of a core", "times the rival's (quartiles)"], table)
    return judge(claims, options)


if __name__ == "__main__":
    sys.exit(main())

"""`terrace eval FOLDER --data PATH`: the loss of a trained model on other text."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from terrace.base.errors import ConfigError
from terrace.base.words import counted
from terrace.cli.generate import add_model_options, load_model_of
from terrace.cli.output import raw_stream

if TYPE_CHECKING:
    from terrace.train.evaluate import Evaluation

_SECONDS = 1.0  # between two lines of progress


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "eval",
        description="Print loss, perplexity and bits per byte of the newest checkpoint of a run, or of the weights of "
        "a Hugging Face folder, on text that it was not trained on, in one process.",
    )
    add_model_options(parser)
    parser.add_argument(
        "--data", metavar="PATH", required=True, help="text or JSONL file, or a folder of them: the text to predict"
    )
    parser.add_argument(
        "--data.column",
        dest="column",
        default="text",
        metavar="NAME",
        help="the key or column of the text in a record (default: %(default)s)",
    )
    parser.add_argument(
        "--data.split", dest="split", default="", metavar="NAME", help="the split of a data set (default: train)"
    )
    parser.add_argument(
        "--context",
        type=int,
        metavar="N",
        help="tokens of a window, in which a token sees those before it (default: the sequence that the run was "
        "trained on, or the positions of a Hugging Face model)",
    )
    parser.add_argument("--documents", type=int, metavar="N", help="read the first N documents (default: all)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Print loss, perplexity and bits per byte; returns 0."""
    if rest:
        raise ConfigError(f"unknown argument {rest[0]!r}; see terrace eval --help")
    for name in ("context", "documents"):
        value = getattr(options, name)
        if value is not None and not 1 <= value < 2**31:
            raise ConfigError(f"--{name} {value} must be at least 1 and below 2^31")
    from terrace.data.corpus import read_documents
    from terrace.data.files import find_documents
    from terrace.train.evaluate import evaluate

    # Fails early for a path without documents.
    find_documents(options.data, options.split)  # before the weights, which may take a while
    model = load_model_of(options)
    texts = islice(read_documents(options.data, options.column, options.split), options.documents)
    found = evaluate(model, texts, context=options.context, progress=_progress())
    figures = {"loss": found.loss, "perplexity": found.perplexity, "bits_per_byte": found.bits_per_byte}
    counts = {"tokens": found.num_tokens, "documents": found.num_documents, "bytes": found.num_bytes}
    if options.json:
        print(json.dumps({**figures, **{f"num_{name}": count for name, count in counts.items()}}))
        return 0
    print(f"loss           {found.loss:.4f} nats per token")
    print(f"perplexity     {found.perplexity:.3f} per token")
    print(f"bits per byte  {found.bits_per_byte:.4f}")
    print("of             " + ", ".join(counted(count, name.removesuffix("s"), ",") for name, count in counts.items()))
    return 0


def _progress() -> "Callable[[Evaluation], None]":
    # A list, since the callback below assigns to it.
    last = [time.monotonic()]

    def tell(found: "Evaluation") -> None:
        if sys.stderr.isatty() and time.monotonic() - last[0] >= _SECONDS:
            # Every token would flood the terminal: one line per second.
            last[0] = time.monotonic()
            print(
                f"\r{counted(found.num_tokens, 'token', ',')}, loss {found.loss:.4f}",
                end="\033[K\r",
                file=raw_stream(sys.stderr),
                flush=True,
            )

    return tell

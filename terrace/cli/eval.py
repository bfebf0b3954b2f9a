"""`terrace eval FOLDER`: the loss of a trained model on text, on conversations, or on its run's own hold-out."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from terrace.base.errors import ConfigError
from terrace.base.words import counted
from terrace.cli.files import check_count
from terrace.cli.generate import load_model_of
from terrace.cli.output import raw_stream

if TYPE_CHECKING:
    from terrace.train.evaluate import Evaluation

_SECONDS = 1.0  # between two lines of progress


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Prints loss, perplexity and bits per byte; returns 0."""
    for name in ("context", "documents"):
        check_count(f"--{name}", getattr(options, name), bits=31)
    if options.data is not None and options.format is None and options.column is None:
        options.format = _found_format(options.data, options.split or "")
    _check_together(options)
    if options.data is None:
        return _run_own(options)
    found = _of_chats(options) if options.format == "chat" else _of_texts(options)
    figures = {"loss": found.loss, "perplexity": found.perplexity}
    counts = {"tokens": found.num_tokens, "documents": found.num_documents}
    if found.num_bytes:
        figures["bits_per_byte"], counts["bytes"] = found.bits_per_byte, found.num_bytes
    if options.json:
        print(json.dumps({**figures, **{f"num_{name}": count for name, count in counts.items()}}))
        return 0
    print(f"loss           {found.loss:.4f} nats per token")
    print(f"perplexity     {found.perplexity:.3f} per token")
    if found.num_bytes:
        print(f"bits per byte  {found.bits_per_byte:.4f}")
    print("of             " + ", ".join(counted(count, name.removesuffix("s"), ",") for name, count in counts.items()))
    return 0


def _found_format(path: str, split: str) -> str:
    from terrace.data.found_format import found_format, record_words

    # Without the key, records without a text are what they look like, as in a run.
    found = found_format(path, split)
    if found == "chat":
        print(f"{path} is taken as {record_words(path, split, found)}", file=sys.stderr, flush=True)
    return "chat" if found == "chat" else "text"


def _check_together(options: argparse.Namespace) -> None:
    # No option is ignored silently.
    keys = {"format": "--data.format", "chat_template": "--data.chat_template", "column": "--data.column"}
    keys |= {
        "separator": "--data.separator",
        "split": "--data.split",
        "context": "--context",
        "documents": "--documents",
        "tokenizer": "--tokenizer",
    }
    given = {name: key for name, key in keys.items() if getattr(options, name) is not None}
    if options.data is None and given:
        raise ConfigError(
            f"{next(iter(given.values()))} has no effect on a run's own evaluation data: leave it out, or give "
            "--data PATH"
        )
    for name in ("column", "separator"):
        if options.format == "chat" and name in given:
            raise ConfigError(f"--data.{name} has no effect on conversations: leave it out")
    if options.format != "chat" and "chat_template" in given:
        raise ConfigError("--data.chat_template has no effect on text: leave it out, or give --data.format chat")


def _run_own(options: argparse.Namespace) -> int:
    from terrace.train.evaluate_own import evaluate_own, own_data

    sources = own_data(options.folder, lambda text: print(text, file=sys.stderr, flush=True))
    table = {}
    for found in evaluate_own(load_model_of(options), sources, _progress()):
        rows = f"{found.num_documents:,} of {counted(found.num_found, 'sequence', ',')}"
        table[found.name] = {
            "loss": found.loss,
            "perplexity": found.perplexity,
            "num_tokens": found.num_tokens,
            "num_sequences": found.num_documents,
        }
        if not options.json:
            print(
                f"{found.name}: loss {found.loss:.4f} nats per token, perplexity {found.perplexity:.3f}\n"
                f"  of {counted(found.num_tokens, 'token', ',')} in {rows}",
                flush=True,
            )
    if options.json:
        print(json.dumps(table))
    return 0


def _of_texts(options: argparse.Namespace) -> "Evaluation":
    from terrace.data.corpus import read_documents
    from terrace.train.evaluate import evaluate

    split, column = options.split or "", options.column or "text"
    _say_files(options.data, split)
    model = load_model_of(options)
    documents = read_documents(options.data, column, split, separator=options.separator or "")
    texts = islice(documents, options.documents)
    return evaluate(model, texts, context=options.context, progress=_progress())


def _of_chats(options: argparse.Namespace) -> "Evaluation":
    from terrace.data.chat_tokens import holds_conversations, read_chats
    from terrace.train.evaluate import evaluate_chats

    split = options.split or ""
    _say_files(options.data, split)
    holds_conversations(options.data, split)  # fails early for a path without records
    model = load_model_of(options)
    template = model.template_path if options.chat_template is None else options.chat_template
    chats = read_chats(options.data, model.tokenizer, model.tokenizer_path, template, split, _warn)
    return evaluate_chats(model, islice(chats, options.documents), context=options.context, progress=_progress())


def _say_files(path: str, split: str) -> None:
    """Prints which files of a folder are read. Fails early for a path without documents, since loading weights may take
    a while.
    """
    from terrace.data.files import find_data

    if words := find_data(path, split).words:
        _warn(words)


def _warn(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


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

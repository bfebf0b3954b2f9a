"""`terrace prune FOLDER PATH`: a smaller model of the layers, heads and inner features that are most important."""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terrace.base.errors import ConfigError
from terrace.base.words import counted
from terrace.cli.export import end_of_text
from terrace.cli.files import check_count, check_writable
from terrace.cli.generate import load_model_of
from terrace.cli.lines import SHARD_BYTES
from terrace.model.blocks import num_params
from terrace.model.facts import family_of
from terrace.train.runs import CONFIG, read_run

if TYPE_CHECKING:
    from terrace.train.evaluate import Evaluation
    from terrace.train.prune import Pruned
    from terrace.train.trained import Trained

Evaluations = Callable[["Trained"], Iterable["Evaluation"]]


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    check_count("--shard-bytes", options.shard_bytes)
    check_count("--documents", options.documents, bits=31)
    if options.data is None and options.documents is not None:
        raise ConfigError("--documents has no effect on a run's own evaluation data: leave it out, or give --data PATH")
    # After the options are checked: importing torch takes seconds.
    from terrace.model.hf.written import check_new
    from terrace.model.prune import Shares, sizes_words
    from terrace.train.prune import prune

    shares = Shares(layers=options.layers, heads=options.heads, intermediate=options.intermediate)
    check_new(options.path)
    check_writable("PATH", options.path / "config.json")  # before the evaluation, which takes long
    evaluations = _evaluations(options)
    # The values are written as they are read: 16 bits fit fp32.
    wide = "fp64" if options.dtype == "fp64" else "fp32"
    whole = load_model_of(argparse.Namespace(**{**vars(options), "dtype": wide}))
    found = prune(whole, shares, evaluations, options.folder)
    written, dtype = _write(options, found)
    smaller, layers = found.model.config, found.kept.layers
    print(
        f"measured on {counted(found.num_tokens, 'token', ',')}: loss {found.before:.4f} of the whole model, "
        f"{found.after:.4f} of the smaller one"
    )
    if len(layers) < len(whole.blocks) - 2:
        print(f"layers that stay, counted from 0: {', '.join(map(str, layers))}")
    print(
        f"wrote {options.path}, a {family_of(smaller)} model in {dtype}: {sizes_words(smaller)}; "
        f"{num_params(smaller):,} parameters of {num_params(whole.config):,}: {', '.join(written)}"
    )
    return 0


def _evaluations(options: argparse.Namespace) -> Evaluations:
    """Evaluates a model on the data that the options name. Raises before any model is loaded if they name none."""
    if options.data is None:
        from terrace.train.evaluate_own import evaluate_own, own_data

        sources = own_data(options.folder, lambda text: print(text, file=sys.stderr, flush=True))
        return lambda model: evaluate_own(model, sources)
    from terrace.data.corpus import read_documents
    from terrace.data.files import find_data
    from terrace.train.evaluate import evaluate

    if words := find_data(options.data, "").words:
        print(words, file=sys.stderr, flush=True)
    return lambda model: [evaluate(model, islice(read_documents(options.data), options.documents))]


def _write(options: argparse.Namespace, found: "Pruned") -> tuple[list[str], str]:
    shard_bytes, config = options.shard_bytes or SHARD_BYTES, found.model.config
    if (options.folder / CONFIG).is_file():
        from terrace.train.export import write_model

        run = read_run(options.folder)
        dtype, source = options.dtype or run.compute, run.source if run.source.is_dir() else None
        end = end_of_text(run)
        return write_model(config, found.value, options.path, dtype, shard_bytes, source, end), dtype
    from terrace.model.hf.written import write_pretrained

    dtype = options.dtype or _stored_dtype(options.folder)
    more: dict[str, Any] = {"shard_bytes": shard_bytes, "source": options.folder}
    return write_pretrained(options.path, config, found.value, dtype, **more), dtype


def _stored_dtype(folder: Path) -> str:
    from terrace.model.config import load_model
    from terrace.model.hf.pretrained import Pretrained

    return Pretrained(folder, load_model(str(folder), training=False)).dtype

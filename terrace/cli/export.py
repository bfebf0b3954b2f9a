"""`terrace export RUN PATH`: a checkpoint of a run as a Hugging Face folder."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from terrace.base.errors import CheckpointError, ConfigError
from terrace.base.schema import read_table
from terrace.train.config import RunConfig, parse_run
from terrace.train.folder import BYTES, SOURCE, check_source, no_run_words

SHARD_BYTES = 5_000_000_000  # default file size in transformers
DTYPES = ("fp32", "bf16", "fp16", "fp64")


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "export",
        description="Write a checkpoint of a run as a folder that transformers loads: safetensors, config.json, and "
        "the tokenizer of the run.",
    )
    parser.add_argument("folder", metavar="RUN", type=Path, help="run folder that terrace train has left")
    parser.add_argument("path", metavar="PATH", type=Path, help="folder to make; it must not be there, or be empty")
    parser.add_argument("--step", type=int, metavar="N", help="the checkpoint after this step (default: the newest)")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="dtype of the weights (default: the one that the run computed in)"
    )
    parser.add_argument(
        "--shard-bytes",
        type=int,
        metavar="N",
        help=f"largest file of weights, in bytes (default: {SHARD_BYTES})",
    )
    parser.add_argument(
        "--adapter", action="store_true", help="write the adapters alone, in fp32, as a folder that peft loads"
    )
    parser.add_argument(
        "--base",
        metavar="NAME",
        help="with --adapter: the base model's name (default: the run's train.weights)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Write the folder; returns 0."""
    if rest:
        raise ConfigError(f"unknown argument {rest[0]!r}; see terrace export --help")
    _check_together(options)
    if options.shard_bytes is not None and options.shard_bytes < 1:
        raise ConfigError(f"--shard-bytes {options.shard_bytes} must be at least 1")
    if not (options.folder / "config.toml").is_file():
        raise CheckpointError(no_run_words(options.folder))
    config = parse_run(read_table(options.folder / "config.toml"))
    from terrace.checkpoint.reading import Checkpoint
    from terrace.train.export import export, export_adapter

    checkpoint = Checkpoint(_chosen(options.folder, options.step))
    # A damaged checkpoint must not become a model that looks sound.
    checkpoint.verify()
    if options.adapter:
        base = config.train.weights if options.base is None else options.base
        written = export_adapter(checkpoint, options.path, base)
        print(f"wrote {options.path}, the adapters after step {checkpoint.step}: {', '.join(written)}")
        return 0
    source = options.folder / SOURCE
    check_source(options.folder)
    dtype = options.dtype or config.plan.compute
    written = export(
        checkpoint,
        options.path,
        dtype,
        options.shard_bytes or SHARD_BYTES,
        source if source.is_dir() else None,
        _end_of_text(config, source),
    )
    # A run on bytes has no tokenizer file; say so, since generating elsewhere needs one.
    if "tokenizer.json" not in written:
        print(
            f"no tokenizer: the run was trained on {config.data.tokenizer}; generate and eval take the folder with "
            f"--tokenizer {config.data.tokenizer}"
        )
    print(f"wrote {options.path}, the model after step {checkpoint.step} in {dtype}: {', '.join(written)}")
    return 0


def _check_together(options: argparse.Namespace) -> None:
    # No option is ignored silently.
    for name in ("dtype", "shard_bytes"):
        if options.adapter and getattr(options, name) is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} has no effect with --adapter, which writes one file in fp32: leave it out"
            )
    if options.base is not None and not options.adapter:
        raise ConfigError(f"--base {options.base} has no effect without --adapter: leave it out")


def _chosen(folder: Path, step: int | None) -> Path:
    from terrace.checkpoint.layout import complete, latest, step_of

    found = complete(folder / "checkpoints")
    newest = latest(folder)
    if newest is None:
        raise CheckpointError(f"{folder} has no complete checkpoint yet")
    if step is None:
        return newest
    for path in found:
        if step_of(path) == step:
            return path
    there = ", ".join(str(step_of(path)) for path in found)
    raise CheckpointError(f"{folder} has no checkpoint after step {step}, but after {there}: name one of these")


def _end_of_text(config: RunConfig, source: Path) -> int | None:
    # The run's own tokenizer knows which token ended a document in training.
    from terrace.data.tokenizer import load_tokenizer

    if config.data.tokenizer == BYTES:
        return load_tokenizer(BYTES).text_tokens.end
    return load_tokenizer(source).text_tokens.end if (source / "tokenizer.json").is_file() else None

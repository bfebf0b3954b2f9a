"""`terrace export RUN PATH`: a checkpoint of a run for transformers, peft, or torch.distributed.checkpoint."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from terrace.base.errors import CheckpointError, ConfigError
from terrace.cli.files import check_count
from terrace.cli.lines import DCP, HF, SHARD_BYTES
from terrace.train.folder import BYTES, check_source
from terrace.train.runs import RunFolder, read_run

if TYPE_CHECKING:
    from terrace.checkpoint.reading import Checkpoint


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    _check_together(options)
    check_count("--shard-bytes", options.shard_bytes)
    run = read_run(options.folder)
    from terrace.train.adapted import decoded_words
    from terrace.train.export import export_adapter

    checkpoint = _chosen(run, options.step)
    # A damaged checkpoint must not become a model that looks sound.
    checkpoint.verify()
    if options.adapter:
        base = run.base if options.base is None else options.base
        written = export_adapter(checkpoint, options.path, base)
        print(f"wrote {options.path}, the adapters after step {run.step_of(checkpoint)}: {', '.join(written)}")
        return 0
    check_source(options.folder)
    written, dtype = (_export_dcp if options.format == DCP else _export_hf)(options, run, checkpoint)
    # A run on bytes has no tokenizer file; say so, since generating elsewhere needs one.
    if "tokenizer.json" not in written:
        print(
            f"no tokenizer: the run was trained on {run.tokenizer}; generate and eval take the folder with "
            f"--tokenizer {run.tokenizer}"
        )
    if words := decoded_words(checkpoint):
        print(words)
    print(f"wrote {options.path}, the model after step {run.step_of(checkpoint)} in {dtype}: {', '.join(written)}")
    return 0


def _export_hf(options: argparse.Namespace, run: RunFolder, checkpoint: "Checkpoint") -> tuple[list[str], str]:
    from terrace.train.export import export

    source, dtype = run.source, options.dtype or run.compute
    shard_bytes, end = options.shard_bytes or SHARD_BYTES, end_of_text(run)
    return export(checkpoint, options.path, dtype, shard_bytes, source if source.is_dir() else None, end), dtype


def _export_dcp(options: argparse.Namespace, run: RunFolder, checkpoint: "Checkpoint") -> tuple[list[str], str]:
    from terrace.train.export_dcp import DcpExport, export_dcp, stored_dtype

    source = run.source
    wanted = DcpExport(
        dtype=options.dtype,
        naming=options.names or HF,
        states=not options.weights_only,
        file_bytes=options.shard_bytes or SHARD_BYTES,
        source=source if source.is_dir() else None,
        end_of_text=end_of_text(run),
    )
    beside = "" if options.weights_only else ", with the states of adamw"
    return export_dcp(checkpoint, run, options.path, wanted), (options.dtype or stored_dtype(checkpoint)) + beside


def _check_together(options: argparse.Namespace) -> None:
    # No option is ignored silently.
    if options.adapter and options.format == DCP:
        raise ConfigError(f"--adapter writes a folder for peft, which --format {DCP} is not: leave one of them out")
    for name in ("dtype", "shard_bytes"):
        if options.adapter and getattr(options, name) is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} has no effect with --adapter, which writes one file in fp32: leave it out"
            )


def _chosen(run: RunFolder, step: int | None) -> "Checkpoint":
    from terrace.checkpoint.layout import complete, latest
    from terrace.checkpoint.reading import Checkpoint

    newest = latest(run.saves)
    if newest is None:
        raise CheckpointError(f"{run.folder} has no complete checkpoint yet")
    if step is None:
        return Checkpoint(newest)
    found = {run.step_of(each): each for each in map(Checkpoint, complete(run.saves / "checkpoints"))}
    if step in found:
        return found[step]
    there = ", ".join(map(str, found))
    raise CheckpointError(f"{run.folder} has no checkpoint after step {step}, but after {there}: name one of these")


def end_of_text(run: RunFolder) -> int | None:
    """The token that ended a document in the run's training; None if its tokenizer has no file."""
    # The run's own tokenizer knows which token ended a document in training.
    from terrace.data.tokenizer import load_tokenizer

    if run.tokenizer == BYTES:
        return load_tokenizer(BYTES).text_tokens.end
    return load_tokenizer(run.source).text_tokens.end if (run.source / "tokenizer.json").is_file() else None

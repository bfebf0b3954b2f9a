"""A run's defaults from a Hugging Face folder: initial weights and a tokenizer, in addition to the model's shape.

Only checking the weights needs torch.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terrace.base.errors import CheckpointError, DataError, ModelError
from terrace.base.fitting import parse_table
from terrace.base.foreign import read_file, read_text
from terrace.base.hub import fetch_weights, is_snapshot
from terrace.base.sealed import checksum, sealed_json
from terrace.base.words import counted
from terrace.model.facts import refuse_unpublished_gate, vocabulary_size
from terrace.model.hf.folder import (
    CHAT_TEMPLATE,
    CONFIG,
    GENERATION,
    TOKENIZER,
    TOKENIZER_FILES,
    adapter_words,
    holds_weights,
    read_files,
    with_templates,
)
from terrace.train.config import RunConfig

if TYPE_CHECKING:
    from terrace.data.tokenizer import Tokenizer

SOURCE = "source"  # in a run folder: files that an export needs besides the weights
BYTES = "bytes"
_SUMS = "checksums.json"  # of the other files of SOURCE


def run_above(folder: Path) -> Path | None:
    """The run folder that contains `folder` (such as a checkpoint), up to three levels above; None if there is none."""
    above = list(folder.parents)[:3]
    return next((each for each in above if str(each) != "." and (each / "config.toml").is_file()), None)


def no_run_words(folder: Path) -> str:
    """Error text for a `folder` that is not a run folder; suggests the run folder that contains it, if any."""
    why, above = f"{folder} is not a run folder: it has no config.toml", run_above(folder)
    return why if above is None else f"{why}; did you mean {str(above)!r}?"


def with_folder(table: Mapping[str, Any], model: Any, names_tokenizer: bool) -> dict[str, Any]:
    """The run's table with defaults from the model folder `model`.

    Weights set `train.weights` unless it is given ("" means from scratch). A tokenizer.json sets `data.tokenizer`
    unless the user named one. A folder with weights but without a tokenizer also sets `data.tokenizer`, because no
    other would fit, and the error follows later. A config.json, or any other `model`, sets neither.
    """
    if not all(isinstance(table.get(name, {}), Mapping) for name in ("train", "data")):
        return dict(table)  # which is refused by whoever reads the sections
    folder = os.path.abspath(model) if isinstance(model, str) and os.path.isdir(model) else ""
    train, data = dict(table.get("train", {})), dict(table.get("data", {}))
    if "weights" not in train and folder and (holds_weights(folder) or is_snapshot(folder)):
        train["weights"] = folder
    # Weights named by the user bring the tokenizer of their folder.
    weights = train.get("weights")
    if isinstance(weights, str) and weights:
        train["weights"] = folder = os.path.abspath(weights)
        if words := adapter_words(Path(folder)):
            raise ModelError(words)
    if folder and not names_tokenizer and (train.get("weights") or _has_tokenizer(Path(folder))):
        data["tokenizer"] = os.path.join(folder, TOKENIZER)
    return {**table, "train": train, "data": data}


def _has_tokenizer(folder: Path) -> bool:
    if (folder / TOKENIZER).is_file():
        return True
    # Imported here: few folders have another form.
    from terrace.data.converted import other_form

    return other_form(folder) is not None


def check_tokenizer(tokenizer: "Tokenizer", run: RunConfig) -> None:
    """Raises `DataError` if the tokenizer has ids beyond the model's vocabulary."""
    if tokenizer.vocab_size > (known := vocabulary_size(run.model)):
        rows = "; loaded weights get new rows, which begin as the mean of theirs" * bool(run.train.weights)
        raise DataError(
            f"the largest id of the tokenizer {run.data.tokenizer} is {tokenizer.vocab_size - 1}, but the model's "
            f"vocab_size is {known}: name the model's own with --data.tokenizer, or give the model a "
            f"vocab_size of at least {tokenizer.vocab_size}, as --model.vocab_size {tokenizer.vocab_size} does{rows}"
        )


def check_weights(run: RunConfig) -> str:
    """A line on parameters that the initial weights lack and that are newly initialised, or "".

    Raises `ModelError` unless the weights exist and fit the run's model.
    """
    if run.train.weights:
        from terrace.model.hf.pretrained import Pretrained

        fetch_weights(run.train.weights)
        refuse_unpublished_gate(run.model, run.train.weights)
        weights = Pretrained(run.train.weights, run.model, adds_rows=True)
        weights.check()
        said = []
        if weights.lacks_score:
            said.append(f"{run.train.weights} has no score: its one output a token begins with small random values")
        if new := weights.num_new_rows:
            known = vocabulary_size(run.model)
            if run.lora is not None:
                raise ModelError(
                    f"model.vocab_size = {known}: {run.train.weights} has {known - new} "
                    "rows of tokens, and [lora] would train no new ones: train without [lora], or keep the tokenizer "
                    "of the model"
                )
            said.append(
                f"{run.train.weights} has {known - new} rows of tokens: {counted(new, 'new one')} "
                "begin as the mean of these"
            )
        return "; ".join(said)
    return ""


def source_files(weights: str, tokenizer_path: str, template_path: str, tokenizer: "Tokenizer") -> dict[str, bytes]:
    """Files that an export needs besides the weights (name -> content), read at the start of the run from the folder
    `weights`, if any, and from the tokenizer's.

    They declare the special tokens. Raises `ModelError` for a file that cannot be read.
    """
    from terrace.data.tokenizer import FileTokenizer
    from terrace.data.tokenizer_files import agreeing

    found: dict[str, bytes] = {}
    if weights:
        found |= read_files(Path(weights), (CONFIG, GENERATION))
    if tokenizer_path != BYTES:
        path = Path(tokenizer_path)
        path = path / TOKENIZER if path.is_dir() else path
        if path.name == TOKENIZER:
            found |= with_templates(path.parent, read_files(path.parent, TOKENIZER_FILES))
        # A tokenizer under another name is exported under the usual one.
        else:
            found[TOKENIZER] = _named(path)
        if template_path:  # transformers prefers this file to one in tokenizer_config.json
            found[CHAT_TEMPLATE] = _named(Path(template_path))
        if isinstance(tokenizer, FileTokenizer):
            found |= agreeing(found, tokenizer)
    return with_sums(found)


def with_sums(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Adds a file of checksums, which `check_source` verifies."""
    if not files:
        return {}
    sums = {name: checksum(content) for name, content in sorted(files.items())}
    return {**files, _SUMS: sealed_json(json.dumps(sums)).encode()}


def _named(path: Path) -> bytes:
    try:
        return read_file(path)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error


def check_source(run_folder: Path) -> None:
    """Raises `CheckpointError` for a file in a run's source folder that has changed since the run started."""
    folder = run_folder / SOURCE
    fix = f"restore it, or delete {folder / _SUMS} to use the files as they are"
    if not (folder / _SUMS).is_file():  # a run on bytes, or of an earlier version
        return
    try:
        sums = parse_table(read_text(folder / _SUMS, folder))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / _SUMS} is damaged ({error}): {fix}") from error
    for name, wanted in sums.items():
        try:
            found = checksum(read_file(folder / name, folder))
        except OSError as error:
            raise CheckpointError(f"cannot read {folder / name}: {error.strerror}: {fix}") from error
        if found != wanted:
            raise CheckpointError(f"{folder / name} is damaged, or was edited since the run started: {fix}")


def start_words(run: RunConfig) -> str:
    """One line on what a new run takes from a Hugging Face folder, or ""."""
    words = [f"starts from the weights in {run.train.weights}"] if run.train.weights else []
    words += [f"tokenizer {run.data.tokenizer}"] if run.data.tokenizer != BYTES else []
    return "; ".join(words)

"""Initial values from a folder that a run of Terrace or `save_pretrained` has left."""

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from torch import Tensor

from terrace.base.errors import CheckpointError, ModelError
from terrace.checkpoint.layout import latest
from terrace.checkpoint.reading import Checkpoint
from terrace.data.tokenizer import Tokenizer, load_tokenizer, trained_otherwise
from terrace.model.config import ModelConfig
from terrace.model.hf.folder import TOKENIZER, holds_weights
from terrace.model.hf.pretrained import Pretrained
from terrace.train.adapted import merged_values
from terrace.train.runs import CONFIG, read_run

Value = Callable[[str, str, tuple[int, ...]], Tensor]  # (block, parameter, its shape) -> a whole parameter


def values_in(folder: str, model: ModelConfig, fresh: Value | None = None) -> Value:
    """The values of a model's parameters in a checkpoint, a run folder or a Hugging Face folder.

    `fresh` gives those that the folder lacks, such as the head of a critic. Raises as reading them does.
    """
    checkpoint = _checkpoint_in(Path(folder))
    if checkpoint is None:
        pretrained = Pretrained(folder, model)
        return lambda block, name, shape: (
            pretrained.value(block, name) if fresh is None or (block, name) in pretrained else fresh(block, name, shape)
        )
    read = {(block, name): value for block, name, value in merged_values(checkpoint)}
    return lambda block, name, shape: (
        read[block, name] if fresh is None or (block, name) in read else fresh(block, name, shape)
    )


def version_of(folder: str) -> list[str]:
    """What changes when other values are written to the folder of a model: texts that are only compared.

    A run folder has the digest of its newest checkpoint's manifest, which has those of all values; a Hugging Face
    folder, sizes and times of its files.
    """
    path = Path(folder)
    if (checkpoint := _checkpoint_in(path)) is not None:
        return [checkpoint.folder.name, sha256((checkpoint.folder / "manifest.json").read_bytes()).hexdigest()]
    stats = [(each.name, each.stat()) for each in sorted(path.glob("*.safetensors"))]
    return [f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats]


def check_values(folder: str, model: ModelConfig, tokenizer: Tokenizer, key: str) -> None:
    """Raises `CheckpointError` or `ModelError` unless `folder` has values for the model, learned with this tokenizer.

    `key` names the folder in errors.
    """
    path = Path(folder)
    if (checkpoint := _checkpoint_in(path)) is not None:
        checkpoint.verify()
        fingerprint = str(checkpoint.facts.get("tokenizer"))
    elif not holds_weights(folder):
        raise ModelError(f"{key} = {folder!r} has no weights: give a folder that also has *.safetensors")
    else:
        Pretrained(folder, model).check()
        if not (path / TOKENIZER).is_file():
            return  # a model of bytes, or one whose tokenizer is elsewhere: its vocabulary has been compared
        fingerprint = load_tokenizer(str(path / TOKENIZER)).fingerprint
    # Marks of the beginning and the end of a text may differ: they do not change what an id means.
    if fingerprint.split("-bos")[0] != tokenizer.fingerprint.split("-bos")[0]:
        raise CheckpointError(
            f"{key} = {folder!r} has another tokenizer ({fingerprint}, not {tokenizer.fingerprint}): "
            f"{trained_otherwise(fingerprint, tokenizer)}"
        )


def _checkpoint_in(folder: Path) -> Checkpoint | None:
    """The checkpoint that `folder` is, or the newest of the run that it is; None for a Hugging Face folder."""
    if (folder / "manifest.json").is_file():
        return Checkpoint(folder)
    if not (folder / CONFIG).is_file():
        return None
    newest = latest(read_run(folder).saves)
    if newest is None:
        raise CheckpointError(f"{folder} has no complete checkpoint yet: let its run write one")
    return Checkpoint(newest)

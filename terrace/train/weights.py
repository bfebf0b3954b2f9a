"""Initial values from a folder that a run of Terrace or `save_pretrained` has left."""

from collections.abc import Callable
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

Value = Callable[[str, str, tuple[int, ...]], Tensor]  # (block, parameter, its shape) -> a whole parameter


def values_in(folder: str, model: ModelConfig) -> Value:
    """The values of a model's parameters in a run folder or a Hugging Face folder. Raises as reading them does."""
    path = Path(folder)
    if (path / "config.toml").is_file():
        read = {(block, name): value for block, name, value in merged_values(_newest(path))}
        return lambda block, name, shape: read[block, name]
    pretrained = Pretrained(folder, model)
    return lambda block, name, shape: pretrained.value(block, name)


def check_values(folder: str, model: ModelConfig, tokenizer: Tokenizer, key: str) -> None:
    """Raises `CheckpointError` or `ModelError` unless `folder` has values for the model, learned with this tokenizer.

    `key` names the folder in errors.
    """
    path = Path(folder)
    if (path / "config.toml").is_file():
        checkpoint = _newest(path)
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


def _newest(folder: Path) -> Checkpoint:
    newest = latest(folder)
    if newest is None:
        raise CheckpointError(f"{folder} has no complete checkpoint yet: let its run write one")
    return Checkpoint(newest)

"""Exports a checkpoint to a Hugging Face folder."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from torch import Tensor

from terrace.base.errors import CheckpointError
from terrace.checkpoint.reading import Checkpoint
from terrace.data.ends import ends_of, filler
from terrace.data.tokenizer import FileTokenizer, load_tokenizer
from terrace.data.tokenizer_files import ending, filling, with_special
from terrace.model.config import ModelConfig, parse_model
from terrace.model.facts import has_scalar_head, vocabulary_size
from terrace.model.hf.folder import CONFIG, GENERATION, TOKENIZER, carried_files, read_files
from terrace.model.hf.written import write_pretrained
from terrace.model.lora.config import is_adapter
from terrace.model.lora.peft import write_adapter
from terrace.train.adapted import lora_of, merged_values


def export(
    checkpoint: Checkpoint, folder: Path, dtype: str, shard_bytes: int, source: Path | None, end_of_text: int | None
) -> list[str]:
    """Writes the model of a checkpoint to `folder`. Returns the file names.

    Takes the arguments of `write_pretrained`. Raises `CheckpointError` for an unreadable checkpoint, and `ModelError`
    as `write_pretrained` does.
    """
    config = parse_model(checkpoint.facts["model"])
    return write_model(config, _Values(checkpoint), folder, dtype, shard_bytes, source, end_of_text)


def write_model(
    config: ModelConfig,
    value: Callable[[str, str], Tensor],
    folder: Path,
    dtype: str,
    shard_bytes: int,
    source: Path | None,
    end_of_text: int | None,
) -> list[str]:
    """Writes a model with the tokenizer of the run whose files are in `source`. Returns the file names.

    Takes the arguments of `write_pretrained`, and raises as it does.
    """
    facts = token_facts(source, config, end_of_text)
    return write_pretrained(
        folder,
        config,
        value,
        dtype,
        shard_bytes=shard_bytes,
        source=source,
        end_of_text=end_of_text,
        carried=facts.files,
        ids=facts.ids,
    )


def export_adapter(checkpoint: Checkpoint, folder: Path, base: str) -> list[str]:
    """Writes the adapters of a checkpoint to `folder` in `peft`'s format. Returns the file names.

    `base` names the base model. Raises `CheckpointError` for a checkpoint that has no adapters or is unreadable, and
    `ModelError` as `write_adapter` does.
    """
    lora = lora_of(checkpoint)
    if lora is None:
        raise CheckpointError(f"{checkpoint.folder} has no adapters: its run has no [lora]; leave --adapter out")
    # Adapters are small, so all are held at once.
    adapters = {(block, name): value for block, name, value in checkpoint.parameters() if is_adapter(name)}
    config = parse_model(checkpoint.facts["model"])
    return write_adapter(folder, config, lora, lambda block, name: adapters[block, name], base)


class _Values:
    # Callers ask in the order of blocks, so one block in memory is enough.
    def __init__(self, checkpoint: Checkpoint) -> None:
        self._blocks = groupby(merged_values(checkpoint), key=lambda each: each[0])
        self._block = ""
        self._values: dict[str, Tensor] = {}

    def __call__(self, block: str, param: str) -> Tensor:
        while block != self._block:
            self._block, parameters = next(self._blocks)
            self._values = {name: value for _, name, value in parameters}
        return self._values[param]


_PAD = "<|pad|>"
_FILLED = 0  # the id that fills the rows of pairs (terrace.data.pairs); no text of bytes ends with it


@dataclass(frozen=True, kw_only=True)
class TokenFacts:
    """Tokenizer files that replace those of the run's source, and token ids for config.json."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    ids: Mapping[str, int | None] = field(default_factory=dict)


def token_facts(source: Path | None, config: ModelConfig, end_of_text: int | None) -> TokenFacts:
    """The `TokenFacts` of an export of a run whose tokenizer files are in `source`."""
    if source is None or not (source / TOKENIZER).is_file():
        return TokenFacts(ids={"pad_token_id": _FILLED} if has_scalar_head(config) else {})
    tokenizer = load_tokenizer(source)
    assert isinstance(tokenizer, FileTokenizer), "a file"
    ends = ends_of(tokenizer, source, folder=source)
    files = carried_files(source, end_of_text)
    if has_scalar_head(config):
        return _filled(files, tokenizer, filler(tokenizer, source, ends), config)
    # Of several, the first is the one that ends a text.
    ordered = sorted(ends, key=lambda end: end != tokenizer.text_tokens.end)
    return TokenFacts(files=ending({**files, **read_files(source, (CONFIG, GENERATION))}, ordered))


def _filled(files: Mapping[str, bytes], tokenizer: FileTokenizer, name: str | None, config: ModelConfig) -> TokenFacts:
    if name is not None:
        return TokenFacts(files=filling(files, name), ids={"pad_token_id": tokenizer.vocabulary.special[name]})
    new = tokenizer.vocab_size
    # A row of the model that no token has yet; without one, `transformers` scores a text at a time.
    if new >= vocabulary_size(config):
        return TokenFacts(ids={"pad_token_id": None})
    whole = {**filling(files, _PAD), TOKENIZER: with_special(files[TOKENIZER], _PAD, new)}
    return TokenFacts(files=whole, ids={"pad_token_id": new})

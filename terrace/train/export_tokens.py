"""Special tokens that an export declares beyond those of the run's model folder: the ends that the model learned, and
the pad token of a reward model.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from terrace.data.ends import ends_of, filler
from terrace.data.tokenizer import FileTokenizer, load_tokenizer
from terrace.data.tokenizer_files import ending, filling, with_special
from terrace.model.config import ModelConfig
from terrace.model.facts import has_scalar_head, vocabulary_size
from terrace.model.hf.folder import CONFIG, GENERATION, TOKENIZER, carried_files, read_files

_PAD = "<|pad|>"
_FILLED = 0  # the id that fills the rows of pairs (terrace.data.pairs); no text of bytes ends with it


@dataclass(frozen=True, kw_only=True)
class TokenFacts:
    """Files that replace those of the run's source, and keys of config.json."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    ids: Mapping[str, int | None] = field(default_factory=dict)


def token_facts(source: Path | None, config: ModelConfig, end_of_text: int | None) -> TokenFacts:
    """The facts of a run whose files for an export are in `source`."""
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

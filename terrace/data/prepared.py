"""The prepared data of a run: its sources with their token files, and the facts kept in checkpoints."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from terrace.base.errors import DataError
from terrace.data.batches import Source
from terrace.data.chat_tokens import prepare_chat
from terrace.data.config import DataConfig
from terrace.data.eval_batches import EvalSource
from terrace.data.files import find_data, find_documents
from terrace.data.found_format import record_words
from terrace.data.indexed import indexed_files, is_indexed
from terrace.data.pair_tokens import prepare_pairs
from terrace.data.pieces import unreadable
from terrace.data.sources import SourceSpec
from terrace.data.token_file import TokenFile
from terrace.data.tokenizer import Tokenizer
from terrace.data.tokens import prepare_tokens

_OF_A_SOURCE = ("digest", "weight", "documents", "too_long")
# Checkpoints that name no sources were made from one text, joined.
_OWN_ORDERS = "of its own for each source"
_HELD = "whole documents"
_BEFORE_SOURCES: Mapping[str, Any] = {"weight": 1.0, "documents": "join"}


def prepare_sources(
    data: DataConfig, tokenizer: Tokenizer, sequence: int, progress: Callable[[str], None] = lambda text: None
) -> tuple[Source, ...]:
    """Tokenises and packs every source of `data` that is not cached. `progress` receives messages.

    Raises `DataError` for data that cannot be read, tokenised, packed or written.
    """
    sources: list[Source] = []
    _check_distinct(data.sources())
    for spec in data.sources():
        tokens = _tokens(spec, data, tokenizer, progress)
        source = Source(
            tokens=tokens, name=spec.name, weight=spec.weight, documents=spec.documents, too_long=spec.too_long
        )
        # Packed now: errors show before the run, and ranks find the file.
        if source.documents == "whole":
            source.packing(sequence, data.holdout)
        for other in sources:
            if other.tokens.digest == source.tokens.digest:
                raise DataError(
                    f"{other.name} and {source.name} hold the same tokens, which would count twice: keep one entry of "
                    "data.mixture, with both weights"
                )
        sources.append(source)
    return tuple(sources)


def prepare_eval_sources(
    data: DataConfig, tokenizer: Tokenizer, sequence: int, progress: Callable[[str], None] = lambda text: None
) -> tuple[EvalSource, ...]:
    sources, around = list[EvalSource](), tokenizer.text_tokens
    for spec in data.eval_sources():
        source = EvalSource(
            tokens=_tokens(spec, data, tokenizer, progress),
            name=spec.name,
            documents=spec.documents,
            too_long=spec.too_long,
            begin=around.begin,
            end=around.end,
            context=around.context,
        )
        if source.documents == "whole":
            source.packing(sequence)
        sources.append(source)
    return tuple(sources)


def _tokens(spec: SourceSpec, data: DataConfig, tokenizer: Tokenizer, progress: Callable[[str], None]) -> TokenFile:
    # Reports what is read of a folder, before hours are spent on it.
    if not is_indexed(spec.path) and (words := find_data(spec.path, spec.split).words):
        progress(words)
    # Said, since a record may have several forms, and its format may not have been named.
    if spec.column == "text" and (words := record_words(spec.path, spec.split, spec.format)):
        progress(f"{spec.name} is taken as {words}")
    if spec.format == "chat":
        return prepare_chat(spec.path, tokenizer, data.tokenizer, data.chat_template, data.cache, spec.split, progress)
    if spec.format == "pairs":
        return prepare_pairs(spec.path, tokenizer, data.tokenizer, data.chat_template, data.cache, spec.split, progress)
    return prepare_tokens(
        spec.path, tokenizer, Path(data.cache), spec.column, spec.split, progress, separator=spec.separator
    )


def data_facts(sources: Sequence[Source], holdout: float) -> dict[str, Any]:
    """Facts, stored in checkpoints, that together with seed, batch and sequence decide which tokens a step reads."""
    orders = {"orders": _OWN_ORDERS} if len(sources) > 1 else {}
    held = {"held": _HELD} if holdout and any(source.is_split for source in sources) else {}
    return {"data": [source.facts() for source in sources], "holdout": holdout, **orders, **held}


def compare_facts(there: Mapping[str, Any], sources: Sequence[Source], holdout: float) -> dict[str, tuple[Any, Any]]:
    """Differences from the facts `there` of a checkpoint: name -> (there, here)."""
    # Old checkpoints hold one digest instead of a list of sources.
    stored = there.get("data")
    if isinstance(stored, str):
        stored = [{"digest": stored, **_BEFORE_SOURCES}]
    here = [source.facts() for source in sources]
    different: dict[str, tuple[Any, Any]] = {}
    if not isinstance(stored, list) or len(stored) != len(here):
        different["number of data sources"] = (len(stored) if isinstance(stored, list) else stored, len(here))
        return different
    for source, old, new in zip(sources, stored, here, strict=True):
        of = f" of {source.name}" if len(here) > 1 else ""
        for name in _OF_A_SOURCE:
            if old.get(name) != new.get(name):
                label = "data" if name == "digest" else f"data.{name}"
                different[f"{label}{of}"] = (old.get(name), new.get(name))
    # Earlier checkpoints of a mixture had one order for all of its sources.
    if len(here) > 1 and there.get("orders", "one for all") != _OWN_ORDERS:
        different["the order of sources"] = (there.get("orders", "one for all"), _OWN_ORDERS)
    if there.get("holdout", 0.0) != holdout:
        different["data.holdout"] = (there.get("holdout", 0.0), holdout)
    # Earlier versions held out sequences, with parts of documents whose other parts were trained on.
    elif holdout and any(source.is_split for source in sources) and there.get("held") != _HELD:
        different["what is held out"] = (there.get("held", "sequences"), _HELD)
    return different


def _check_distinct(specs: Sequence[SourceSpec]) -> None:
    """Raises `DataError` for a file that would be read twice, through a link or another path."""
    seen: dict[tuple[int, int, str], tuple[Path, str]] = {}
    for spec in specs:
        for file in indexed_files(spec.path) if is_indexed(spec.path) else find_documents(spec.path, spec.split):
            try:
                status = file.stat()
            except OSError as error:
                raise unreadable(file, error) from error
            # Columns of one table are different texts.
            other, of = seen.setdefault((status.st_dev, status.st_ino, spec.column), (file, spec.name))
            if other is not file:
                both = spec.name if of == spec.name else f"{of} and {spec.name} of data.mixture"
                raise DataError(f"{both}: {other} and {file} are one file, which would count twice; leave one out")

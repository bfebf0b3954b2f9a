"""A corpus tokenised once, into a memory-mapped file.

`<name>-<key>.tokens` holds little-endian uint16 or uint32 ids, each document between the tokens that begin and end a
text. `.starts` holds the document starts (little-endian int64, in tokens, ascending from 0), `.sums` the checksums of
both (terrace.data.block_sums), and `.json` describes them. The key is a hash of the tokenizer and of the path, size and
modification time of every source file, so another source or tokenizer gets another file; terrace.data.originals detects
sources that change under the same key. A mapped file never changes. Old files are not removed, since other runs may
still read them; delete them by hand when no run uses them.

A file being written has another name (terrace.data.partial). The description is written last, so a description implies
a complete cache.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt

from terrace.base.errors import DataError
from terrace.base.progress import Passing
from terrace.base.words import counted
from terrace.data.cache import CorpusDescription, cache_file, file_stem, id_dtype, made_once, token_file
from terrace.data.corpus import corpus_units, read_unit
from terrace.data.files import find_data, find_documents, separators
from terrace.data.forms import CODE_SUFFIXES
from terrace.data.indexed import is_indexed, open_indexed
from terrace.data.originals import Originals
from terrace.data.partial import Noted, Partial
from terrace.data.pieces import DocumentPart, Unit, cut
from terrace.data.text_tokens import END_OF_TEXT_NAMES
from terrace.data.token_file import TokenFile
from terrace.data.tokenizer import FileTokenizer, Tokenizer

_FORMAT = "terrace-tokens-5"  # part of the key: raise it when the same corpus would give other bytes

_TELL_S = 1.0
_NOTE_BYTES = 16 << 20  # bytes of the corpus between two journal entries
_BATCH_CHARACTERS, _BATCH_PIECES = 1 << 21, 1 << 14  # a tokenizer needs some hundred bytes of memory a character

# Where a token's name is no sign of several documents: in programs, and in HTML, whose </s> ends struck text.
_MARKUP_SUFFIXES = CODE_SUFFIXES | {".html"}

Progress = Callable[[str], None]


def prepare_tokens(
    path: str | Path,
    tokenizer: Tokenizer,
    cache_dir: str | Path,
    column: str = "text",
    split: str = "",
    progress: Progress = lambda text: None,
    *,
    separator: str = "",
) -> TokenFile:
    """The token file of the corpus `path`, made in `cache_dir` if missing.

    `progress` receives messages, a `Passing` one about once a second. Waits if another process is making the file, and
    continues where a killed process stopped. An error leaves no file behind. Raises `DataError` for a corpus that
    cannot be read (terrace.data.corpus) or changes meanwhile, a damaged cache, and a folder that cannot be written.
    """
    # An indexed data set holds ids already, so no column is read.
    if is_indexed(path):
        _check_plain(path, column=column, split=split, separator=separator)
        return open_indexed(path, cache_dir)
    originals = Originals(path, lambda: find_documents(path, split))
    around, files = tokenizer.text_tokens, find_data(path, split).files
    identity = (
        _FORMAT,
        tokenizer.fingerprint,
        tokenizer.vocab_size,
        around.begin,
        around.end,
        column,
        separator,
        separators(files),
    )
    target = cache_file(cache_dir, file_stem(path, "corpus"), (*identity, originals.identity()))

    def make(written: dict[str, int]) -> CorpusDescription:
        partial = Partial(target, originals.stamp())
        noted = partial.noted
        try:
            _write_tokens(partial, corpus_units(path, column, split, separator=separator), tokenizer, progress)
            if not noted.has_text:
                raise DataError(f"data {path} holds no text, only white space or empty documents; give it some text")
            if noted.num_tokens == 0:
                raise DataError("the tokenizer turned all of the text into no tokens; use another tokenizer")
            partial.finish()
        except Exception:
            written["num_bytes"] = noted.num_bytes
            partial.remove()
            raise
        except BaseException:
            # Killed or interrupted: the next process continues from the journal.
            partial.close()
            raise
        # Without an id that ends documents, the starts are part of the contents.
        if around.end is None:
            partial.digest.update(target.with_suffix(".starts").read_bytes())
        return CorpusDescription(
            format=_FORMAT,
            corpus=os.fspath(path),
            tokenizer=tokenizer.fingerprint,
            dtype=id_dtype(tokenizer.vocab_size),
            num_tokens=noted.num_tokens,
            max_token=noted.max_token,
            digest=partial.digest.hexdigest(),
            num_documents=noted.num_documents,
            spelled=noted.spelled,
            num_spelled=noted.num_spelled,
        )

    found: list[CorpusDescription] = []

    def opened(description: CorpusDescription) -> TokenFile:
        found.append(description)
        return token_file(target, description)

    made = made_once(target, (".tokens", ".starts"), CorpusDescription, make, opened, originals, progress)
    _say_spelled(path, found[-1], progress, in_records=all(file.holds_records for file in files))
    return made


def encode_whole(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text of any length, encoded in the same pieces as training text.

    A tokenizer needs some hundred bytes of memory per character, too much for a long text as a whole.
    """
    return [token for piece in cut([text]) for token in tokenizer.encode(piece.text).tolist()]


def _check_plain(path: str | Path, **keys: str) -> None:
    for key, value in keys.items():
        if value != ("text" if key == "column" else ""):
            raise DataError(f"data.{key} = {value!r} has no effect on the indexed data set {path}: leave it out")


def _say_spelled(path: str | Path, description: CorpusDescription, progress: Progress, *, in_records: bool) -> None:
    if description.num_spelled:
        times = counted(description.num_spelled, "time", ",")
        fix = (
            "if it ends the records, remove it, since each is a document with its end, and if it parts them, split them"
            if in_records
            else f"if it stands between documents, give --data.separator '{description.spelled}'"
        )
        progress(f"{path} spells out {description.spelled} {times}, read as characters: {fix}")


def _write_tokens(partial: Partial, units: Iterable[Unit], tokenizer: Tokenizer, progress: Progress) -> None:
    noted = partial.noted
    stored = np.dtype(id_dtype(tokenizer.vocab_size)).newbyteorder("<")
    around = tokenizer.text_tokens
    begin = np.array(around.begin, dtype=np.int64)
    end = np.array([] if around.end is None else [around.end], dtype=np.int64)
    own = [tokenizer.name(around.end)] if isinstance(tokenizer, FileTokenizer) and around.end is not None else []
    marks = dict.fromkeys((*own, *END_OF_TEXT_NAMES))
    began, first = time.monotonic(), noted.num_tokens
    # The rate counts only tokens made by this process.
    told = began
    if first:
        progress(f"going on after {first / 1e6:.1f} M tokens that are there")
    for num_done, group in _groups(units, noted.num_units):
        pieces = chain.from_iterable(_looked_at(unit, marks, noted) for unit in group)
        for piece, ids in _encoded(pieces, tokenizer, noted):
            # The first and the last piece of a document get the tokens around it.
            whole = np.concatenate([begin[: len(begin) * noted.begins], ids, end[: len(end) * piece.ends_document]])
            if whole.size and not 0 <= int(whole.min()) <= int(whole.max()) < tokenizer.vocab_size:
                raise DataError(
                    f"the tokenizer gave ids from {whole.min()} to {whole.max()}, outside its vocabulary of "
                    f"{tokenizer.vocab_size}; use a tokenizer whose files belong together"
                )
            partial.add(whole, whole.astype(stored).tobytes(), piece.ends_document)
            now = time.monotonic()
            if now - told > _TELL_S:
                told = now
                rate = (noted.num_tokens - first) / (now - began)
                progress(Passing(f"tokenising: {noted.num_tokens / 1e6:.1f} M tokens, {rate:,.0f} a second"))
        if sum(unit.num_bytes for unit in group) >= _NOTE_BYTES:
            partial.note(num_done)
    if noted.num_empty:
        progress(f"{noted.num_empty} empty documents were left out")


def _looked_at(unit: Unit, marks: Iterable[str], noted: Noted) -> Iterator[DocumentPart]:
    """Yields the pieces of `unit`, and notes the first of `marks` that prose or records spell out."""
    is_prose = unit.kind != "text" or not (unit.separator or unit.file.suffix.lower() in _MARKUP_SUFFIXES)
    for piece in read_unit(unit):
        if is_prose:
            noted.spelled = noted.spelled or next((mark for mark in marks if mark in piece.text), "")
            noted.num_spelled += piece.text.count(noted.spelled) if noted.spelled else 0
        yield piece


def _groups(units: Iterable[Unit], num_done: int) -> Iterator[tuple[int, list[Unit]]]:
    held: list[Unit] = []
    for number, unit in enumerate(units, start=1):
        # Already written by the killed process.
        if number <= num_done:
            continue
        held.append(unit)
        if sum(each.num_bytes for each in held) >= _NOTE_BYTES:
            yield number, held
            held = []
    if held:
        yield number, held


def _encoded(
    pieces: Iterable[DocumentPart], tokenizer: Tokenizer, noted: Noted
) -> Iterator[tuple[DocumentPart, npt.NDArray[np.int64]]]:
    # The next batch is encoded while the caller works on this one.
    with ThreadPoolExecutor(1) as ahead:
        waiting: deque[tuple[list[DocumentPart], Future[list[npt.NDArray[np.int64]]]]] = deque()
        for batch in _batched(pieces, noted):
            waiting.append((batch, ahead.submit(tokenizer.encode_batch, [piece.text for piece in batch])))
            if len(waiting) > 1:
                done, ids = waiting.popleft()
                yield from zip(done, ids.result(), strict=True)
        for done, ids in waiting:
            yield from zip(done, ids.result(), strict=True)


def _batched(pieces: Iterable[DocumentPart], noted: Noted) -> Iterator[list[DocumentPart]]:
    held: list[DocumentPart] = []
    size, begins = 0, noted.begins
    for piece in pieces:
        is_empty = begins and piece.ends_document and not piece.text
        begins = piece.ends_document
        if is_empty:
            noted.num_empty += 1
            continue
        noted.has_text = noted.has_text or not piece.text.isspace()
        held.append(piece)
        size += len(piece.text)
        # Both bounds: many short pieces cost memory per piece, too.
        if size >= _BATCH_CHARACTERS or len(held) >= _BATCH_PIECES:
            yield held
            held, size = [], 0
    if held:
        yield held

"""Chat data tokenised once: the same files as those of a text (terrace.data.tokens), with a mask.

A conversation is a document. The key is a hash of the tokenizer, the chat template and of path, size and modification
time of every source file.
"""

import errno
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import numpy.typing as npt

from terrace.base.errors import ConfigError, DataError
from terrace.base.files import sync_folder, write_atomic
from terrace.base.schema import load, read_table
from terrace.data.chat import ChatReader, load_encoder
from terrace.data.files import JSON_LINES_SUFFIXES, find_documents
from terrace.data.sources import STDLIB
from terrace.data.template import load_template
from terrace.data.token_file import TokenFile
from terrace.data.tokenizer import Tokenizer

_FORMAT = "terrace-chat-1"  # part of the key: raise it when the same data would give other bytes


@dataclass(frozen=True, kw_only=True)
class _Description:
    """The `.json` beside the files; `corpus` is there for people."""

    format: str
    corpus: str
    tokenizer: str
    template: str
    dtype: Literal["uint16", "uint32"]
    num_tokens: int
    max_token: int
    digest: str
    num_documents: int
    num_trained: int


def prepare_chat(
    path: str | Path,
    tokenizer: Tokenizer,
    tokenizer_path: str | Path,
    template_path: str | Path,
    cache_dir: str | Path,
) -> TokenFile:
    """Return the token file of the conversations in `path`, a `.jsonl` file or a folder of them, made unless it exists.

    Prompts and completions alone need no template. Raises `DataError` naming file and line for what is no conversation,
    has nothing to train on or is refused by the template; also for a missing template, a damaged cache, and a folder
    that cannot be written. An error leaves no file behind.
    """
    files = _files(path)
    template = load_template(tokenizer_path, template_path, needed=_has_messages(files))
    fingerprint = template.fingerprint
    identity = (_FORMAT, tokenizer.fingerprint, fingerprint, [_identity(file) for file in files])
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(path).stem)[:40].strip("-") or "chat"
    target = Path(cache_dir) / f"{name}-{key}.tokens"
    if target.with_suffix(".json").exists():
        return _token_file(target, _read_description(target))
    reader = ChatReader(template, load_encoder(tokenizer_path, tokenizer, template))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        tally = _write(target, files, reader, tokenizer.vocab_size)
        if identity[-1] != [_identity(file) for file in files]:
            raise DataError(f"data {path} changed while it was read; try again when nothing writes to it")
        description = _Description(
            format=_FORMAT, corpus=os.fspath(path), tokenizer=tokenizer.fingerprint, template=fingerprint, **tally
        )
        write_atomic(target.with_suffix(".json"), json.dumps(asdict(description), indent=2) + "\n")
        sync_folder(target.parent)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        fix = "free some space or choose another data.cache" if full else "choose a data.cache that you may write to"
        raise DataError(f"cannot write the token file {target}: {error.strerror}; {fix}") from error
    return _token_file(target, description)


def _write(target: Path, files: list[Path], reader: ChatReader, vocab_size: int) -> dict[str, Any]:
    """Write ids, starts and mask beside `target`; return what the description says of them."""
    dtype: Literal["uint16", "uint32"] = "uint16" if vocab_size <= 1 << 16 else "uint32"
    stored = np.dtype(dtype).newbyteorder("<")
    digest = hashlib.blake2b(digest_size=16)
    starts: list[int] = []
    num_tokens = num_trained = 0
    max_token = -1
    with ExitStack() as made:
        tokens_file, mask_file, starts_file = (
            made.enter_context(_Renamed(target.with_suffix(suffix))) for suffix in (".tokens", ".mask", ".starts")
        )
        for ids, mask in _conversations(files, reader, vocab_size):
            raw, raw_mask = ids.astype(stored).tobytes(), mask.tobytes()
            tokens_file.write(raw)
            mask_file.write(raw_mask)
            digest.update(len(raw).to_bytes(8, "little") + raw + raw_mask)
            starts.append(num_tokens)
            num_tokens += len(ids)
            num_trained += int(mask.sum())
            max_token = max(max_token, int(ids.max()))
        starts_file.write(np.array(starts, dtype="<i8").tobytes())
    return {
        "dtype": dtype,
        "num_tokens": num_tokens,
        "max_token": max_token,
        "digest": digest.hexdigest(),
        "num_documents": len(starts),
        "num_trained": num_trained,
    }


def _conversations(
    files: list[Path], reader: ChatReader, vocab_size: int
) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]]:
    any_line = False
    for line, where in _lines(files):
        ids, mask = reader.tokens(line, where)
        if int(ids.max()) >= vocab_size:
            raise DataError(
                f"{where}: the tokenizer gave id {ids.max()}, outside its vocabulary of {vocab_size}; use a tokenizer "
                "whose files belong together"
            )
        any_line = True
        yield ids, mask
    if not any_line:
        raise DataError(f"data {files[0] if len(files) == 1 else files[0].parent} holds no conversation; give it one")


def _lines(files: list[Path]) -> Iterator[tuple[str, str]]:
    """Yield each line that is not empty, and where it stands."""
    for file in files:
        try:
            with file.open("rb") as stream:
                for number, raw in enumerate(stream, start=1):
                    where = f"{file}:{number}"
                    try:
                        line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                    except UnicodeDecodeError as error:
                        raise DataError(f"{where} is not UTF-8; convert the file") from error
                    if line.strip():
                        yield line, where
        except OSError as error:
            raise DataError(f"cannot read data {file}: {error.strerror}; check the path and its permissions") from error


def _files(path: str | Path) -> list[Path]:
    if path == STDLIB:
        raise DataError(
            f'data.format = "chat" needs conversations, and data.path = {STDLIB!r} is source text: name a .jsonl file '
            "with --data"
        )
    files = find_documents(path)
    for file in files:
        if file.suffix.lower() not in JSON_LINES_SUFFIXES:
            raise DataError(f"data {file} is no .jsonl file, as chat data must be; convert it or move it elsewhere")
    return files


def _has_messages(files: list[Path]) -> bool:
    """Whether some line holds messages, as far as a look at its text can tell: then a template is needed."""
    return any('"messages"' in line for line, _ in _lines(files))


def _identity(file: Path) -> tuple[str, int, int]:
    try:
        status = file.stat()
    except OSError as error:
        raise DataError(f"cannot read data {file}: {error.strerror}; keep it in place") from error
    return str(file.resolve()), status.st_size, status.st_mtime_ns


def _read_description(target: Path) -> _Description:
    described = target.with_suffix(".json")
    try:
        return load(_Description, read_table(described), "tokens")
    except ConfigError as error:
        raise DataError(f"{described} is damaged ({error}); delete it, and it will be made again") from error


def _token_file(target: Path, description: _Description) -> TokenFile:
    file = TokenFile(
        path=target,
        dtype=description.dtype,
        num_tokens=description.num_tokens,
        max_token=description.max_token,
        digest=description.digest,
        num_documents=description.num_documents,
        starts=target.with_suffix(".starts"),
        mask=target.with_suffix(".mask"),
    )
    for check in (file.open, file.open_starts, file.open_mask):
        check()  # the size
    return file


class _Renamed:
    """A file under a temporary name, which gets its own when everything is in it, and is removed else."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> IO[bytes]:
        handle, self._temporary = tempfile.mkstemp(dir=self._path.parent, prefix=f".{self._path.name}.")
        self._file = os.fdopen(handle, "wb", buffering=1 << 20)
        return self._file

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            self._file.close()
            if error is None:
                os.chmod(self._temporary, 0o644)
                os.replace(self._temporary, self._path)
        finally:
            Path(self._temporary).unlink(missing_ok=True)

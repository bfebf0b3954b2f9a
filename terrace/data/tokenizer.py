"""From text to token ids and back.

Two tokenizers: raw UTF-8 bytes, which need no file, and any Hugging Face `tokenizer.json`, through the `tokenizers`
package. If the data spell out a special token ("<|endoftext|>"), it is encoded as plain text, so that data cannot forge
the end of a document. In a prompt, written by the user, it is the special token.

`text_tokens` surround a text in training, evaluation and generation alike; terrace.data.text_tokens finds them.
"""

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from terrace.base.errors import DataError, TerraceError
from terrace.base.extras import needs
from terrace.base.files import read_bounded
from terrace.base.foreign import read_file
from terrace.data.converted import tokenizer_file
from terrace.data.text_tokens import AUTO, TextTokens, Vocabulary, find_text_tokens, read_tables, state_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Encoder


BYTES = "bytes"
_MOST_TOKENS = 1 << 24  # sixty times the largest vocabulary published; the package takes memory for holes between ids
T = TypeVar("T")
# Seconds of a call, and characters of one more; a machine that is shared encodes a hundred times as many: a guess.
_LIMIT_S, _PER_S = 5.0, 20_000


class Tokenizer(Protocol):
    @property
    def vocab_size(self) -> int:
        """One more than the largest possible id."""

    @property
    def text_tokens(self) -> TextTokens:
        """The ids put around each document. Without an end token, documents follow each other unmarked."""

    @property
    def fingerprint(self) -> str:
        """Equal for two tokenizers only if they encode identically and put the same tokens around a text."""

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        """Ids of `text`, shape (num_tokens,), without any special token."""

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        """Ids of every text, as `encode` gives them."""

    def encode_prompt(self, text: str, *, begins_text: bool = True) -> npt.NDArray[np.int64]:
        """Ids of a prompt, in which special tokens are encoded as such.

        The tokens that begin a text are prepended if the prompt `begins_text` and does not spell them out itself.
        """

    def decode(self, ids: Sequence[int], *, keep_special: bool = False) -> str:
        """Text of `ids`; invalid UTF-8 becomes U+FFFD. Special tokens are dropped unless kept."""


class ByteTokenizer:
    """Ids 0-255 are the bytes of the UTF-8 text, 256 ends a document."""

    vocab_size: int = 257
    text_tokens: TextTokens = TextTokens(end=256, context=256)
    fingerprint: str = "bytes-1"

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int64)

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        return [self.encode(text) for text in texts]

    def encode_prompt(self, text: str, *, begins_text: bool = True) -> npt.NDArray[np.int64]:
        return self.encode(text)

    def decode(self, ids: Sequence[int], *, keep_special: bool = False) -> str:
        return bytes(token for token in ids if 0 <= token < 256).decode("utf-8", errors="replace")


class FileTokenizer:
    """A Hugging Face `tokenizer.json`. Use `load_tokenizer` to get one."""

    def __init__(self, encoder: "Encoder", digest: str, vocabulary: Vocabulary, text_tokens: TextTokens) -> None:
        # A tokenizer.json may ask for truncation and padding; both would corrupt a corpus silently.
        encoder.no_truncation()
        encoder.no_padding()
        encoder.encode_special_tokens = True
        self._encoder = encoder
        self._has_patterns = '"Regex"' in encoder.to_str()
        # Decoding a token at a time is too frequent to be watched without a reason.
        self._decodes_by_patterns = '"Regex"' in json.dumps(state_of(encoder.decoder))
        self.vocabulary = vocabulary
        # Ids may have holes, so that the number of words is less than the largest id.
        self.vocab_size: int = max(encoder.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.text_tokens = text_tokens
        self.fingerprint: str = digest
        # Earlier versions put nothing before a text and guessed its end: what they made has the digest alone.
        if text_tokens.begin or text_tokens.end != vocabulary.guess:
            self.fingerprint += f"-bos{','.join(map(str, text_tokens.begin))}-eos{text_tokens.end}"

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        """Ids of every text, encoded on all cores.

        Raises `DataError` for a text that the vocabulary cannot express, for example because there is no unknown token.
        """
        given = list(texts)
        encoded = self._called(
            lambda: self._encoder.encode_batch_fast(given, add_special_tokens=False),
            sum(map(len, given)),
            "encode the text",
            "give it an unknown word, or name another with --data.tokenizer",
            is_watched=self._has_patterns,
        )
        return [np.array(each.ids, dtype=np.int64) for each in encoded]

    def encode_prompt(self, text: str, *, begins_text: bool = True) -> npt.NDArray[np.int64]:
        self._encoder.encode_special_tokens = False
        try:
            ids = self.encode(text)
        finally:
            self._encoder.encode_special_tokens = True
        begin = self.text_tokens.begin
        return np.array([*begin, *ids], dtype=np.int64) if begins_text and tuple(ids[: len(begin)]) != begin else ids

    def decode(self, ids: Sequence[int], *, keep_special: bool = False) -> str:
        given = [int(token) for token in ids]
        return str(
            self._called(
                lambda: self._encoder.decode(given, skip_special_tokens=not keep_special),
                len(given),
                "decode the tokens",
                "name another tokenizer",
                is_watched=self._decodes_by_patterns,
            )
        )

    def _called(self, work: Callable[[], T], size: int, what: str, fix: str, *, is_watched: bool) -> T:
        try:
            if not is_watched:
                return work()
            limit_s = _LIMIT_S + size / _PER_S
            slow = f"name another tokenizer: {self.vocabulary.path} may backtrack, and to {what} ({size:,} long)"
            return within(limit_s, work, slow)
        except TerraceError:
            raise
        except BaseException as error:  # the package raises bare Exception, and where it panics an error of its own
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            reason = " ".join(str(error).split())
            if "Regex" in reason:
                fix = "its pattern backtracks; name another tokenizer"
            raise DataError(f"the tokenizer cannot {what} ({reason}): {fix}") from error

    def words(self) -> str:
        tokens = self.text_tokens
        begin = " ".join(map(self._shown, tokens.begin))
        begins = f"texts begin with {begin}, {tokens.begin_from}" if begin else "texts have no token before them"
        if tokens.end is None:
            return f"{begins}, and none at their end: name one with data.eos"
        return f"{begins}; they end with {self._shown(tokens.end)}, {tokens.end_from}"

    def _shown(self, token: int) -> str:
        return f"{self.name(token)!r} ({token})"

    def name(self, token: int) -> str:
        return str(self._encoder.id_to_token(token))

    def as_keys(self) -> tuple[bool | str, str]:
        """Values for `data.bos` and `data.eos` that pin the tokens found, so that later changes of the folder have no
        effect.
        """
        begin, end = self.text_tokens.begin, self.text_tokens.end
        # Several tokens before a text cannot be named in a key, so they are searched for again.
        bos: bool | str = AUTO if len(begin) > 1 else self.name(begin[0]) if begin else False
        return bos, AUTO if end is None else self.name(end)


def trained_otherwise(there: str, tokenizer: Tokenizer) -> str:
    """Advice for a checkpoint that was trained with another tokenizer, whose fingerprint is `there`."""
    if not isinstance(tokenizer, FileTokenizer) or tokenizer.fingerprint.split("-bos")[0] != there.split("-bos")[0]:
        return "name the tokenizer of its config.toml"
    if "-bos" in there:
        return "keep data.bos and data.eos, and the files beside the tokenizer, as they were"
    guess = tokenizer.vocabulary.guess
    eos = "" if guess is None else f" and eos = {tokenizer.name(guess)!r}"
    return f"a version before data.bos and data.eos made it, so set bos = false{eos} under [data] in its config.toml"


def load_tokenizer(name_or_path: str | Path, bos: bool | str = AUTO, eos: str = AUTO) -> ByteTokenizer | FileTokenizer:
    """The tokenizer "bytes", or the one at a path: a `tokenizer.json`, or a folder that holds one, or another form of
    it.

    `bos` and `eos` are `data.bos` and `data.eos` (terrace.data.text_tokens). Raises `DataError` for a path that is
    missing, unreadable or not a tokenizer, for tokens that are not in its vocabulary, and if `tokenizers` is not
    installed.
    """
    if name_or_path == BYTES:
        for key, value in (("bos", bos), ("eos", eos)):
            if value not in (AUTO, False):
                raise DataError(f'data.{key} = {value!r} has no effect on data.tokenizer = "bytes": leave it out')
        return ByteTokenizer()
    path = tokenizer_file(Path(name_or_path))
    try:
        # Beside it stand other files of its folder; a file of another name is the user's own.
        raw = read_file(path, path.parent) if path.name == "tokenizer.json" else read_bounded(path)
    except OSError as error:
        raise DataError(
            f"cannot read tokenizer {path}: {error.strerror}; give {BYTES!r}, a tokenizer.json or a folder "
            "that holds one"
        ) from error
    try:
        from tokenizers import Tokenizer as Encoder
    except ImportError as error:
        # The package is optional: the byte tokenizer works without it.
        raise DataError(f"tokenizer {path} {needs('tokenizers')}") from error
    try:
        encoder = Encoder.from_str(raw.decode("utf-8"))
    except BaseException as error:  # the package raises bare Exception for a malformed file, or panics
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        reason = " ".join(str(error).split())
        raise DataError(f"{path} is not a tokenizer.json ({reason}); export it again") from error
    largest = max(encoder.get_vocab(with_added_tokens=True).values(), default=-1)
    if largest >= _MOST_TOKENS:
        raise DataError(f"{path} has the token {largest}, and tokens must be below {_MOST_TOKENS}; export it again")
    # transformers reads the files beside a tokenizer of this name alone.
    folder = path.parent if path.name == "tokenizer.json" else None
    special = {token.content: index for index, token in encoder.get_added_tokens_decoder().items() if token.special}
    vocabulary = Vocabulary(path=path, special=special, id_of=encoder.token_to_id)
    found = find_text_tokens(vocabulary, state_of(encoder.post_processor), read_tables(folder), bos, eos)
    tokenizer = FileTokenizer(encoder, f"sha256-{hashlib.sha256(raw).hexdigest()}", vocabulary, found)
    # An untrained tokenizer encodes everything to nothing.
    if tokenizer.vocab_size == 0:
        raise DataError(f"{path} has an empty vocabulary; export it again after training it")
    for token in found.begin:
        if not 0 <= token < tokenizer.vocab_size:
            raise DataError(
                f"{path} puts the token {token} before a text, and its largest is {tokenizer.vocab_size - 1}: name "
                "another with --data.bos TOKEN, or none with --data.bos false"
            )
    if found.end is not None and not 0 <= found.end < tokenizer.vocab_size:
        raise DataError(
            f"{folder} names the token {found.end} for the end of a text, but the largest of {path.name} is "
            f"{tokenizer.vocab_size - 1}: name it with --data.eos TOKEN"
        )
    return tokenizer


_STDERR = 2
_lock = threading.Lock()  # of the descriptor


# The regular expressions of a tokenizer.json are untrusted, and those of `tokenizers` backtrack: a line of a hundred
# characters can take centuries. The package releases the interpreter lock while it works, so the call runs in a thread
# that can be abandoned and ends with the process.
def within(limit_s: float, work: Callable[[], T], words: str) -> T:
    """Runs `work` with a time limit. Returns its result or raises its error.

    Raises `DataError` with `words` if it takes longer than `limit_s`.
    """
    found: list[T] = []
    raised: list[BaseException] = []

    def call() -> None:
        try:
            found.append(work())
        except BaseException as error:  # raised again below
            raised.append(error)

    # A daemon, since the end of the process must not wait for it.
    thread = threading.Thread(target=call, name="terrace bounded call", daemon=True)
    with _set_apart() as drop:
        thread.start()
        thread.join(limit_s)
        if raised and is_panic(raised[0]):
            drop()
    if raised:
        raise raised[0]
    if not found:
        raise DataError(f"{words} takes more than {limit_s:.0f} s")
    return found[0]


def is_panic(error: BaseException) -> bool:
    """Whether an error is a Rust panic, whose class no module exports."""
    return type(error).__name__ == "PanicException"


@contextmanager
def _set_apart() -> Iterator[Callable[[], None]]:
    # What is written to standard error meanwhile, by other threads too, comes after the block, unless it is dropped.
    if not hasattr(os, "memfd_create"):
        yield lambda: None
        return
    with _lock:
        kept, apart = os.dup(_STDERR), os.memfd_create("stderr")
        os.dup2(apart, _STDERR)
        try:
            yield lambda: os.ftruncate(apart, 0)
        finally:
            os.dup2(kept, _STDERR)
            panic = os.pread(apart, os.fstat(apart).st_size, 0)
            if panic:
                os.write(_STDERR, panic)
            os.close(apart)
            os.close(kept)

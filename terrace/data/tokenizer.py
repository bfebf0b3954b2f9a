"""From text to token ids and back.

Two tokenizers: raw UTF-8 bytes, which need nothing, and any Hugging Face `tokenizer.json`, through the `tokenizers`
package. Only plain text is encoded: a special token that happens to be spelled out in the data ("<|endoftext|>") is
text there, so that data cannot forge the end of a document, and no token is added at either end of a text.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from terrace.base.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Encoder

BYTES = "bytes"

# A tokenizer.json does not say which of its special tokens ends a document, so this is a guess: the
# first of these that it declares as special. The order matters for families that kept an older
# tokenizer's </s> beside their own <|endoftext|>.
END_OF_TEXT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")


class Tokenizer(Protocol):
    """Interface that preparing data needs of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id that `encode` or `end_of_text` can give."""

    @property
    def end_of_text(self) -> int | None:
        """The id put after each document; without one, documents follow each other unmarked."""

    @property
    def fingerprint(self) -> str:
        """Equal for two tokenizers only if they encode alike."""

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        """Ids of `text`, shape (num_tokens,), without any special token."""

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        """Ids of every text, as `encode` gives them."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; special tokens are left out, broken UTF-8 becomes U+FFFD."""


class ByteTokenizer:
    """Ids 0-255 are the bytes of the UTF-8 text, 256 ends a document."""

    vocab_size: int = 257
    end_of_text: int | None = 256
    fingerprint: str = "bytes-1"

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int64)

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if 0 <= token < 256).decode("utf-8", errors="replace")


class FileTokenizer:
    """A Hugging Face `tokenizer.json`. Use `load_tokenizer` to get one.

    `end_of_text` is a guess: the first of `END_OF_TEXT_NAMES` among the special tokens, else `None`.
    """

    def __init__(self, encoder: "Encoder", fingerprint: str) -> None:
        # A tokenizer.json may ask for truncation and padding; both would corrupt a corpus silently.
        encoder.no_truncation()
        encoder.no_padding()
        encoder.encode_special_tokens = True
        special = {token.content: index for index, token in encoder.get_added_tokens_decoder().items() if token.special}
        found = [special[name] for name in END_OF_TEXT_NAMES if name in special]
        self._encoder = encoder
        # Ids may have holes, so that the number of words is less than the largest id.
        self.vocab_size: int = max(encoder.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.end_of_text: int | None = found[0] if found else None
        self.fingerprint: str = fingerprint

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        """Ids of every text; the package uses all cores.

        Raises `DataError` for a text that the tokenizer cannot express in its vocabulary, such as one without an
        unknown word.
        """
        try:
            encoded = self._encoder.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # the package raises bare Exception
            reason = " ".join(str(error).split())
            raise DataError(
                f"the tokenizer cannot encode the text ({reason}): give it an unknown word, or name another with "
                "--data.tokenizer"
            ) from error
        return [np.array(each.ids, dtype=np.int64) for each in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._encoder.decode([int(token) for token in ids], skip_special_tokens=True))


def load_tokenizer(name_or_path: str | Path) -> Tokenizer:
    """The tokenizer "bytes", or the one in a `tokenizer.json` or in a folder that holds one.

    Raises `DataError` for a path that is missing, unreadable or not a tokenizer, and when the `tokenizers` package is
    not installed.
    """
    if name_or_path == BYTES:
        return ByteTokenizer()
    path = Path(name_or_path)
    try:
        if path.is_dir():
            path = path / "tokenizer.json"
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"cannot read tokenizer {path}: {error.strerror}; give {BYTES!r}, a tokenizer.json or a folder "
            "that holds one"
        ) from error
    try:
        from tokenizers import Tokenizer as Encoder
    except ImportError as error:
        # The package is optional: the byte tokenizer works without it.
        raise DataError(f"tokenizer {path} needs the package 'tokenizers': pip install 'terrace[hf]'") from error
    try:
        encoder = Encoder.from_str(raw.decode("utf-8"))
    except Exception as error:  # the package raises bare Exception for a malformed file
        reason = " ".join(str(error).split())
        raise DataError(f"{path} is not a tokenizer.json ({reason}); export it again") from error
    tokenizer = FileTokenizer(encoder, f"sha256-{hashlib.sha256(raw).hexdigest()}")
    # An untrained tokenizer encodes everything to nothing.
    if tokenizer.vocab_size == 0:
        raise DataError(f"{path} has an empty vocabulary; export it again after training it")
    return tokenizer

"""Makes the tokenizer.json of a folder whose tokenizer has only another form: SentencePiece, tiktoken, or a vocabulary
with merges.

`transformers` converts it once, if installed; otherwise the error names the command that does so.
"""

import importlib
import warnings
from pathlib import Path
from shlex import quote
from typing import Any

from terrace.base.errors import DataError
from terrace.base.files import write_atomic
from terrace.base.foreign import check_file
from terrace.base.sealed import ChangedFile

FILE = "tokenizer.json"
# Files that `transformers` can convert, and names used for tiktoken's format, whose pattern and special tokens are only
# defined in the family's own code.
_READ = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json")
_OTHERS = ("*.tiktoken", "tiktoken.model")


def other_form(folder: Path) -> Path | None:
    """The file that holds the tokenizer of `folder` in another form; None if it has a tokenizer.json, or no such
    file.
    """
    if (folder / FILE).exists():
        return None
    found = [folder / name for name in _READ if (folder / name).is_file()]
    return next(iter(found), None) or next((each for name in _OTHERS for each in sorted(folder.glob(name))), None)


def tokenizer_file(path: Path) -> Path:
    """The tokenizer.json at `path` or in the folder `path`, converted if the folder has only another form.

    Raises `DataError` if the conversion needs packages that are not installed, fails, or cannot be written.
    """
    if path.suffix in (".model", ".tiktoken") and path.is_file():
        raise DataError(f"tokenizer {path} is one file of a tokenizer: name its folder, {path.parent}")
    file = path / FILE if path.is_dir() else path
    original = other_form(file.parent) if file.name == FILE else None
    if original is not None:
        _convert(original, file)
    return file


def _convert(original: Path, file: Path) -> None:
    folder = str(file.parent)
    program = (
        "from transformers import AutoTokenizer; "
        f"AutoTokenizer.from_pretrained({folder!r}).backend_tokenizer.save({str(file)!r})"
    )
    fix = f"convert it: pip install transformers sentencepiece tiktoken; python -c {quote(program)}"
    if original.name not in _READ:
        raise DataError(
            f"{folder} has no {FILE}, and only its family's code knows the pattern and the special tokens of "
            f"{original.name}: take a version with {FILE}, or where transformers knows the family, {fix}"
        )
    try:
        check_file(original, file.parent)
    except OSError as error:
        raise DataError(f"cannot read tokenizer {original}: {error.strerror}") from error
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise DataError(f"{folder} has no {FILE}, but {original.name}; {fix}") from error
    try:
        # Code that lies in the folder is never run.
        made = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        encoder = made.backend_tokenizer
        text, size = encoder.to_str(), encoder.get_vocab_size(with_added_tokens=False)
    except Exception as error:  # whatever the package raises, such as for a package that it lacks
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = lines[-1] if lines else type(error).__name__
        raise DataError(f"{folder} has no {FILE}, and {original.name} cannot be read ({reason}); {fix}") from error
    # A class that finds no file of its own makes an empty tokenizer.
    if size <= len(encoder.get_added_tokens_decoder()):
        raise DataError(f"{folder} has no {FILE}, and transformers finds no tokens in {original.name}; {fix}")
    try:
        write_atomic(file, text.encode("utf-8"))
    except OSError as error:
        raise DataError(
            f"{folder} has no {FILE}, and one made of {original.name} cannot be written there ({error.strerror}): copy "
            "the folder to where it can"
        ) from error
    warnings.warn(
        f"wrote {file}, made of {original.name} by transformers {transformers.__version__}", ChangedFile, stacklevel=2
    )

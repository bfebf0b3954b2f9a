"""Checksums in the text files that Terrace writes and reads, to detect damage.

A JSON object ends with the key `crc32`, computed over all text before it; a TOML file begins with the comment
`# crc32 1a2b3c4d`, computed over the text below it. Text without a checksum is accepted: other tools and earlier
versions write such files, and a user who edits a file may delete its checksum.
"""

import re
import warnings
import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path  # for its type alone: every command imports this module, and that one takes a moment

KEY = "crc32"
_JSON = re.compile(rf', "{KEY}": "([0-9a-f]{{8}})"\}}\s*\Z')
_TOML = re.compile(rf"# {KEY} ([0-9a-f]{{8}})\r?\n")


class ChangedFile(UserWarning):
    """The checksum of a file differs: it was damaged, or edited by a user, which is allowed."""


def sealed_json(text: str) -> str:
    """Add the checksum to the text of a non-empty JSON object. The result ends with a newline."""
    body = text.rstrip().removesuffix("}").rstrip()
    return f'{body}, "{KEY}": "{checksum(body.encode())}"}}\n'


def sealed_toml(text: str) -> str:
    return f"# {KEY} {checksum(text.encode())}\n{text}"


def is_intact_json(text: str) -> bool:
    """Whether the checksum of a JSON text is correct or absent."""
    found = _JSON.search(text)
    return found is None or checksum(_bytes(text[: found.start()])) == found[1]


def is_intact_toml(text: str) -> bool:
    found = _TOML.match(text)
    return found is None or checksum(_bytes(text[found.end() :])) == found[1]


def warn_changed(path: "Path", fix: str) -> None:
    """Warn that the checksum of a file differs; commands print the warning as one line."""
    warnings.warn(f"{path} is not as it was written: edited, or damaged; {fix}", ChangedFile, stacklevel=2)


def checksum(raw: bytes | memoryview) -> str:
    """CRC-32 in hexadecimal."""
    return f"{zlib.crc32(raw):08x}"


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")

"""Checksums in the text files that Terrace writes and reads again, so that damage is found.

A JSON object ends with the key `crc32`, of all the text before it; a TOML file begins with the comment
`# crc32 1a2b3c4d`, of the text below it. Text without a checksum passes: others write such files too, and earlier
versions did. Somebody who edits a file may leave its checksum out.
"""

import re
import warnings
import zlib
from pathlib import Path

KEY = "crc32"
_JSON = re.compile(rf', "{KEY}": "([0-9a-f]{{8}})"\}}\s*\Z')
_TOML = re.compile(rf"# {KEY} ([0-9a-f]{{8}})\r?\n")


class ChangedFile(UserWarning):
    """A file is not as Terrace wrote it: damaged, or edited by a user, who may."""


def sealed_json(text: str) -> str:
    """The text of a JSON object that is not empty, on one line or several, with its checksum; ends with a line end."""
    body = text.rstrip().removesuffix("}").rstrip()
    return f'{body}, "{KEY}": "{checksum(body.encode())}"}}\n'


def sealed_toml(text: str) -> str:
    """A TOML text with its checksum."""
    return f"# {KEY} {checksum(text.encode())}\n{text}"


def is_intact_json(text: str) -> bool:
    """Whether a JSON text has its checksum, or none."""
    found = _JSON.search(text)
    return found is None or checksum(_bytes(text[: found.start()])) == found[1]


def is_intact_toml(text: str) -> bool:
    """Whether a TOML text has its checksum, or none."""
    found = _TOML.match(text)
    return found is None or checksum(_bytes(text[found.end() :])) == found[1]


def warn_changed(path: Path, fix: str) -> None:
    """Tell the user of a file that is not as it was written; a command shows it as a line."""
    warnings.warn(f"{path} is not as it was written: edited, or damaged; {fix}", ChangedFile, stacklevel=2)


def checksum(raw: bytes | memoryview) -> str:
    """CRC-32 in hexadecimal."""
    return f"{zlib.crc32(raw):08x}"


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")

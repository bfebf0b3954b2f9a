"""Checks output files named by options before any work is done, so that no result is lost at the end."""

import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryFile

from terrace.base.errors import ConfigError
from terrace.base.files import resolved, write_atomic


def check_writable(option: str, path: Path) -> None:
    """Raises `ConfigError`, naming `option`, if no file can be written at `path`."""
    try:
        if path.is_dir():
            raise IsADirectoryError(0, "it is a folder")
        if path.exists() and not path.is_file():
            raise OSError(0, "it is no regular file")
        # Only creating a file tells: modes say nothing of quotas and read-only mounts.
        folder = next(parent for parent in resolved(path).parents if parent.exists())
        with TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:
        raise _unwritable(option, path, error) from error


def check_page(option: str, path: Path) -> None:
    """Raises `ConfigError` unless the name of a page's file ends in .html or .htm."""
    if path.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"{option} {path}: a page is written as HTML; name a file that ends in .html")


def check_not_read(option: str, path: Path, inputs: Mapping[str, str | None]) -> None:
    """Raises `ConfigError`, naming `option`, if `path` is one of the command's `inputs` (option -> path)."""
    for name, given in inputs.items():
        if given is None:
            continue
        # A model may be given as its folder: the file read is then its config.json.
        for read in (Path(given), Path(given, "config.json")):
            if os.path.isfile(read) and os.path.isfile(path) and os.path.samefile(read, path):
                raise ConfigError(f"{option} {path} is the file that is read as the {name}: name another file")


def write_file(option: str, path: Path, content: str) -> None:
    """Writes the file named by `option`. Raises `ConfigError` on failure."""
    try:
        write_atomic(path, content)
    except OSError as error:
        raise _unwritable(option, path, error) from error


def _unwritable(option: str, path: Path, error: OSError | ValueError) -> ConfigError:
    why = error.strerror if isinstance(error, OSError) else str(error)
    return ConfigError(f"{option} {path} cannot be written ({why}): name a file in a folder that can")


def check_count(option: str, value: int | None, bits: int = 63) -> None:
    """Raises `ConfigError` for a count below 1 or of more than `bits` bits. None is an omitted option."""
    if value is not None and not 1 <= value < 1 << bits:
        raise ConfigError(f"{option} {value} must be at least 1 and below 2^{bits}")

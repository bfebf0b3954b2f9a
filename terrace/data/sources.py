"""Data sources as users write them, and with defaults resolved. Imports no torch, no numpy."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

STDLIB = "stdlib"  # the source of Python's standard library: no path

Format = Literal["text", "chat", "pairs"]
Documented = Literal["join", "separate", "whole", "pairs"]
TooLong = Literal["refuse", "cut", "split", "drop"]


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """An entry of `data.mixture`. Missing keys default to those of `[data]`; weights have any unit."""

    path: str  # a file or a folder
    weight: float = 1.0  # share of the sequences, in any unit
    name: str = ""  # shown, and used in `--data.mixture.NAME.weight`; if empty, the path
    format: Format | None = None  # as data.format
    documents: Documented | None = None  # as data.documents
    too_long: TooLong | None = None  # as data.too_long
    column: str | None = None  # as data.column
    split: str | None = None  # as data.split
    separator: str | None = None  # as data.separator

    def absolute(self) -> "SourceConfig":
        """The same source with an absolute path; its name is kept."""
        return replace(self, path=absolute(self.path), name=self.name or self.path)


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """An entry of `data.eval`; missing keys default to those of `[data]`. Texts are cut as `terrace eval` cuts them."""

    path: str
    format: Format | None = None
    too_long: TooLong | None = None  # of conversations
    column: str | None = None
    split: str | None = None
    separator: str | None = None


@dataclass(frozen=True, kw_only=True)
class SourceSpec:
    path: str
    name: str
    weight: float
    format: Format
    documents: Documented
    too_long: TooLong
    column: str
    split: str
    separator: str


def absolute(path: str) -> str:
    """Makes a data path absolute; the special name `stdlib` stays."""
    return path if path == STDLIB else os.path.abspath(path)


def eval_beside(folder: Path, sources: Any) -> Any:
    """The table `data.eval` of a file, with paths resolved relative to the file's folder."""
    if not isinstance(sources, Mapping):
        return sources
    found = dict[str, Any]()
    for name, given in sources.items():
        table = {"path": given} if isinstance(given, str) else given
        path = table.get("path") if isinstance(table, Mapping) else None
        found[name] = (
            {**table, "path": str(folder / path)} if isinstance(path, str) and path not in ("", STDLIB) else given
        )
    return found


def beside(folder: Path, mixture: Any) -> Any:
    """The mixture of a file, with paths resolved relative to the file's folder."""
    if not isinstance(mixture, list):
        return mixture  # not a mixture: the check of types says so
    return [_entry_beside(folder, entry) if isinstance(entry, Mapping) else entry for entry in mixture]


def _entry_beside(folder: Path, entry: Mapping[str, Any]) -> Mapping[str, Any]:
    path = entry.get("path")
    if not isinstance(path, str) or path in ("", STDLIB):
        return entry
    # Its name stays as written, so overrides can use it.
    return {**entry, "path": str(folder / path), "name": entry.get("name", path)}

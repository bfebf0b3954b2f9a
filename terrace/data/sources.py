"""The `[data]` table as a list of sources, for one path or a mixture. Pure: imports no torch, no numpy."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from terrace.base.errors import ConfigError

STDLIB = "stdlib"  # the source of Python's standard library: no path

Format = Literal["text", "chat"]
Documented = Literal["join", "separate", "whole"]
TooLong = Literal["refuse", "cut", "split", "drop"]

_DEFAULT_DOCUMENTS: Mapping[str, Documented] = {"text": "join", "chat": "whole"}


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """An entry of `data.mixture`. Missing keys default to those of `[data]`; weights are in any unit."""

    path: str
    weight: float = 1.0
    name: str = ""  # shown, and used in `--data.mixture.NAME.weight`; if empty, the path
    format: Format | None = None
    documents: Documented | None = None
    too_long: TooLong | None = None
    column: str | None = None
    split: str | None = None

    def absolute(self) -> "SourceConfig":
        """The same source with an absolute path; its name is kept."""
        path = self.path if self.path == STDLIB else os.path.abspath(self.path)
        return replace(self, path=path, name=self.name or self.path)


@dataclass(frozen=True, kw_only=True)
class SourceSpec:
    """A source with defaults resolved."""

    path: str
    name: str
    weight: float
    format: Format
    documents: Documented
    too_long: TooLong
    column: str
    split: str


def sources_of(
    path: str,
    mixture: Sequence[SourceConfig],
    form: Format,
    documents: Documented | None,
    too_long: TooLong | None,
    column: str = "text",
    split: str = "",
) -> tuple[SourceSpec, ...]:
    """Sources of a `[data]` table: its mixture, or else its single path.

    Raises `ConfigError` for a path together with a mixture, a duplicate entry, a weight that is not positive, and a
    `too_long` where documents are not kept whole.
    """
    if mixture and path != STDLIB:
        raise ConfigError(
            f"data.path = {path!r} and data.mixture are both given: make the path an entry of the mixture"
        )
    specs: list[SourceSpec] = []
    for each in mixture or [SourceConfig(path=path)]:
        if not 0 < each.weight < math.inf:
            raise ConfigError(f"data.mixture: the weight {each.weight} of {each.path!r} must be a positive number")
        if not each.path:
            raise ConfigError("data.mixture has an entry with an empty path: name a file or a folder")
        chosen = each.format or form
        kept = each.documents or documents or _DEFAULT_DOCUMENTS[chosen]
        if each.too_long is not None and kept != "whole":
            raise _no_effect(f"data.mixture: too_long = {each.too_long!r} of {each.path!r}", kept)
        if chosen == "chat":
            # What is said of all sources may be for the others.
            of_all = (column, split) if not mixture else ("text", "")
            for key, value, general, plain in zip(
                ("column", "split"), (each.column, each.split), of_all, ("text", ""), strict=True
            ):
                if (general if value is None else value) != plain:
                    raise ConfigError(
                        f'data.{key} has no effect on {each.path!r}, whose format is "chat": leave it out'
                    )
        spec = SourceSpec(
            path=each.path,
            name=each.name or each.path,
            weight=each.weight,
            format=chosen,
            documents=kept,
            too_long=each.too_long or too_long or "refuse",
            column=each.column or column,
            split=split if each.split is None else each.split,
        )
        # A repeated path would train on the same samples twice.
        for other in specs:
            for what, one, two in (("path", spec.path, other.path), ("name", spec.name, other.name)):
                if one == two:
                    raise ConfigError(f"data.mixture has the {what} {one!r} twice: keep one entry, with both weights")
        specs.append(spec)
    if too_long is not None and not any(spec.documents == "whole" for spec in specs):
        raise _no_effect(f"data.too_long = {too_long!r}", specs[0].documents)
    return tuple(specs)


def check_holdout(holdout: float) -> None:
    """Raises `ConfigError` unless `holdout` is a share below 1 or a whole number."""
    if not 0 <= holdout < math.inf or (holdout >= 1 and holdout != int(holdout)):
        raise ConfigError(
            f"data.holdout = {holdout} must be a share of the samples, from 0 to below 1, or a whole number of them"
        )


def beside(folder: Path, mixture: Any) -> Any:
    """The mixture of a file, with relative paths resolved against the file's folder."""
    if not isinstance(mixture, list):
        return mixture  # not a mixture: the check of types says so
    return [_entry_beside(folder, entry) if isinstance(entry, Mapping) else entry for entry in mixture]


def _entry_beside(folder: Path, entry: Mapping[str, Any]) -> Mapping[str, Any]:
    path = entry.get("path")
    if not isinstance(path, str) or path in ("", STDLIB):
        return entry
    # Its name stays as written, so overrides can use it.
    return {**entry, "path": str(folder / path), "name": entry.get("name", path)}


def _no_effect(what: str, documents: str) -> ConfigError:
    return ConfigError(
        f'{what} has no effect, as data.documents = "{documents}" cuts documents anywhere: set data.documents = '
        '"whole", or leave it out'
    )

"""The `[data]` section of a run's configuration."""

import os
from dataclasses import dataclass, replace

from terrace.base.errors import ConfigError
from terrace.data.sources import (
    Documented,
    Format,
    SourceConfig,
    SourceSpec,
    TooLong,
    check_holdout,
    sources_of,
)

# key -> the value that is not a path
PATHS = {"path": "stdlib", "tokenizer": "bytes", "cache": "", "chat_template": ""}


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    path: str = "stdlib"
    tokenizer: str = "bytes"
    cache: str = ".terrace-cache"
    mixture: tuple[SourceConfig, ...] = ()  # several sources, in place of a path
    format: Format = "text"
    documents: Documented | None = None  # how they stand in sequences; if absent, joined text and whole conversations
    too_long: TooLong | None = None  # treatment of a whole document that is longer than a sequence
    column: str = "text"  # the key, or the column, that holds the text of a record
    split: str = ""  # of a data set that has several; if empty, "train"
    chat_template: str = ""  # a file; if empty, that of the tokenizer's folder
    holdout: float = 0.0  # a share of each source's samples, or how many, that are never trained on

    def __post_init__(self) -> None:
        check_holdout(self.holdout)
        self.sources()
        if self.chat_template and not any(source.format == "chat" for source in self.sources()):
            raise ConfigError('data.chat_template has no effect on text: leave it out, or set data.format = "chat"')

    def sources(self) -> tuple[SourceSpec, ...]:
        """Sources with defaults resolved. Raises `ConfigError` for contradicting keys."""
        return sources_of(self.path, self.mixture, self.format, self.documents, self.too_long, self.column, self.split)

    def absolute(self) -> "DataConfig":
        """The same configuration with absolute paths."""
        named = {name: getattr(self, name) for name in PATHS}
        kept = {name: os.path.abspath(at) for name, at in named.items() if at != PATHS[name]}
        return replace(self, mixture=tuple(source.absolute() for source in self.mixture), **kept)

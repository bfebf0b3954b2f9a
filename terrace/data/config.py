"""The `[data]` section of a run's configuration, resolved to a list of sources. Imports no torch, no numpy."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from terrace.base.errors import ConfigError
from terrace.data.sources import STDLIB, Documented, EvalConfig, Format, SourceConfig, SourceSpec, TooLong, absolute

HOLDOUT = "holdout"  # its name among the sources that are evaluated
# key -> the value that is not a path
PATHS = {"path": STDLIB, "tokenizer": "bytes", "cache": "", "chat_template": ""}
_DEFAULT_DOCUMENTS: Mapping[str, Documented] = {"text": "join", "chat": "whole", "pairs": "pairs"}


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    path: str = STDLIB  # a file, a folder, or stdlib
    tokenizer: str = "bytes"  # tokenizer.json, its folder, or bytes
    cache: str = ".terrace-cache"  # folder of the tokenised data
    bos: bool | str = "auto"  # before a text: as the tokenizer's folder says, its bos_token, nothing, or a token
    eos: str = "auto"  # after a text: as the tokenizer's folder says, or a token
    mixture: tuple[SourceConfig, ...] = ()  # several sources, in place of a path
    format: Format = "text"  # conversations are "chat", preferences "pairs"; a command finds it by the first record
    documents: Documented | None = None  # how they stand in sequences; if absent, joined text and whole conversations
    too_long: TooLong | None = None  # treatment of a whole document that is longer than a sequence
    column: str = "text"  # the key, or the column, that holds the text of a record
    split: str = ""  # of a folder, NAME or CONFIGURATION:NAME; if empty, "train"
    separator: str = ""  # between the documents of a text file; if empty, the file is one
    chat_template: str = ""  # a file; if empty, that of the tokenizer's folder
    holdout: float = 0.0  # a share of each source's samples, or how many, that are never trained on
    eval: Mapping[str, str | EvalConfig] = field(default_factory=dict)  # name -> path or table, only evaluated

    def __post_init__(self) -> None:
        if not 0 <= self.holdout < math.inf or (self.holdout >= 1 and self.holdout != int(self.holdout)):
            raise ConfigError(
                f"data.holdout = {self.holdout} must be a share of the samples, from 0 to below 1, or a whole number "
                "of them"
            )
        if self.holdout >= 2**63:
            raise ConfigError(f"data.holdout = {self.holdout:g} is more samples than any data has: hold out fewer")
        sources = self.sources()
        if self.chat_template and not any(source.format != "text" for source in (*sources, *self.eval_sources())):
            raise ConfigError('data.chat_template has no effect on text: leave it out, or set data.format = "chat"')

    def sources(self) -> tuple[SourceSpec, ...]:
        """The sources with defaults resolved: the mixture, or else the single path.

        Raises `ConfigError` for a path together with a mixture, a duplicate entry, a weight that is not positive, and
        keys without effect.
        """
        if self.mixture and self.path != STDLIB:
            raise ConfigError(
                f"data.path = {self.path!r} and data.mixture are both given: make the path an entry of the mixture"
            )
        self._check_mixture()
        specs: list[SourceSpec] = []
        for each in self.mixture or [SourceConfig(path=self.path)]:
            spec = self._resolved(each)
            # A repeated path would train on the same samples twice.
            for other in specs:
                for what, one, two in (("path", spec.path, other.path), ("name", spec.name, other.name)):
                    if one == two:
                        raise ConfigError(
                            f"data.mixture has the {what} {one!r} twice: keep one entry, with both weights"
                        )
            specs.append(spec)
        if any(spec.format == "pairs" for spec in specs):
            self._check_pairs()
        if self.too_long is not None and not any(spec.documents == "whole" for spec in specs):
            raise _no_effect(f"data.too_long = {self.too_long!r}", specs[0].documents)
        return tuple(specs)

    def _check_pairs(self) -> None:
        if self.mixture:
            raise ConfigError('data.mixture has a source with format = "pairs": pairs are not mixed; give one path')
        for key in ("holdout", "too_long"):
            if getattr(self, key):
                raise ConfigError(
                    f'data.{key} = {getattr(self, key)!r} is not implemented for data.format = "pairs": leave it out'
                )

    def _check_mixture(self) -> None:
        if len(self.mixture) == 1 and self.mixture[0].weight != 1.0:
            raise ConfigError(
                f"data.mixture: the weight {self.mixture[0].weight} has no effect, since there is no other source: "
                "leave it out"
            )
        for key, default in (
            ("format", "text"),
            ("documents", None),
            ("too_long", None),
            ("column", "text"),
            ("split", ""),
            ("separator", ""),
        ):
            if self.mixture and getattr(self, key) != default and all(getattr(each, key) for each in self.mixture):
                raise ConfigError(
                    f"data.{key} = {getattr(self, key)!r} has no effect, since every source of data.mixture has "
                    "its own: leave it out"
                )

    def _resolved(self, source: SourceConfig) -> SourceSpec:
        if not 0 < source.weight < math.inf:
            raise ConfigError(f"data.mixture: the weight {source.weight} of {source.path!r} must be a positive number")
        if not source.path:
            raise ConfigError("data.mixture has an entry with an empty path: name a file or a folder")
        chosen = source.format or self.format
        kept = source.documents or self.documents or _DEFAULT_DOCUMENTS[chosen]
        if source.too_long is not None and kept != "whole":
            raise _no_effect(f"data.mixture: too_long = {source.too_long!r} of {source.path!r}", kept)
        if (chosen == "pairs") != (kept == "pairs"):
            raise ConfigError(
                f"data.documents = {kept!r} has no effect on {source.path!r}, whose format is {chosen!r}: leave it out"
            )
        if chosen != "text":
            # In a mixture, a key of the whole table may be for the other sources.
            for key, plain in (("column", "text"), ("separator", "")):
                general, own = plain if self.mixture else getattr(self, key), getattr(source, key)
                if (general if own is None else own) != plain:
                    raise ConfigError(
                        f'data.{key} has no effect on {source.path!r}, whose format is "{chosen}": leave it out'
                    )
        return SourceSpec(
            path=source.path,
            name=source.name or source.path,
            weight=source.weight,
            format=chosen,
            documents=kept,
            too_long=source.too_long or self.too_long or "refuse",
            column=source.column or self.column,
            split=self.split if source.split is None else source.split,
            separator=(self.separator if source.separator is None else source.separator) if chosen == "text" else "",
        )

    def eval_sources(self) -> tuple[SourceSpec, ...]:
        """The sources that are only evaluated, with defaults resolved. Raises `ConfigError` for an invalid one."""
        return tuple(
            self._evaluated(name, EvalConfig(path=given) if isinstance(given, str) else given)
            for name, given in self.eval.items()
        )

    def _evaluated(self, name: str, given: EvalConfig) -> SourceSpec:
        if name == HOLDOUT or not name or "/" in name:
            raise ConfigError(
                f"data.eval has a source named {name!r}: {HOLDOUT!r} is the hold-out, and a name has no slash; give it "
                "another"
            )
        if not given.path:
            raise ConfigError(f"data.eval.{name} has an empty path: name a file or a folder")
        chosen = given.format or self.format
        if chosen == "pairs":
            raise ConfigError(f"data.eval.{name} holds pairs, which are not evaluated during training: leave it out")
        keys = ("too_long",) if chosen == "text" else ("column", "separator")
        for key in keys:
            if getattr(given, key) is not None:
                raise ConfigError(f'data.eval.{name}.{key} has no effect on format = "{chosen}": leave it out')
        is_text = chosen == "text"
        return SourceSpec(
            path=given.path,
            name=name,
            weight=1.0,
            format=chosen,
            documents="separate" if is_text else "whole",
            too_long=given.too_long or self.too_long or "refuse",
            column=(self.column if given.column is None else given.column) if is_text else "text",
            # Conversations are another data set than the texts that data.split is about.
            split=given.split if given.split is not None else self.split if is_text else "",
            separator=(self.separator if given.separator is None else given.separator) if is_text else "",
        )

    def absolute(self) -> "DataConfig":
        named = {name: getattr(self, name) for name in PATHS}
        kept = {name: os.path.abspath(at) for name, at in named.items() if at != PATHS[name]}
        evaluated = {
            name: absolute(given) if isinstance(given, str) else replace(given, path=absolute(given.path))
            for name, given in self.eval.items()
        }
        return replace(self, eval=evaluated, mixture=tuple(source.absolute() for source in self.mixture), **kept)


def _no_effect(what: str, documents: str) -> ConfigError:
    return ConfigError(
        f'{what} has no effect, as data.documents = "{documents}" cuts documents anywhere: set data.documents = '
        '"whole", or leave it out'
    )

"""The dataset card of a folder: the `configs` in the YAML block of README.md, or in `.huggingface.yaml`.

A configuration names the files of its splits by patterns, or a folder in which file names identify the splits.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from terrace.base.errors import DataError, did_you_mean
from terrace.base.extras import needs
from terrace.base.files import read_bounded
from terrace.data.splits import TRAIN, is_split

_MOST_BYTES = 16 << 20  # of a card; the longest have some megabytes
CARD, _OWN_YAML = "README.md", ".huggingface.yaml"
_KEY = "configs"
_BLOCK = re.compile(r"\s*---[\r\n]+(.*?)[\r\n]+---(?:\r?\n|$)", re.DOTALL)
_SEPARATORS = ("sep", "delimiter")
# Keys that change what a row of `datasets` is; without them it would be another data set.
_NOT_READ = frozenset(
    {"field", "filters", "sample_by", "names", "column_names", "header", "index_col", "usecols", "skiprows"}
    | {"skipfooter", "nrows", "comment", "quotechar", "quoting", "escapechar", "lineterminator", "doublequote"}
)


@dataclass(frozen=True)
class Config:
    """A configuration. `patterns` maps splits to file patterns relative to `folder`; None if file names identify the
    splits.
    """

    name: str
    patterns: Mapping[str, Sequence[str]] | None
    folder: str  # relative to the root; "" is the root
    separator: str  # of csv, if given


@dataclass(frozen=True)
class Card:
    path: Path
    configs: Mapping[str, Config]
    default: str | None

    def config(self, wanted: str) -> Config:
        """The configuration `wanted`, or the default one. Raises `DataError` if it does not exist."""
        chosen = wanted or self.default
        if chosen is not None and chosen in self.configs:
            return self.configs[chosen]
        asked = "none of them is the default" if chosen is None else f"not {chosen!r}"
        near = "" if chosen is None else did_you_mean(chosen, self.configs)
        raise DataError(
            f"{self.path} has the configurations {', '.join(self.configs)}, {asked}{near}; choose one with "
            "--data.split CONFIGURATION:SPLIT"
        )


def read_card(root: Path) -> Card | None:
    """The card of a folder; None if there is none, or it has no configurations.

    Raises `DataError` for a damaged card, and for options of reading that Terrace does not support.
    """
    for path, is_yaml in ((root / _OWN_YAML, True), (root / CARD, False)):
        if not path.is_file():
            continue
        try:
            text = read_bounded(path, _MOST_BYTES).decode("utf-8-sig")
        except UnicodeDecodeError:
            continue  # a README in another encoding is no card
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}") from error
        block = text if is_yaml else found[1] if (found := _BLOCK.match(text)) else ""
        # Most cards have no configurations, and need no parser.
        if re.search(rf"^[\"']?{_KEY}[\"']?\s*:", block, re.MULTILINE) is None:
            continue
        configs, default = _configs(path, _loaded(path, block).get(_KEY))
        if configs:
            return Card(path, configs, default)
    return None


def _loaded(path: Path, block: str) -> Mapping[str, Any]:
    try:
        import yaml
    except ImportError as error:
        raise DataError(f"{path} has {_KEY}: reading them {needs('pyyaml')}") from error
    try:
        # The loader in C, where it is built, reads long cards fifty times as fast.
        table = yaml.load(block, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise DataError(f"the YAML block of {path} is damaged ({' '.join(str(error).split())}); repair it") from error
    if not isinstance(table, Mapping):
        raise _wrong(path, "the block is no table")
    return table


def _configs(path: Path, entries: Any) -> tuple[dict[str, Config], str | None]:
    if entries is None or entries == []:
        return {}, None
    # Aliases make a small list of any length, and its text would have that length.
    if not isinstance(entries, list) or not all(
        isinstance(one, Mapping) and isinstance(one.get("config_name"), str | int | float) for one in entries
    ):
        raise _wrong(path, "each entry is a table with a config_name")
    found = {str(each["config_name"]): _config(path, each) for each in entries}
    if len(found) < len(entries):
        raise _wrong(path, "two entries have the same config_name")
    defaults = [name for name, each in zip(found, entries, strict=False) if name == "default" or each.get("default")]
    if len(found) == 1:
        defaults = list(found)
    if len(defaults) > 1:
        raise _wrong(path, f"{' and '.join(defaults)} are both the default: keep one")
    return found, defaults[0] if defaults else None


def _config(path: Path, entry: Mapping[str, Any]) -> Config:
    name, given, folder = str(entry["config_name"]), entry.get("data_files"), entry.get("data_dir") or ""
    for key in _NOT_READ & entry.keys():
        raise _wrong(path, f"{name!r} has the option {key!r}, which is not read: write its files as JSON lines")
    separators = [entry[key] for key in _SEPARATORS if entry.get(key)]
    if not all(isinstance(each, str) for each in (folder, *separators)):
        raise _wrong(path, f"data_dir or sep of {name!r} is no text")
    patterns = None if given is None else _patterns(path, name, given)
    for pattern in (folder, *(each for those in (patterns or {}).values() for each in those)):
        # A card is untrusted and must not choose files elsewhere on this machine.
        if "://" in pattern or pattern.startswith(("/", "~")) or ".." in pattern.split("/"):
            raise _wrong(path, f"{name!r} names {pattern!r}, which is not in the folder: download it into the folder")
    return Config(name, patterns, folder.strip("/").removeprefix("./"), separators[0] if separators else "")


def _patterns(path: Path, name: str, given: Any) -> dict[str, tuple[str, ...]]:
    entries = given if isinstance(given, list) else [given]
    if not any(isinstance(each, Mapping) for each in entries):
        return {TRAIN: _texts(path, name, entries)}
    found: dict[str, tuple[str, ...]] = {}
    for each in entries:
        if not isinstance(each, Mapping) or each.keys() != {"split", "path"} or not is_split(each["split"]):
            raise _wrong(path, f"each of the data_files of {name!r} has a split, named by letters, and a path")
        if each["split"] in found:
            raise _wrong(path, f"data_files of {name!r} have the split {each['split']!r} twice")
        paths = each["path"]
        found[each["split"]] = _texts(path, name, paths if isinstance(paths, list) else [paths])
    return found


def _texts(path: Path, name: str, values: Iterable[Any]) -> tuple[str, ...]:
    found = tuple(values)
    if not found or not all(isinstance(each, str) and each for each in found):
        raise _wrong(path, f"data_files of {name!r} are paths")
    return tuple(each.removeprefix("./") for each in found)


def _wrong(path: Path, rule: str) -> DataError:
    return DataError(f"{_KEY} of {path} cannot be read: {rule}")


def matches(pattern: str, names: Iterable[str]) -> list[str]:
    """The `names` that match a pattern: * within a name, ** for any folders, ? and [...] for one character."""
    parts = pattern.split("/")
    num_special = _num_special(parts)
    split = ((name, name.split("/")) for name in names)
    return [name for name, each in split if _fits(parts, each) and _num_special(each) == num_special]


def _num_special(parts: Sequence[str]) -> int:
    # Folders such as __pycache__ are meant only where a pattern has them.
    return sum(part.startswith("__") for part in parts[:-1])


def _fits(pattern: Sequence[str], name: Sequence[str]) -> bool:
    # Positions in the pattern that the parts so far can match, so many ** cost no more than few.
    last, places = len(pattern) - 1, {0}
    for part in name:
        for place in range(last):
            if place in places and pattern[place] == "**":
                places.add(place + 1)
        after = set()
        for place in places - {last + 1}:
            if pattern[place] == "**":
                after |= {place, last + 1} if place == last else {place}
            elif fnmatchcase(part, pattern[place]):
                after.add(place + 1)
        places = after
    return last + 1 in places

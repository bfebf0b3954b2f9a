"""From a folder to the files of a split, each with its form.

The rules are those of `datasets.load_dataset(folder)`: the dataset card (terrace.data.card), else the names of files
and folders (terrace.data.splits); of a split's files, those of the most common form. A line reports what is not read.

Three rules differ, since folders of text are trained on, too. A .txt file is one document, not one per line. In a
folder without a file that `datasets` reads, prose (.md, .rst, ...) and source files are documents, and names are splits
only if one of them is train's. A folder with more source files than data files is source: file names such as test_x.py
and train.py are no splits.
"""

import os
import stat
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path

from terrace.base.errors import DataError
from terrace.base.words import counted
from terrace.data.card import CARD, Config, matches, read_card
from terrace.data.forms import (
    CODE_SUFFIXES,
    KNOWN_SUFFIXES,
    PLAIN_SUFFIX,
    RECORD_SUFFIXES,
    DataFile,
    commonest,
    data_file,
    is_packed,
)
from terrace.data.pieces import unreadable
from terrace.data.saved import find_saved
from terrace.data.splits import TRAIN, choose_split, is_for_training, splits_of

_DATA_SUFFIXES = RECORD_SUFFIXES | {PLAIN_SUFFIX}
# Never data to `datasets`, unless a card names them.
_NOT_DATA = frozenset({CARD, "config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json"})
_MOST_SAID = 8  # kinds of files on a line


@dataclass(frozen=True)
class Found:
    """The files of a corpus. For a folder also the split, and a line on what is read and what is left out."""

    files: tuple[DataFile, ...]
    split: str = ""
    words: str = ""


@dataclass
class _Listing:
    root: Path
    names: list[str] = field(default_factory=list)
    num_hidden: int = 0
    sizes: dict[str, int] = field(default_factory=dict)  # of files of a known suffix
    no_records: set[str] = field(default_factory=set)  # JSON of another kind


def find_in_folder(root: Path, split: str) -> Found:
    """The files of `split` in the folder `root`, as for terrace.data.files.find_data."""
    saved = find_saved(root, split)
    if saved is not None:
        others = [f"the split {other}" for other in saved.others]
        return Found(saved.files, saved.split, _words(f"{root}, saved by datasets: {saved.split or 'a split'}", others))
    listing = _list(root)
    wanted, _, part = split.rpartition(":")
    card = read_card(root)
    if card is None:
        if ":" in split:
            raise DataError(
                f"data.split = {split!r} names a configuration, and {root} has no {CARD} with configurations: name a "
                "split alone"
            )
        splits, separator, place = _named_splits(listing), "", f"{root}: "
    else:
        config = card.config(wanted)
        splits, separator, place = _card_splits(listing, config), config.separator, f"{root}: {config.name}: "
    chosen = choose_split(root, part, list(splits))
    if card is not None and not splits[chosen]:
        raise DataError(f"{card.path} names no file of the split {chosen!r} that is there: copy the whole folder again")
    files = _readable(listing, splits[chosen], separator)
    counts = Counter(file.path.suffix.lower() for file in files)
    forms = " and ".join(counted(number, f"{suffix} file") for suffix, number in counts.most_common())
    read = {file.path.relative_to(root).as_posix() for file in files}
    # A name such as dev-train is of two splits, and read with either.
    both = {other: len(read & set(names)) for other, names in splits.items() if other != chosen}
    also = "".join(f", {number} of them also of {other}" for other, number in both.items() if number)
    return Found(tuple(files), chosen, _words(f"{place}{chosen}, {forms}{also}", _left(listing, read, chosen, splits)))


def _named_splits(listing: _Listing) -> dict[str, list[str]]:
    root = listing.root
    known = [name for name in listing.names if _suffix(name) in KNOWN_SUFFIXES or is_packed(Path(name))]
    if not known:
        raise DataError(
            f"data folder {root} holds no file of a known suffix ({' '.join(sorted(KNOWN_SUFFIXES))}); add or rename "
            "one"
        )
    data = [name for name in known if _is_data(listing, name)]
    if _is_source(data, known):
        return {TRAIN: _prose(known)}
    if data:
        named = splits_of(root, data)
        # Without names of splits, prose of any suffix stands beside .txt.
        beside = [name for name in _prose(known) if name.rpartition("/")[2] not in _NOT_DATA]
        return named or {TRAIN: beside if commonest(map(_kind, data)) == {PLAIN_SUFFIX} else data}
    prose = _prose(known)
    named = splits_of(root, prose)
    return named if TRAIN in named else {TRAIN: prose or known}


def _card_splits(listing: _Listing, config: Config) -> dict[str, list[str]]:
    prefix = f"{config.folder}/" if config.folder else ""
    inside = [name.removeprefix(prefix) for name in listing.names if name.startswith(prefix)]
    if config.patterns is None:
        data = [name for name in inside if _is_data(listing, prefix + name)]
        splits: Mapping[str, Sequence[str]] = splits_of(listing.root, data) or {TRAIN: data}
    else:
        splits = {split: _of_patterns(listing, patterns, inside) for split, patterns in config.patterns.items()}
    return {split: [prefix + name for name in names] for split, names in splits.items()}


def _of_patterns(listing: _Listing, patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    found = dict[str, None]()  # a name that two patterns mean is read once
    for pattern in patterns:
        meant = pattern.rpartition("/")[2]
        those = [
            name
            for name in matches(pattern, names)
            if (meant == name.rpartition("/")[2] or name.rpartition("/")[2] not in _NOT_DATA)
            and (_suffix(name) in KNOWN_SUFFIXES or is_packed(Path(name)))
        ]
        if not those and not any(each in pattern for each in "*?["):
            raise DataError(
                f"{listing.root / CARD} names {pattern!r}, which is missing or of an unknown suffix; copy the whole "
                "folder again"
            )
        found |= dict.fromkeys(those)
    return list(found)


def _is_data(listing: _Listing, name: str) -> bool:
    parts = name.split("/")
    if _kind(name) not in _DATA_SUFFIXES or parts[-1] in _NOT_DATA or any(part.startswith("__") for part in parts[:-1]):
        return False
    if _suffix(name) == ".json" and listing.sizes[name] and _data_file(listing.root / name) is None:
        listing.no_records.add(name)
        return False
    return True


def _is_source(data: Sequence[str], known: Sequence[str]) -> bool:
    num_code = sum(_suffix(name) in CODE_SUFFIXES for name in known)
    return num_code > len(data) and not any(_is_in_sight(name) for name in data)


def _is_in_sight(name: str) -> bool:
    # These records are what their folder is for, and scripts beside them read or made them.
    top, _, inside = name.partition("/")
    return _kind(name) in RECORD_SUFFIXES and (not inside or top == "data" or is_for_training(top))


def _prose(known: Sequence[str]) -> list[str]:
    return [name for name in known if _kind(name) not in RECORD_SUFFIXES]


def _readable(listing: _Listing, names: Sequence[str], separator: str) -> list[DataFile]:
    """The files among `names` of the most common form. Raises `DataError` if there are none."""
    root = listing.root
    for name in names:
        # Skipping it silently would lose text.
        if is_packed(Path(name)):
            raise DataError(f"data {root / name} is packed; unpack it, or move it out of the data folder")
    kept = [name for name in names if listing.sizes[name]]
    if not kept:
        raise DataError(f"data folder {root} holds only empty files; give it a file with text")
    records = [name for name in kept if _suffix(name) in _DATA_SUFFIXES]
    form = commonest(map(_suffix, records)) if records else {PLAIN_SUFFIX}
    if form == {PLAIN_SUFFIX}:
        return [DataFile(root / name, "text") for name in _prose(kept)]
    files = [found for name in kept if _suffix(name) in form and (found := _data_file(root / name, separator))]
    if not files:
        raise DataError(
            f"data folder {root} holds no records: {kept[0]} has neither an object of JSON on each line nor one list "
            "of objects; write it so"
        )
    return files


def _data_file(path: Path, separator: str = "") -> DataFile | None:
    try:
        return data_file(path, separator)
    except OSError as error:
        raise unreadable(path, error) from error


def _left(listing: _Listing, read: Set[str], chosen: str, splits: Mapping[str, Sequence[str]]) -> list[str]:
    """Files of a folder that are not read, in words: other splits, then other files by kind."""
    left, mentioned = list[str](), set[str]()
    for split, names in splits.items():
        others = set(names) - read
        if split != chosen and others:
            left.append(f"{counted(len(others), 'file')} of {split}")
            mentioned |= others
    rest = [name for name in listing.names if name not in read | mentioned]
    no_records = [name for name in rest if name in listing.no_records]
    empty = [name for name in rest if listing.sizes.get(name) == 0]
    left += [f"{name}, which holds no records" for name in no_records]
    left += [counted(len(empty), "empty file")] * bool(empty)
    kinds = Counter(_suffix(name) for name in rest if name not in {*no_records, *empty})
    for kind, number in sorted(kinds.items()):
        left.append(counted(number, f"{kind} file") if kind else f"{counted(number, 'file')} without a suffix")
    return left + [counted(listing.num_hidden, "hidden file")] * bool(listing.num_hidden)


def _words(read: str, left: Sequence[str]) -> str:
    more = ["and more"] if len(left) > _MOST_SAID else []
    return read + f"; left out: {', '.join([*left[:_MOST_SAID], *more])}" * bool(left)


def _list(root: Path) -> _Listing:
    listing = _Listing(root)
    for folder, folders, names in _walk(root):
        listing.num_hidden += sum(name.startswith(".") for name in (*folders, *names))
        place = Path(folder).relative_to(root)
        listing.names += [(place / name).as_posix() for name in names if not name.startswith(".")]
    listing.names.sort()
    for name in listing.names:
        if _kind(name) in KNOWN_SUFFIXES:
            listing.sizes[name] = _size(root / name)
    return listing


def _walk(root: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    def refuse(error: OSError) -> None:
        raise unreadable(Path(error.filename), error)

    seen: set[str] = set()
    for folder, folders, names in os.walk(root, followlinks=True, onerror=refuse):
        real = os.path.realpath(folder)
        if real in seen:  # a link back up would loop for ever
            folders.clear()
            continue
        seen.add(real)
        yield folder, list(folders), names
        # Sorted, so that which of two links to a folder is taken does not depend on the file system.
        folders[:] = sorted(name for name in folders if not name.startswith("."))


def _size(path: Path) -> int:
    try:
        status = path.stat()
    except OSError as error:
        raise unreadable(path, error) from error
    # Before it is opened: a pipe would block.
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"data {path} is not a regular file; move it out of the data folder")
    return status.st_size


def _suffix(name: str) -> str:
    return os.path.splitext(name)[1].lower()


def _kind(name: str) -> str:
    """The suffix of a file name, without that of a compression."""
    return _suffix(os.path.splitext(name)[0]) if is_packed(Path(name)) else _suffix(name)

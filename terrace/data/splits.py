"""The splits of a folder, from the names of its files and folders, as the `datasets` library reads them.

The first of these rules that finds a file decides; files that it does not match belong to no split:

1. `data/SPLIT-00000-of-00002.*`, for any name of a split
2. a folder that is named for train, validation or test, at any depth, and whatever lies in it
3. a file that is named for one of them
4. else everything is the split "train"

A file or folder is named for a split if one of the split's keywords appears in its name between separators: `train`,
`my-train`, `test_2`. Unlike in `datasets`, `Test` is `test`: a capital letter must not turn test data into training
data.
"""

import re
from collections.abc import Callable, Sequence

from terrace.base.errors import DataError, did_you_mean

TRAIN = "train"
_KEYWORDS = {
    TRAIN: ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_BORDER = r"[-._ 0-9]"
_IN_FOLDER = {
    split: re.compile(rf"(?:.*{_BORDER})?(?:{'|'.join(words)})(?:{_BORDER}.*)?", re.IGNORECASE | re.DOTALL)
    for split, words in _KEYWORDS.items()
}
_IN_FILE = {
    split: re.compile(rf"(?:.*{_BORDER})?(?:{'|'.join(words)}){_BORDER}.*", re.IGNORECASE | re.DOTALL)
    for split, words in _KEYWORDS.items()
}
_SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}.*\..*", re.ASCII | re.DOTALL)
_SPLIT = re.compile(r"\w+(\.\w+)*")
_HELD_WORD = re.compile("|".join((*_KEYWORDS["validation"], *_KEYWORDS["test"])), re.IGNORECASE)
_WORD_BORDERS = re.compile(rf"{_BORDER}|_")


def splits_of(root: object, names: Sequence[str]) -> dict[str, list[str]]:
    """Maps splits to those of `names` (relative to the folder `root`) that belong to them; empty if no name identifies
    a split.

    A name may belong to several splits, or to none. Raises `DataError` for shards whose split name is invalid.
    """
    shards: dict[str, list[str]] = {}
    for name in names:
        folder, _, file = name.rpartition("/")
        if folder == "data" and (found := _SHARD.fullmatch(file)):
            shards.setdefault(found[1], []).append(name)
    for split in shards:
        if not is_split(split):
            raise DataError(
                f"{root}/data has shards of the split {split!r}, and names of splits have letters, digits, _ and "
                f"dots alone: rename them to {re.sub(r'[^0-9A-Za-z_.]+', '_', split)}-00000-of-..."
            )
    return shards or _by(_in_folders, names) or _by(_in_file, names)


def is_for_training(folder: str) -> bool:
    """Whether a folder of this name holds data of the split "train"."""
    return _IN_FOLDER[TRAIN].fullmatch(folder) is not None


def choose_split(root: object, wanted: str, there: Sequence[str]) -> str:
    """The split `wanted`. If it is empty: the only split, unless it is held out, else "train".

    Raises `DataError` if that split does not exist.
    """
    only = there[0] if len(there) == 1 and not is_held_out(there[0]) else TRAIN
    chosen = wanted or only
    if chosen in there:
        return chosen
    named = f"the split{'s' * (len(there) != 1)} {', '.join(there) or 'none'}"
    raise DataError(
        f"{root} has {named}, not {chosen!r}{did_you_mean(chosen, there)}; choose one with --data.split NAME"
    )


def is_split(name: object) -> bool:
    return isinstance(name, str) and _SPLIT.fullmatch(name) is not None


def is_held_out(split: str) -> bool:
    """Whether a split's name marks it as validation or test, such as `test_sft`."""
    return any(_HELD_WORD.fullmatch(word) for word in _WORD_BORDERS.split(split))


def _by(is_named: Callable[[str, str], bool], names: Sequence[str]) -> dict[str, list[str]]:
    found = {split: [name for name in names if is_named(split, name)] for split in _KEYWORDS}
    return {split: those for split, those in found.items() if those}


def _in_folders(split: str, name: str) -> bool:
    return any(_IN_FOLDER[split].fullmatch(part) for part in name.split("/")[:-1])


def _in_file(split: str, name: str) -> bool:
    return _IN_FILE[split].fullmatch(name.rpartition("/")[2]) is not None

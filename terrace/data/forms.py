"""The form of a data file, by its suffix, and for JSON also by its first character.

`datasets` reads files of `RECORD_SUFFIXES` and `.txt`. The other suffixes are prose and source, one document per file.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from terrace.base.parsing import parse_json

JSON_SUFFIXES = frozenset({".json", ".jsonl", ".ndjson"})
CSV_SEPARATORS = {".csv": ",", ".tsv": "\t"}
TABLE_SUFFIXES = frozenset({".arrow", ".parquet"})
RECORD_SUFFIXES = JSON_SUFFIXES | CSV_SEPARATORS.keys() | TABLE_SUFFIXES
PLAIN_SUFFIX = ".txt"
PROSE_SUFFIXES = frozenset({PLAIN_SUFFIX, ".text", ".md", ".rst", ".tex", ".html"})
SCRIPT_SUFFIXES = frozenset({".py", ".pyi", ".jl", ".js", ".ts", ".sh"})
COMPILED_SUFFIXES = frozenset({".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".go", ".java", ".rs"})
CODE_SUFFIXES = SCRIPT_SUFFIXES | COMPILED_SUFFIXES
KNOWN_SUFFIXES = RECORD_SUFFIXES | PROSE_SUFFIXES | CODE_SUFFIXES
PACKED_SUFFIXES = frozenset({".7z", ".bz2", ".gz", ".tar", ".tgz", ".xz", ".zip", ".zst"})

Form = Literal["text", "lines", "array", "csv", "parquet", "arrow", "selection"]

MAX_LINE_BYTES = 100_000_000  # a longer line is more likely a file without line ends than a document
_HEAD_BYTES = 1 << 12  # an editor may begin a list with empty lines

# Among equally many files of two suffixes, `datasets` takes the one that stands first here.
_PREFERRED = (".parquet", ".arrow", ".jsonl", ".json", ".csv")


@dataclass(frozen=True)
class DataFile:
    """A file and how it is read. A "selection" is the state.json of a saved data set, with the `parts` that it
    names.
    """

    path: Path
    form: Form
    separator: str = ""  # of the fields of csv
    parts: tuple[Path, ...] = ()

    @property
    def holds_records(self) -> bool:
        return self.form != "text"

    @property
    def all_paths(self) -> tuple[Path, ...]:
        return (self.path, *self.parts)


def data_file(path: Path, separator: str = "") -> DataFile | None:
    """The file at `path` with its form; None for JSON without records. An unknown suffix counts as prose.

    Raises `OSError` for a JSON file that cannot be read.
    """
    suffix = path.suffix.lower()
    if suffix in CSV_SEPARATORS:
        return DataFile(path, "csv", separator or CSV_SEPARATORS[suffix])
    if suffix in TABLE_SUFFIXES:
        return DataFile(path, "parquet" if suffix == ".parquet" else "arrow")
    if suffix not in JSON_SUFFIXES:
        return DataFile(path, "text")
    form = _json_form(path)
    return None if form is None else DataFile(path, form)


def is_packed(path: Path) -> bool:
    """Whether skipping `path` would lose data: `part.jsonl.gz`, but not `logo.gz`."""
    return path.suffix.lower() in PACKED_SUFFIXES and Path(path.stem).suffix.lower() in KNOWN_SUFFIXES


def commonest(suffixes: Iterable[str]) -> frozenset[str]:
    """The suffixes of the most common form, by the rule of `datasets`."""
    counts = Counter(suffixes)
    first = max(counts, key=lambda suffix: (counts[suffix], *(suffix == each for each in _PREFERRED), suffix))
    for family in (JSON_SUFFIXES, frozenset(CSV_SEPARATORS)):
        if first in family:
            return family
    return frozenset({first})


def _json_form(path: Path) -> Form | None:
    with path.open("rb") as stream:
        head = stream.read(_HEAD_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip()
        if head.startswith(b"["):
            return "array"
        # One object over several lines, such as a file of settings, is no list of records.
        if path.suffix.lower() != ".json":
            return "lines"
        stream.seek(0)
        for line in iter(lambda: stream.readline(MAX_LINE_BYTES), b""):
            if line.strip():
                return "lines" if _is_object(line) else None
    return None


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(parse_json(line.decode("utf-8-sig")), dict)
    except (ValueError, RecursionError):
        return False

"""Parquet and Arrow files, read a column at a time with pyarrow.

An Arrow file is a stream, as the `datasets` library writes it, or has the random-access layout.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

from terrace.base.errors import DataError
from terrace.base.extras import needs
from terrace.data.forms import DataFile
from terrace.data.pieces import DocumentPart, Unit, check_text, cut, missing_column, shown_keys
from terrace.data.saved import selection_parts

_ROWS = 1024  # at a time in memory
_FILE_MAGIC = b"ARROW1"
_STREAM_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"


def table_units(of: DataFile, size: int, unit_bytes: int, column: str) -> list[Unit]:
    """Units of a Parquet or Arrow file, each a run of row groups or record batches. A selection is one unit.

    Raises `DataError` for a damaged file, and for one whose `column` is missing or does not hold strings.
    """
    file = of.path
    if of.form == "selection":
        with _damage(file), _selected(file) as (schema, _):
            _check_column(file, schema, column)
        return [Unit(file, of.form, 0, 1, True, sum(part.stat().st_size for part in of.parts), column)]
    if of.form == "parquet":
        with _parquet(file) as table:
            _check_column(file, table.schema_arrow, column)
            sizes = [table.metadata.row_group(group).total_byte_size for group in range(table.num_row_groups)]
    else:
        with _damage(file), _batches(file) as (schema, batches):
            _check_column(file, schema, column)
            sizes = [batch.nbytes for batch in batches]
    return [
        Unit(file, of.form, first, end, True, num_bytes, column)
        for first, end, num_bytes in _joined(sizes, unit_bytes, size)
    ]


def read_table_unit(unit: Unit) -> Iterator[DocumentPart]:
    """Yields the pieces of the rows of `unit`. A row without text yields a piece without text.

    Raises `DataError` naming the file and the row, counted from 0.
    """
    if unit.kind == "parquet":
        with _parquet(unit.file) as table, _damage(unit.file):
            # Rows are counted through the file, so that errors name the right one.
            row = sum(table.metadata.row_group(group).num_rows for group in range(unit.first))
            groups = list(range(unit.first, unit.end))
            yield from _pieces(unit, table.iter_batches(_ROWS, row_groups=groups, columns=[unit.column]), row)
    elif unit.kind == "selection":
        with _damage(unit.file), _selected(unit.file) as (_, rows):
            for number, (batch, row) in enumerate(rows):
                text = batch.column(unit.column)[row].as_py()
                yield from cut([check_text(text, unit.column, f"{unit.file} row {number}")])
    else:
        with _damage(unit.file), _batches(unit.file) as (_, batches):
            row, mine = 0, []
            for index, batch in enumerate(batches):  # mapped: skipped batches are not read
                if index < unit.first:
                    row += batch.num_rows
                elif index < unit.end:
                    mine.append(batch)
                else:
                    break
            yield from _pieces(unit, mine, row)


def _pieces(unit: Unit, batches: Iterable[Any], row: int) -> Iterator[DocumentPart]:
    for batch in batches:
        column = batch.column(unit.column)
        column.validate(full=True)  # offsets of a damaged file would be followed anywhere
        for text in column.to_pylist():
            yield from cut([check_text(text, unit.column, f"{unit.file} row {row}")])
            row += 1


def _joined(sizes: list[int], unit_bytes: int, size: int) -> Iterator[tuple[int, int, int]]:
    first, held, total = 0, 0, max(1, sum(sizes))
    for end, each in enumerate(sizes, start=1):
        held += each
        # Sizes in memory are scaled to bytes of the file, for progress.
        if held >= unit_bytes or end == len(sizes):
            yield first, end, held * size // total
            first, held = end, 0


def _check_column(file: Path, schema: Any, column: str) -> None:
    if schema.names.count(column) != 1:
        if column in schema.names:
            raise DataError(f"{file} has the column {column!r} {schema.names.count(column)} times; rename all but one")
        raise missing_column(str(file), column, schema.names)
    types = _pyarrow(file).types
    # A dictionary column stores each string once; its values decide.
    kind = schema.field(column).type
    value = kind.value_type if types.is_dictionary(kind) else kind
    if not (types.is_string(value) or types.is_large_string(value) or types.is_string_view(value)):
        raise DataError(
            f"{file}: column {column!r} is of type {kind}, not string; name another with --data.column, or convert it"
        )


def table_records(of: DataFile, columns: tuple[str, ...]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields the rows of a table or a saved selection, limited to `columns`, with their places.

    Nulls are dropped at any depth, because a table gives all its records the same keys. Raises `DataError` for a
    damaged file and for one without any of `columns`.
    """
    number = 0
    for batch in _columns(of, columns):
        for row in batch.to_pylist():
            number += 1
            yield _without_nulls(row), f"{of.path}: row {number}"


def _columns(of: DataFile, columns: tuple[str, ...]) -> Iterator[Any]:
    file = of.path
    if of.form == "selection":
        with _damage(file), _selected(file) as (schema, rows):
            kept = _present(file, schema, columns)
            yield from (batch.select(kept).slice(row, 1) for batch, row in rows)
        return
    if of.form == "parquet":
        with _parquet(file) as table, _damage(file):
            yield from table.iter_batches(_ROWS, columns=_present(file, table.schema_arrow, columns))
        return
    with _damage(file), _batches(file) as (schema, batches):
        kept = _present(file, schema, columns)
        for batch in batches:
            chosen = batch.select(kept)
            chosen.validate(full=True)  # offsets of a damaged file would be followed anywhere
            for first in range(0, chosen.num_rows, _ROWS):
                yield chosen.slice(first, _ROWS)


def _present(file: Path, schema: Any, columns: tuple[str, ...]) -> list[str]:
    kept = [name for name in columns if name in schema.names]
    for name in kept:
        if schema.names.count(name) > 1:
            raise DataError(f"{file} has the column {name!r} {schema.names.count(name)} times; rename all but one")
    if not kept:
        there = shown_keys(schema.names)
        raise DataError(f"{file} has none of the columns {', '.join(columns)} (its columns: {there}); rename them")
    return kept


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


@contextmanager
def _parquet(file: Path) -> Iterator[Any]:
    _pyarrow(file)
    import pyarrow.parquet

    with _damage(file):
        table = pyarrow.parquet.ParquetFile(file, memory_map=True, page_checksum_verification=True)
    with table:
        yield table


@contextmanager
def _batches(file: Path) -> Iterator[tuple[Any, Iterator[Any]]]:
    arrow = _pyarrow(file)
    with arrow.memory_map(str(file)) as mapped:
        # The random-access layout begins with its magic; a stream does not.
        if mapped.read(len(_FILE_MAGIC)) == _FILE_MAGIC:
            reader = arrow.ipc.open_file(mapped)
            yield reader.schema, (reader.get_batch(index) for index in range(reader.num_record_batches))
            return
        mapped.seek(max(0, mapped.size() - len(_STREAM_END)))
        if mapped.read() != _STREAM_END:  # a stream that is cut between two batches reads well
            raise DataError(f"{file} is damaged or no Arrow file: its end is missing; copy or make it again")
        mapped.seek(0)
        reader = arrow.ipc.open_stream(mapped)
        yield reader.schema, iter(reader)


@contextmanager
def _selected(state: Path) -> Iterator[tuple[Any, Iterator[tuple[Any, int]]]]:
    """The schema of a saved selection, and its rows in order, each as a batch and a row index in it."""
    parts, indices = selection_parts(state)
    with ExitStack() as opened:
        found = [opened.enter_context(_batches(part)) for part in parts]
        batches = [batch for _, those in found for batch in those]  # mapped, not read
        for batch in batches:
            batch.validate(full=True)  # offsets of a damaged file would be followed anywhere
        ends = list(accumulate(batch.num_rows for batch in batches))

        def rows() -> Iterator[tuple[Any, int]]:
            for file in indices:
                with _batches(file) as (_, those):
                    for index in (each for batch in those for each in batch.column(0).to_pylist()):
                        if not 0 <= index < (ends[-1] if ends else 0):
                            raise DataError(f"{file} selects row {index}, which is not there; copy the data set again")
                        number = bisect_right(ends, index)
                        yield batches[number], index - ends[number] + batches[number].num_rows

        yield found[0][0], rows()


@contextmanager
def _damage(file: Path) -> Iterator[None]:
    try:
        yield
    except (_pyarrow(file).ArrowException, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{file} is damaged or cannot be read ({reason}); copy or make it again") from error


def _pyarrow(file: Path) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise DataError(f"data {file} {needs('pyarrow')}") from error
    return pyarrow

"""Strict tables: TOML or JSON to frozen dataclasses and back.

Unknown keys, missing keys and wrong types are a `ConfigError` that names the dotted path, so that no
option can be silently ignored. Nothing is coerced except an integer where a float is asked for.
"""

import dataclasses
import json
import re
import types
import typing
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from terrace.base.errors import ConfigError, did_you_mean
from terrace.base.files import read_bounded
from terrace.base.foreign import read_file
from terrace.base.parsing import parse_json, parse_toml
from terrace.base.sealed import is_intact_toml, warn_changed

T = TypeVar("T")
_PYTHON_BOOLS = ("True", "False")  # which TOML writes in lower case


# Larger TOML files, such as a link to a device, would take minutes to parse. Indices of weights are JSON.
_MOST_BYTES = {".json": 256 << 20, ".toml": 16 << 20}


def read_table(path: Path, within: Path | None = None) -> dict[str, Any]:
    """Read a TOML (`.toml`) or JSON (`.json`) file whose top level is a table.

    A file from an untrusted folder is confined to it by `within` (`terrace.base.foreign`); omit it for a file that the
    user named. Raises `ConfigError` for a missing, unreadable or malformed file. Warns if the checksum of a TOML file
    differs.
    """
    try:
        most = _MOST_BYTES.get(path.suffix, _MOST_BYTES[".toml"])
        raw = read_bounded(path, most) if within is None else read_file(path, within, most)
        text = raw.decode("utf-8-sig")  # some editors write a byte order mark
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read {path}: it is not UTF-8 text") from error
    except ValueError as error:  # a name that no file can have
        raise ConfigError(f"cannot read {str(path)!r}: {error}") from error
    try:
        table = parse_json(text, _unique) if path.suffix == ".json" else parse_toml(text)
    except ValueError as error:
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise ConfigError(f"{path} is not valid {kind}: {error}{_python_word(text, error)}") from error
    if not isinstance(table, dict):
        raise ConfigError(f"{path} must hold a table of keys, not a {type(table).__name__}")
    if path.suffix != ".json" and not is_intact_toml(text):
        warn_changed(path, "if you edited it, delete its first line")
    return table


def _python_word(text: str, error: Exception) -> str:
    """Hint for a Python literal (True, False, None) on the line that `error` names; "" if there is none."""
    at = re.search(r"\bline (\d+)", str(error))
    line = text.splitlines()[int(at[1]) - 1 :][:1] if at else []
    found = re.search(r"\b(True|False|None)\b", "".join(line))
    if found is None:
        return ""
    return ": leave out a key without a value" if found[1] == "None" else f": write {found[1].lower()}, not {found[1]}"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object. Raises `ValueError` for a repeated key, of which one value would be lost silently."""
    table = dict(pairs)
    if len(table) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {twice!r} is there twice: keep one of them")
    return table


def load(cls: type[T], table: Mapping[str, Any], where: str) -> T:
    """Build the dataclass `cls` from `table`; `where` is the dotted path shown in errors."""
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where} must be a table, not {table!r}")
    # Unknown keys first: a misspelt key is the likelier mistake than a missing one.
    hints = get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls) if _is_key(field)}  # type: ignore[arg-type]
    for key in table:
        if key not in fields:
            raise ConfigError(f"unknown key {where}.{key}{_known_key(str(key), fields, where)}")
    # Conversion checks types; ranges are checked by the dataclass itself.
    values = {key: _convert(hints[key], value, f"{where}.{key}") for key, value in table.items()}
    for key, value in values.items():
        if value == "" and not _may_be_empty(fields[key]):
            raise ConfigError(f"{where}.{key} is empty: give it a value, or leave it out")
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in values:
            raise ConfigError(f"{where}.{name} is missing: give it a value")
    return cls(**values)


def _known_key(key: str, known: Iterable[str], where: str) -> str:
    from terrace.base.coming_from import key_for, sections  # here alone: most tables have no unknown key

    own = key_for(where, key) if where in sections() - {"cluster"} else ""
    return f"; did you mean {own!r}?" if own else did_you_mean(key, known, f"{where}.")


def dump(value: Any) -> Any:
    """Convert a dataclass to plain dicts and lists.

    Omits fields that equal the `absent` entry of their metadata, `None` by default.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        pairs = ((field, getattr(value, field.name)) for field in dataclasses.fields(value) if _is_key(field))
        return {field.name: dump(item) for field, item in pairs if item != field.metadata.get("absent")}
    if isinstance(value, Mapping):
        return {str(key): dump(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [dump(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _is_key(field: "dataclasses.Field[Any]") -> bool:
    # Fields with metadata key=False are set by code only, never read from a table.
    return field.init and bool(field.metadata.get("key", True))


def _may_be_empty(field: "dataclasses.Field[Any]") -> bool:
    # An empty path would mean the working folder. A field that accepts "" has it as default, or metadata `empty`.
    if field.default is dataclasses.MISSING:
        return field.name not in ("name", "path")
    return bool(field.default == "" or field.metadata.get("empty"))


def merge(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `top` into a copy of `base`, recursively.

    A list of tables that have a `name` is merged with a table keyed by these names: `tiers.node.size`.
    """
    result = dict(base)
    for key, value in top.items():
        below = result.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            result[key] = merge(below, value)
        elif key == "outer" and isinstance(below, str) and isinstance(value, Mapping):
            result[key] = {"preset": below, **value}  # the name of a preset, whose keys these override
        elif isinstance(below, list) and isinstance(value, Mapping):
            result[key] = _merge_named(below, value, key)
        else:
            result[key] = value
    return result


def parse_override(dotted: str, text: str) -> dict[str, Any]:
    """Nested tables for the override `a.b.c` = `text`. Text that is not a single TOML value is taken as a string."""
    check_text(f"--{dotted}", text)
    try:
        # Text with a newline could add more keys; it then counts as a string (checked below).
        table = parse_toml(f"value = {text}")
    except ValueError:
        table = {}
    value: Any = table["value"] if table.keys() == {"value"} else text
    for key in reversed(dotted.split(".")):
        if not key:
            raise ConfigError(f"--{dotted} has an empty key; write it as --section.key VALUE")
        value = {key: value}
    assert isinstance(value, dict)
    return value


def _merge_named(items: Sequence[Any], tables: Mapping[str, Any], where: str) -> list[Any]:
    names = [item.get("name") if isinstance(item, Mapping) else None for item in items]
    for name, table in tables.items():
        if name not in names:
            known = [str(known) for known in names if known]
            raise ConfigError(f"unknown name {name!r} in {where}{did_you_mean(name, known)}")
        if not isinstance(table, Mapping):
            raise ConfigError(f"{where}.{name} must be a table, not {table!r}: name one of its keys")
    return [
        merge(item, tables[name]) if isinstance(name, str) and name in tables else item
        for item, name in zip(items, names, strict=True)
    ]


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin = get_origin(hint)
    if hint is Any:  # the reader of the key checks it
        return value
    if origin is Union or origin is types.UnionType:
        return _convert_union(hint, value, where)
    if origin is Literal:
        # Types must match as well: True == 1 and 1.0 == 1, but neither is the literal 1.
        if not any(type(value) is type(choice) and value == choice for choice in get_args(hint)):
            choices = [str(choice) for choice in get_args(hint)]
            raise ConfigError(f"{where} = {value!r} is not one of its values{did_you_mean(str(value), choices)}")
        return value
    if origin is tuple:
        if isinstance(value, str) and get_args(hint) == (str, ...):
            value = [value]  # a single name stands for a list of one, which needs no quotes in a shell
        if not isinstance(value, (list, tuple)):
            names = isinstance(value, str) and not dataclasses.is_dataclass(get_args(hint)[0])
            example = f", such as [{json.dumps(value) if get_args(hint)[0] is str else value}]" if names else ""
            raise ConfigError(f"{where} = {value!r} must be a list{example}")
        inners = get_args(hint)
        if inners[-1] is Ellipsis:
            inners = inners[:1] * len(value)
        if len(inners) != len(value):
            raise ConfigError(f"{where} = {value!r} must be a list of {len(inners)}, not of {len(value)}")
        pairs = zip(inners, value, strict=True)
        return tuple(_convert(inner, item, f"{where}[{index}]") for index, (inner, item) in enumerate(pairs))
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where} = {value!r} must be a table: give {where}.NAME = VALUE")
        inner = get_args(hint)[1]
        return {str(key): _convert(inner, item, f"{where}.{key}") for key, item in value.items()}
    if hint is Path and isinstance(value, str):
        return Path(value)
    if dataclasses.is_dataclass(hint):
        return load(typing.cast(type[Any], hint), value, where)
    return _convert_scalar(hint, value, where)


def _convert_union(hint: Any, value: Any, where: str) -> Any:
    choices = [choice for choice in get_args(hint) if choice is not type(None)]
    if bool in choices and value in _PYTHON_BOOLS:
        return _convert_scalar(bool, value, where)
    if value is None and len(choices) < len(get_args(hint)):
        return None
    # If no alternative fits, the error of the last one is shown.
    reasons: list[ConfigError] = []
    for choice in choices:
        try:
            return _convert(choice, value, where)
        except ConfigError as error:
            reasons.append(error)
    if len(reasons) > 1 and get_origin(choices[-1]) is Mapping and not isinstance(value, Mapping):
        raise ConfigError(f"{reasons[0]}, or a table")
    raise reasons[-1]


def _convert_scalar(hint: Any, value: Any, where: str) -> Any:
    # The only coercion: an integer where a float is expected. A bool is an int in Python, but never meant as one.
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError as error:
            raise ConfigError(f"{where} is too large for a number") from error
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        fix = f": write {value.lower()}" if hint is bool and value in _PYTHON_BOOLS else ""
        raise ConfigError(f"{where} = {value!r} must be of type {hint.__name__}{fix}")
    return value


def check_text(flag: str, text: str) -> None:
    """Raise `ConfigError` for a command-line argument that is not UTF-8, which the files of a run cannot store."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(f"{flag} {text!r} is not UTF-8 text: write it, or rename the file, in UTF-8") from error

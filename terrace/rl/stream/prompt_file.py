"""Prompts of a JSONL or Parquet file, in an order that is drawn anew for every pass over them."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from terrace.base.errors import ConfigError, DataError
from terrace.base.extras import needs
from terrace.base.parsing import parse_json
from terrace.base.words import counted
from terrace.data.tokenizer import Tokenizer
from terrace.rl.values.prompts import Prompt

_KEPT_ORDERS = 2  # a step may lie across two passes


@dataclass(frozen=True)
class PromptFile:
    """A `PromptSource`: the first `num_held_out` of `prompts` are held out, the others are trained on."""

    prompts: tuple[Prompt, ...]
    num_held_out: int
    seed: int

    def prompt(self, place: int) -> Prompt:
        """The training prompt at a place, from 0; each pass over all of them has an order of its own."""
        trained = len(self.prompts) - self.num_held_out
        order = _order(self.seed, place // trained, trained)
        return self.prompts[self.num_held_out + order[place % trained]]

    def held_out(self) -> tuple[Prompt, ...]:
        return self.prompts[: self.num_held_out]


def read_prompts(
    file: Path, column: str, tokenizer: Tokenizer, *, longest: int, num_held_out: int, seed: int
) -> PromptFile:
    """Read and encode a file's prompts; the other columns of a line go to rewards.

    Raises `DataError` for a file that cannot be read, a line without text in `column`, and a prompt of more tokens than
    `longest` or of none; `ConfigError` where nothing is left to train on.
    """
    found = list[Prompt]()
    for number, line in _lines(file):
        text = line.get(column)
        if not isinstance(text, str) or not text:
            raise DataError(f"{file} line {number} has no text in {column!r}: it has {', '.join(map(str, line))}")
        tokens = tuple(int(token) for token in tokenizer.encode_prompt(text))
        if not 0 < len(tokens) <= longest:
            raise DataError(
                f"{file} line {number} has a prompt of {counted(len(tokens), 'token')}: 1 to run.max_prompt = "
                f"{longest} are allowed"
            )
        found.append(Prompt(text, tokens, {name: value for name, value in line.items() if name != column}))
    if len(found) <= num_held_out:
        raise ConfigError(
            f"{file} has {counted(len(found), 'prompt')}, and run.held_out = {num_held_out}: leave some to train on"
        )
    return PromptFile(tuple(found), num_held_out, seed)


@lru_cache(maxsize=_KEPT_ORDERS)
def _order(seed: int, turn: int, num: int) -> Sequence[int]:
    order = list(range(num))
    # A string seeds Python's generator by its SHA-512, the same in every process.
    random.Random(f"{seed}/{turn}").shuffle(order)
    return order


def _lines(file: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Numbers of lines (of Parquet: rows), from 1, and their tables."""
    if not file.is_file():
        raise DataError(f"cannot read {file}: there is no such file; name one with run.prompts_file")
    if file.suffix == ".parquet":
        try:
            table = import_module("pyarrow.parquet").read_table(file)
        except ModuleNotFoundError as error:
            raise ConfigError(f"{file} {needs('pyarrow')}") from error
        except Exception as error:  # whatever the package raises for a damaged file
            raise DataError(f"cannot read {file}: {' '.join(str(error).split())}") from error
        yield from enumerate(table.to_pylist(), start=1)
        return
    # Of bytes, whose lines end at \n alone: strings of JSON may have U+2028, and other ends of lines of text.
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield number, _table(line, f"{file} line {number}")


def _table(line: bytes, place: str) -> Mapping[str, Any]:
    try:
        found = parse_json(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{place} is not UTF-8, at its byte {error.start + 1}: write the file anew as UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise DataError(f"{place} is no table: write an object with the prompt in it")
    return found

"""Prompts of a JSONL or Parquet file, shuffled anew for every pass.

A prompt is a text, or messages in any form of terrace.data.row_forms, which the model's chat template renders up to the
assistant's answer.
"""

import random
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

from terrace.base.errors import ConfigError, DataError
from terrace.base.extras import needs
from terrace.base.foreign import check_file
from terrace.base.parsing import parse_json
from terrace.base.words import counted
from terrace.data.chat_prompt import ChatPrompts
from terrace.data.row_forms import prompt_row
from terrace.data.tokenizer import Tokenizer
from terrace.rl.values.prompts import Prompt

_RENDERED = 64  # prompts per rendering batch
_FORM = 'write an object on each line, such as {"prompt": "1 + 1?"}, or Parquet'
_KEPT_ORDERS = 2  # cached permutations, since a step may span two passes


@dataclass(frozen=True)
class PromptFile:
    """A `PromptSource` that holds out the first `num_held_out` of `prompts` and trains on the others."""

    prompts: tuple[Prompt, ...]
    num_held_out: int
    seed: int

    @property
    def is_chat(self) -> bool:
        """Whether all prompts are messages, rather than texts. Raises `ConfigError` if some are, and others not."""
        kinds = {prompt.is_chat for prompt in self.prompts}
        if len(kinds) > 1:
            raise ConfigError(
                "some prompts are messages and others texts, and an environment answers in the chat template or "
                "without: give all prompts one form"
            )
        return True in kinds

    def prompt(self, place: int) -> Prompt:
        """The training prompt at index `place`, from 0; each pass over the prompts has its own order."""
        trained = len(self.prompts) - self.num_held_out
        order = _order(self.seed, place // trained, trained)
        return self.prompts[self.num_held_out + order[place % trained]]

    def held_out(self) -> tuple[Prompt, ...]:
        return self.prompts[: self.num_held_out]


def read_prompts(
    file: Path,
    column: str,
    tokenizer: Tokenizer,
    *,
    longest: int,
    num_held_out: int,
    seed: int,
    chats: Callable[[], ChatPrompts] | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> PromptFile:
    """Read and tokenize a file's prompts; rewards receive the other columns of a line.

    `chats` returns the chat template, for prompts that are messages, and `tools` are given to it where a line has none.
    Raises `DataError` for a file that cannot be read, a line without a prompt in `column`, messages without a template,
    and a prompt that is empty or has more than `longest` tokens; `ConfigError` if no prompt is left to train on.
    """
    found = list[Prompt]()
    for lines in _batched(_lines(file)):
        asked = [prompt_row(line, column, f"{file} line {number}") for number, line in lines]
        asked = [each if isinstance(each, str) or tools is None else {"tools": list(tools), **each} for each in asked]
        texts = _texts(asked, [f"{file} line {number}" for number, _ in lines], tokenizer, chats)
        for (number, line), row, (text, tokens) in zip(lines, asked, texts, strict=True):
            if not 0 < len(tokens) <= longest:
                raise DataError(
                    f"{file} line {number} has a prompt of {counted(len(tokens), 'token')}: 1 to run.max_prompt = "
                    f"{longest} are allowed"
                )
            data = {name: value for name, value in line.items() if name != column}
            found.append(Prompt(text, tokens, data, is_chat=not isinstance(row, str)))
    if len(found) <= num_held_out:
        raise ConfigError(
            f"{file} has {counted(len(found), 'prompt')}, and run.held_out = {num_held_out}: leave some to train on"
        )
    return PromptFile(tuple(found), num_held_out, seed)


def _texts(
    asked: Sequence[str | Mapping[str, Any]],
    places: Sequence[str],
    tokenizer: Tokenizer,
    chats: Callable[[], ChatPrompts] | None,
) -> list[tuple[str, tuple[int, ...]]]:
    """The text and the tokens of each prompt."""
    conversations = [(row, where) for row, where in zip(asked, places, strict=True) if not isinstance(row, str)]
    made: Iterator[tuple[str, list[int]]] = iter(())
    if conversations:
        first = conversations[0][1]
        if chats is None:
            raise DataError(f"{first} has messages, and this task has no chat template: give texts")
        try:
            template = chats()
        except DataError as error:
            raise DataError(
                f"{first} has messages: {error}; or write prompts as texts, and name their key with run.prompt_column"
            ) from error
        made = template.rendered(conversations)
    found = list[tuple[str, tuple[int, ...]]]()
    for row, where in zip(asked, places, strict=True):
        try:
            text, tokens = next(made) if not isinstance(row, str) else (row, tokenizer.encode_prompt(row).tolist())
        except DataError as error:
            # A template names the line itself.
            raise error if not isinstance(row, str) else DataError(f"{where}: {error}") from error
        found.append((text, tuple(map(int, tokens))))
    return found


def _batched(lines: Iterator[tuple[int, Mapping[str, Any]]]) -> Iterator[list[tuple[int, Mapping[str, Any]]]]:
    # Batched, since the template runs in another process.
    while batch := list(islice(lines, _RENDERED)):
        yield batch


@lru_cache(maxsize=_KEPT_ORDERS)
def _order(seed: int, turn: int, num: int) -> Sequence[int]:
    order = list(range(num))
    # Python seeds from a string by its SHA-512, which is the same in every process.
    random.Random(f"{seed}/{turn}").shuffle(order)
    return order


def _lines(file: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield (number from 1, table) for each line, or for each row of Parquet."""
    try:
        check_file(file)
    except OSError as error:
        why = "there is no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise DataError(
            f"cannot read {file}: {why}; name a file of JSON lines or of Parquet with run.prompts_file"
        ) from error
    if file.suffix == ".parquet":
        try:
            table = import_module("pyarrow.parquet").read_table(file)
        except ModuleNotFoundError as error:
            raise ConfigError(f"{file} {needs('pyarrow')}") from error
        except Exception as error:  # whatever the package raises for a damaged file
            raise DataError(f"cannot read {file}: {' '.join(str(error).split())}") from error
        yield from enumerate(table.to_pylist(), start=1)
        return
    # Read as bytes, whose lines end only at \n: JSON strings may contain U+2028 and other line separators of text.
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                # Some editors begin a file with a byte order mark.
                yield number, _table(line.removeprefix(BOM_UTF8) if number == 1 else line, f"{file} line {number}")


def _table(line: bytes, place: str) -> Mapping[str, Any]:
    try:
        found = parse_json(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{place} is not UTF-8, at its byte {error.start + 1}: write the file anew as UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place} is not JSON: {error}; {_FORM}") from error
    if not isinstance(found, dict):
        raise DataError(f"{place} is no object of JSON: {_FORM}")
    return found

"""`terrace keys [SECTION]`: every key of a run with its type, its default, and one line.

The lines are the comments beside the fields of the dataclasses that read the keys, so there is one text for both.
"""

import argparse
import ast
import dataclasses
import inspect
import io
import json
import shutil
import textwrap
import tokenize
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from terrace.base.errors import ConfigError, did_you_mean
from terrace.data.config import DataConfig
from terrace.data.sources import SourceConfig
from terrace.model.experts.balance import BalanceConfig
from terrace.model.lora.config import LoraConfig
from terrace.plan.outer import Outer
from terrace.plan.plan import Plan
from terrace.runtime.settings import OptimizerConfig
from terrace.train.config import resolve
from terrace.train.keys import TrainConfig

SECTIONS: Mapping[str, type[Any]] = {
    "train": TrainConfig,
    "optimizer": OptimizerConfig,
    "data": DataConfig,
    "data.mixture": SourceConfig,
    "plan": Plan,
    "plan.outer": Outer,
    "lora": LoraConfig,
    "balance": BalanceConfig,
}
_NAMES = {int: "integer", float: "number", str: "string", bool: "true or false"}
_ELSEWHERE = {"cluster": "docs/clusters.md", "model": "docs/hugging-face.md"}
_REQUIRED = object()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Key:
    """A key of a section; `default` is a value as JSON, or says that there is none."""

    name: str
    kind: str
    default: str
    line: str


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "keys",
        description="List the keys of a run with type, default and one line, as --SECTION.KEY VALUE takes them.",
        epilog=f"Keys of clusters are in {_ELSEWHERE['cluster']}, of models in {_ELSEWHERE['model']}.",
    )
    parser.add_argument("section", nargs="?", metavar="SECTION", help=f"one of {', '.join(SECTIONS)} (default: all)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Print the keys; returns 0."""
    if rest:
        raise ConfigError(f"unknown argument {rest[0]!r}; see terrace keys --help")
    asked = options.section
    if asked in _ELSEWHERE:
        raise ConfigError(f"keys of the section {asked!r} are not listed here: see {_ELSEWHERE[asked]}")
    if asked is not None and asked not in SECTIONS:
        raise ConfigError(f"there is no section {asked!r}{did_you_mean(asked, SECTIONS)}")
    width = shutil.get_terminal_size((80, 24)).columns
    blocks = []
    # A section comes with the tables inside it.
    for name in [each for each in SECTIONS if asked is None or each == asked or each.startswith(f"{asked}.")]:
        lines = [f"[{name}]"]
        for key in keys_of(name):
            text = f"{key.name} = {key.default} ({key.kind}): {key.line}"
            lines += textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False)
        blocks.append("\n".join(lines))
    print("\n\n".join(blocks))
    return 0


def keys_of(section: str) -> list[Key]:
    """The keys of `section`, in the order of its dataclass."""
    kind = SECTIONS[section]
    hints, said = typing.get_type_hints(kind), dict(_comments(kind))
    default_run = getattr(resolve(None, {}, {}), section, None)
    found = []
    for field in dataclasses.fields(kind):
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if default is dataclasses.MISSING:
            # Sections of every run have a value in the default run.
            default = getattr(default_run, field.name, _REQUIRED)
        shown = "required" if default is _REQUIRED else "none" if default is None else json.dumps(default)
        found.append(Key(name=field.name, kind=kind_words(hints[field.name]), default=shown, line=said[field.name]))
    return found


def kind_words(hint: Any) -> str:
    """A type in words: `"a" | "b"` for a Literal, else "integer", "list", "table" and the like."""
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        return " | ".join(json.dumps(value) for value in typing.get_args(hint))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(kind_words(each) for each in typing.get_args(hint) if each is not types.NoneType)
    if hint in _NAMES:
        return _NAMES[hint]
    return "list" if origin is tuple else "table"


def _comments(kind: type[Any]) -> Iterator[tuple[str, str]]:
    """Each field of the dataclass `kind` with its comment: beside it, or in the lines above."""
    source = inspect.getsource(kind)
    comments = {
        token.start[0]: token.string.removeprefix("#").strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.ClassDef)
    lines = source.splitlines()
    for node in tree.body:
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        above, number = list[str](), node.lineno - 1
        while number in comments and lines[number - 1].lstrip().startswith("#"):
            above.insert(0, comments[number])
            number -= 1
        beside = [comments[at] for at in range(node.lineno, (node.end_lineno or node.lineno) + 1) if at in comments]
        yield node.target.id, " ".join(above + beside)

"""`terrace keys [SECTION | SECTION.KEY | WORD]`: the keys of runs with type, default and description, for every
command.

Descriptions are the comments beside the dataclass fields, so each is written once. Defaults are those of a run: of
`terrace train` from its default file, of products (`terrace.base.products.Keys`) from their dataclasses.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from typing import Any

from terrace.base.coming_from import options_for
from terrace.base.errors import ConfigError, did_you_mean
from terrace.base.products import Keys, product_keys
from terrace.data.config import DataConfig
from terrace.data.sources import SourceConfig
from terrace.model.balance import BalanceConfig
from terrace.model.lora.config import LoraConfig
from terrace.plan.keep import Keep
from terrace.plan.outer import Outer
from terrace.plan.plan import Plan
from terrace.plan.pruning import BlockPruning
from terrace.runtime.settings import OptimizerConfig
from terrace.train.config import RunConfig
from terrace.train.elastic_keys import ElasticConfig
from terrace.train.keys import TrainConfig
from terrace.train.layers import resolve_table
from terrace.train.rates import ADAMW, usual_rate
from terrace.train.rules import NUMBERS, checked_run
from terrace.train.teacher_keys import TeacherConfig

_OF_TRAIN: Mapping[str, type[Any]] = {
    "train": TrainConfig,
    "optimizer": OptimizerConfig,
    "data": DataConfig,
    "data.mixture": SourceConfig,
    "plan": Plan,
    "plan.outer": Outer,
    "plan.keep": Keep,
    "lora": LoraConfig,
    "balance": BalanceConfig,
    "teacher": TeacherConfig,
    "prune": BlockPruning,
    "elastic": ElasticConfig,
}
_LISTS = ("data.mixture",)  # sections that are lists of tables in a file
_NAMES = {int: "integer", float: "number", str: "string", bool: "true or false"}
_ELSEWHERE = {"cluster": "docs/clusters.md", "model": "docs/hugging-face.md"}
# Objectives whose usual rate (terrace.train.rates) is the default of optimizer.lr, in words.
_RATES = {"next-token": "on loaded weights", "reward": "of reward", "dpo": "of dpo"}


@cache
def _others() -> tuple[Keys, ...]:
    return tuple(product_keys())


@cache
def sections() -> Mapping[str, type[Any]]:
    """The dataclass of each section, those of products last."""
    found = dict(_OF_TRAIN)
    for product in _others():
        for name, kind in product.sections.items():
            found.setdefault(name, kind)
    return found


def _tables() -> dict[str, str]:
    # Sections of tables by any name, with the section whose keys each has.
    return {name: section for product in _others() for name, section in product.tables.items()}


def takers() -> list[str]:
    return ["train", "simulate", "doctor", *(product.command for product in _others())]


def names() -> list[str]:
    return [*sections(), *_tables()]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Key:
    """A key. `default` is JSON, or says that there is none; `others` lists defaults of other kinds of runs."""

    name: str
    kind: str
    default: str
    line: str
    others: str = ""

    @property
    def text(self) -> str:
        return f"{self.name} = {self.default} ({self.kind}): {self.line}{self.others and f'; {self.others}'}"


def add_parser(commands: Any) -> None:
    *others, last = takers()
    parser = commands.add_parser(
        "keys",
        description="List the keys of runs with type, default and one line, as --SECTION.KEY VALUE takes them: of "
        f"terrace {', '.join(others)} and {last}.",
        epilog=f"Keys of clusters are in {_ELSEWHERE['cluster']}, of models in {_ELSEWHERE['model']}.",
    )
    parser.add_argument(
        "asked",
        nargs="?",
        metavar="SECTION|KEY|WORD",
        help=f"a section ({', '.join(names())}), a key such as optimizer.lr, or a part of a key's name (default: all)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    # As on other command lines, a key may have leading dashes.
    if options.asked is None and len(rest) == 1 and rest[0].startswith("--"):
        options.asked, rest = rest[0].removeprefix("--"), ()
    if rest:
        raise ConfigError(f"unknown argument {rest[0]!r}; see terrace keys --help")
    asked = options.asked
    head = "" if asked is None else asked.partition(".")[0]
    if head in _ELSEWHERE:
        raise ConfigError(f"keys of the section {head!r} are not listed here: see {_ELSEWHERE[head]}")
    if asked is None or asked in names():
        print("\n\n".join(_block(name) for name in names() if _is_in(name, asked)))
        return 0
    found = _found(asked)
    if not found:
        if elsewhere := [each for each in options_for(asked) if each.startswith("--model.")]:
            raise ConfigError(f"{asked!r} is {elsewhere[0]} here, a key of models: see {_ELSEWHERE['model']}")
        known = (*names(), *dotted(), *(name.rpartition(".")[2] for name in dotted()))
        near = get_close_matches(asked, known, n=1)
        hint = did_you_mean(asked, near) if near else " and no key with that in its name: terrace keys lists all"
        raise ConfigError(f"there is no section {asked!r}{hint}")
    print("\n".join(_wrapped(f"{section}.{key.text}", "", "    ") for section, key in found))
    return 0


def _lists() -> set[str]:
    return {*_LISTS, *(name for product in _others() for name in product.lists)}


def _is_in(name: str, asked: str | None) -> bool:
    # A section comes with the tables inside it.
    return asked is None or name == asked or name.startswith(f"{asked}.")


def _found(asked: str) -> list[tuple[str, Key]]:
    """The key with this dotted name, else keys with the word in their name, else in their description."""
    every = [(section, key) for section in sections() for key in keys_of(section)]
    word = asked.lower().replace("-", "_")
    others = {own.removeprefix("--").partition(" ")[0] for own in options_for(word)}
    tests: list[Callable[[str, Key], bool]] = [
        lambda section, key: f"{section}.{key.name}" == word,
        lambda section, key: (
            any(f"{own}.".startswith(f"{section}.{key.name}.") for own in others)  # another trainer's word
            or (word in f"{section}.{key.name}" if "." in word else word in key.name.split("_"))
        ),
        lambda section, key: word in key.name,
        lambda section, key: word.replace("_", " ") in key.line.lower(),
    ]
    # The tables in such a section have the keys of another one.
    head, _, rest = word.partition(".")
    if head in _tables() and rest:
        table, _, name = rest.partition(".")
        return [(f"{head}.{table}", key) for key in keys_of(_tables()[head]) if key.name == (name or key.name)]
    return next((hits for test in tests if (hits := [each for each in every if test(*each)])), [])


def _block(name: str) -> str:
    title = f"[[{name}]]" if name in _lists() else f"[{name}]"
    words = [product.words[name] for product in _others() if name in product.words]
    head = f"{title}  {words[0]}" if words else title
    keys = [] if name in _tables() else keys_of(name)
    return "\n".join([_wrapped(head, "", "  "), *(_wrapped(key.text, "  ", "      ") for key in keys)])


def _wrapped(text: str, first: str, later: str) -> str:
    width = shutil.get_terminal_size((80, 24)).columns
    return textwrap.fill(text, width, initial_indent=first, subsequent_indent=later, break_on_hyphens=False)


def dotted(command: str | None = None) -> dict[str, str]:
    """Description of every key by dotted name; with `command`, only of those that it accepts as --SECTION.KEY."""
    asked = list(_OF_TRAIN) if command else list(sections())
    for product in _others():
        if product.command == command:
            asked = [*product.sections, *product.shared]
    if command:
        asked = [name for name in asked if name not in _lists()]
    return {f"{section}.{key.name}": key.line for section in asked for key in keys_of(section)}


@cache
def _default_run() -> RunConfig:
    return checked_run(resolve_table(None, {}, {}))


@cache
def keys_of(section: str) -> list[Key]:
    """The keys of `section`, in the order of its dataclass."""
    kind = sections()[section]
    hints = typing.get_type_hints(kind)
    said = dict(each for part in kind.__mro__[:-1] for each in _comments(part))
    # Sections of every run have a value in the default run of terrace train.
    default_run = getattr(_default_run(), section, None) if section in _OF_TRAIN else None
    found = []
    for field in dataclasses.fields(kind):
        if not field.metadata.get("key", True):
            continue
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if default_run is not None:
            default = getattr(default_run, field.name)
        # `None`, or its substitute; a switch is off.
        is_absent = default == field.metadata.get("absent") and default is not False
        shown = "required" if default is dataclasses.MISSING else "none" if is_absent else json.dumps(default)
        if section == "plan" and field.name in NUMBERS:
            shown = "the fastest"  # that fits, predicted when a run starts
        others = _other_defaults(section, field.name, default)
        kind_of_key = kind_words(hints[field.name])
        found.append(Key(name=field.name, kind=kind_of_key, default=shown, line=said[field.name], others=others))
    return found


def _other_defaults(section: str, name: str, default: Any) -> str:
    """Defaults of a key that differ from its usual one: for loaded weights, and in runs of products."""
    found = list[str]()
    if (section, name) == ("optimizer", "lr"):
        found += [f"{usual_rate('adamw', ADAMW[objective]):g} {words}" for objective, words in _RATES.items()]
        found.append(f"{usual_rate('adamw', ADAMW['next-token'], adapters=True):g} with [lora]")
    for product in _others():
        found += product.defaults(section, name, default)
    return ", ".join(found)


def kind_words(hint: Any) -> str:
    """A type in words: `"a" | "b"` for a Literal, else "integer", "list", "table" and so on."""
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        return " | ".join(json.dumps(value) for value in typing.get_args(hint))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(kind_words(each) for each in typing.get_args(hint) if each is not types.NoneType)
    if hint in _NAMES:
        return _NAMES[hint]
    return "list" if origin is tuple else "table"


def _comments(kind: type[Any]) -> Iterator[tuple[str, str]]:
    """Yields each field of the dataclass `kind` with its comment, beside it or in the lines above."""
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

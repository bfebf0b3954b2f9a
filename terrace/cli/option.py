"""Options of a command as a class: a field's annotation is the type, its value the rest of an argparse argument.

A class of annotated fields without `@dataclass`, whose machinery would take longer than parsing.
"""

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from inspect import get_annotations
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, get_args, get_origin

from terrace.base.errors import ConfigError


class Option(NamedTuple):
    """A field of a `Line`. `more` is passed to argparse."""

    metavar: str | None
    help: str
    default: Any = None
    name: str = ""  # of the option, if not the field's; "-" for a word without an option
    more: Mapping[str, Any] = MappingProxyType({})


def option(metavar: str | None, help: str, default: Any = None, *, name: str = "", **more: Any) -> Any:
    """`--name METAVAR`, by default of the field's name. A list is an option that may be given several times."""
    return Option(metavar, help, default, name, more)


def flag(help: str) -> Any:
    """`--name` without a value."""
    return Option(None, help, False, more={"action": "store_true"})


def word(metavar: str, help: str, **more: Any) -> Any:
    """A word without an option."""
    return Option(metavar, help, name="-", more=more)


class Line:
    """The options of a command, those of base classes first."""

    description: ClassVar[str | None] = None
    epilog: ClassVar[str | None] = None
    usage: ClassVar[str | None] = None
    run: ClassVar[str]  # MODULE:NAME of the function that runs it, imported when it is called
    takes_keys: ClassVar[bool] = True  # --section.key VALUE, and words that the function reads by itself

    @classmethod
    def add_to(cls, commands: Any, name: str, **more: Any) -> argparse.ArgumentParser:
        texts = {"description": cls.description, "epilog": cls.epilog, "usage": cls.usage}
        parser: argparse.ArgumentParser = commands.add_parser(name, **texts, **more)
        for owner in reversed(cls.__mro__):
            for field, kind in get_annotations(owner).items():
                if isinstance(found := vars(owner).get(field), Option):
                    _add(parser, field, kind, found)
        if hasattr(cls, "run"):
            parser.set_defaults(run=partial(_run, cls, name))
        return parser


def _run(line: type[Line], command: str, options: argparse.Namespace, rest: Sequence[str]) -> int:
    if rest and not line.takes_keys:
        raise ConfigError(f"unknown argument {rest[0]!r}; see terrace {command} --help")
    from terrace.base.collection import no_collection  # not at the top, since --help does not need it

    module, _, function = line.run.partition(":")
    with no_collection():  # objects of imported modules live as long as the process
        found = getattr(import_module(module), function)
    code: int = found(options, rest)
    return code


def _add(parser: argparse.ArgumentParser, field: str, kind: Any, found: Option) -> None:
    more = {"help": found.help, **found.more}
    if found.metavar is not None:
        more["metavar"] = found.metavar
    if type(None) in get_args(kind):
        kind = get_args(kind)[0]
    if get_origin(kind) is Literal:
        more["choices"] = get_args(kind)
    elif get_origin(kind) is list and "nargs" not in more:
        more["action"] = "append"
    elif kind in (int, float) or Path in (kind, *get_args(kind)):
        more["type"] = kind if kind in (int, float) else Path
    if found.name == "-":
        parser.add_argument(field, **more)
    else:
        name = found.name or f"--{field.replace('_', '-')}"
        parser.add_argument(name, dest=field, default=found.default, **more)

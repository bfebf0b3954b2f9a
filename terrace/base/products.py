"""Products: packages that add commands, kinds of runs, keys and page sections to Terrace from outside its core.

A distribution declares a product by an entry point of the group `terrace.products`, whose value is `MODULE:NAME` of a
`Product`. Terrace's own `rl` and `lab` are declared in the same way. That module is imported by `terrace --help`, so it
imports nothing but this one; everything else that a product gives is a reference, text in the same form, which is
imported when it is used. Values are named tuples, since importing `dataclasses` would slow down that command.

Without a product its commands are unknown. A product that cannot be loaded is left out, with one `ProductWarning`.
"""

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import Any, NamedTuple

from terrace.base.errors import ProductError

GROUP = "terrace.products"


class ProductWarning(UserWarning):
    """A product, or a part of one, was left out."""


class Command(NamedTuple):
    """A command, such as `rl`, or an action of a command that takes others' actions, such as `data lengths`.

    `module` has `add_parser(commands)`, or is MODULE:NAME of such a function, which `--help` imports: it adds a parser
    to argparse's subparsers, as `terrace.cli.option.Line.add_to` does, and sets the default `run`, a function of the
    parsed options and of the unparsed words that returns the exit code.
    """

    name: str
    help: str  # one line
    module: str
    takes_program: bool = False  # words after `--` are of another program: `options.command_words`


class RunKind(NamedTuple):
    """The runs of a product's command. Each has a folder with a `config.toml`, as those of `terrace train`.

    `folder` is a function of a run's folder and its table of settings: the `terrace.train.runs.RunFolder` by which
    commands such as `terrace generate` use its model. `page` is a function of the run's record and of whether timelines
    are drawn: the `terrace.report.run_view.Part` of its page.
    """

    command: str  # that starts and resumes them
    sections: tuple[str, ...]  # of config.toml that a run of `terrace train` has not; each run has the first
    folder: str
    page: str = ""  # without one, a page shows what all runs have


class Keys(NamedTuple):
    """The keys of a product's runs, for `terrace keys` and for completion; descriptions are comments of the fields."""

    command: str  # that takes them as --SECTION.KEY
    sections: Mapping[str, type[Any]]  # name -> dataclass of its keys
    shared: tuple[str, ...] = ()  # sections of `terrace train` that its runs have as well
    lists: tuple[str, ...] = ()  # sections that are lists of tables in a file
    tables: Mapping[str, str] = MappingProxyType({})  # sections of tables by any name -> section with their keys
    words: Mapping[str, str] = MappingProxyType({})  # section -> words beside its name
    # Section, key and usual default -> other defaults in words.
    defaults: Callable[[str, str, Any], list[str]] = lambda section, key, default: []


class Product(NamedTuple):
    """What a product adds. Texts that are no names are references."""

    name: str
    commands: tuple[Command, ...] = ()
    runs: tuple[RunKind, ...] = ()
    keys: str = ""  # its `Keys`
    sections: tuple[str, ...] = ()  # functions of a run's record: `terrace.report.sections.Section`s of its page
    pacer: str = ""  # a function of a cluster and a scale: the `terrace.comm.pace.Pace` of a rank under TERRACE_PACE
    faults: str = ""  # a function of a text, a rank and their number: the `terrace.train.injected.Faults` of that rank


@cache
def products() -> tuple[Product, ...]:
    found: dict[str, Product] = {}
    for name, reference in sorted(declared()):
        try:
            product = load_reference(reference)
            if not isinstance(product, Product):
                raise ProductError(f"{reference} is no Product (terrace.base.products)")
            found[name] = product
        except ProductError as error:
            left_out(f"product {name!r} is left out: {error}")
    return tuple(found.values())


def left_out(words: str) -> None:
    """Warns of a part of a product that is left out; `words` are its line."""
    warnings.warn(words, ProductWarning, stacklevel=2)


def load_reference(reference: str) -> Any:
    """The value of `MODULE:NAME`. Raises `ProductError`, except for a missing package that an extra installs."""
    module, colon, name = reference.partition(":")
    if not colon:
        raise ProductError(f"{reference!r} must be MODULE:NAME")
    found = load_module(module)
    if not hasattr(found, name):
        raise ProductError(f"{module} has no {name}: install its package again, or uninstall it")
    return getattr(found, name)


def load_module(name: str) -> Any:
    """The module of a product. Raises as `load` does."""
    try:
        return import_module(name)
    except Exception as error:  # whatever a foreign module raises, the rest must go on
        from terrace.base.extras import EXTRAS  # here, since it takes as long as all of the rest

        if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in EXTRAS:
            raise
        raise ProductError(
            f"{name} cannot be imported ({type(error).__name__}: {error}): install its package again, or uninstall it"
        ) from error


def commands(of: str = "") -> dict[str, Command]:
    """Commands of all products by name; with `of`, actions of the command `of` instead."""
    found: dict[str, Command] = {}
    for product in products():
        for command in product.commands:
            before, _, own = command.name.rpartition(" ")
            if before != of:
                continue
            if own in found:
                left_out(f"command {command.name!r} of product {product.name!r} is left out: another product has it")
            else:
                found[own] = command
    return found


def parser_adder(command: Command) -> Callable[[Any], object]:
    """The function that adds a product's command to argparse's subparsers. Raises as `load_reference` does."""
    found: Callable[[Any], object] = load_reference(
        command.module if ":" in command.module else f"{command.module}:add_parser"
    )
    return found


def add_parser(command: Command, parsers: Any) -> None:
    """Adds a product's command to argparse's `parsers`, or leaves it out, with a warning, if its module is broken."""
    try:
        parser_adder(command)(parsers)
    except ProductError as error:
        left_out(f"command {command.name!r} is left out: {error}")


def run_kinds() -> list[RunKind]:
    return [kind for product in products() for kind in product.runs]


def product_keys() -> list[Keys]:
    """The keys of all products; those that cannot be loaded are left out, with a warning."""
    found = list[Keys]()
    for product in products():
        try:
            found += [load_reference(product.keys)] if product.keys else []
        except ProductError as error:
            left_out(f"keys of product {product.name!r} are left out: {error}")
    return found


def first(choose: Callable[[Product], str]) -> Any:
    """The value of the first reference that `choose` finds in a product; None without one."""
    return next((load_reference(reference) for product in products() if (reference := choose(product))), None)


def declared() -> Iterator[tuple[str, str]]:
    """Name and reference of each declared product, as `importlib.metadata.entry_points` finds them.

    Importing that module alone would take half as long as all of `terrace --help`.
    """
    seen = set[str]()
    for folder in sys.path:
        with suppress(OSError):
            for entry in sorted(os.listdir(folder or os.curdir)):
                distribution, _, kind = entry.rpartition(".")
                name = distribution.partition("-")[0].replace("_", "-").lower()
                # The first on the path is the one that is imported.
                if kind in ("dist-info", "egg-info") and name not in seen:
                    seen.add(name)
                    yield from _of_group(os.path.join(folder, entry, "entry_points.txt"))


def _of_group(path: str) -> Iterator[tuple[str, str]]:
    with suppress(OSError), open(path, encoding="utf-8") as file:
        group = ""
        for line in file:
            if line.startswith("["):
                group = line.strip()[1:-1].strip()
            elif group == GROUP and "=" in line and not line.startswith(("#", ";")):
                name, _, reference = line.partition("=")
                yield name.strip(), reference.strip()

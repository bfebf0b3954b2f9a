"""Options that have an effect only together with another option: one table for all commands, and one error.

Keys of a run, which may be set in a file, are checked in terrace.train.effects; sampling options in
terrace.generation.request.
"""

import argparse
from typing import NamedTuple

from terrace.base.errors import ConfigError


class Partner(NamedTuple):
    """`option` requires one of `needs`: options that are given, or that have the value after the blank (`--format
    dcp`).
    """

    option: str
    needs: tuple[str, ...]
    shows_value: bool = False
    # Number of `needs` that the error names; the command itself refuses the option with the others.
    says: int | None = None


PARTNERS: dict[str, tuple[Partner, ...]] = {
    "doctor": (Partner("--seconds", ("--network",), shows_value=True),),
    "export": (
        Partner("--names", ("--format dcp",)),
        Partner("--weights-only", ("--format dcp",)),
        Partner("--base", ("--adapter",), shows_value=True),
    ),
    "plan": (Partner("--picture", ("--scale",)),),
    "report": (
        Partner("--port", ("--watch",), shows_value=True),
        Partner("--force", ("--out FILE", "--watch"), says=1),
    ),
    "simulate": (Partner("--force", ("--page FILE", "--trace FILE", "--csv FILE")),),
}


def check_partners(command: str, options: argparse.Namespace) -> None:
    """Raises `ConfigError` for the first option that is given without any of the options it needs."""
    for partner in PARTNERS.get(command, ()):
        value = _value(options, partner.option)
        if not _is_given(value) or any(_is_there(options, need) for need in partner.needs):
            continue
        shown = f" {value}" * partner.shows_value
        *others, last = partner.needs[: partner.says]
        needed = f"{', '.join(others)} or {last}" if others else last
        raise ConfigError(f"{partner.option}{shown} has no effect without {needed}: leave it out")


def _is_there(options: argparse.Namespace, need: str) -> bool:
    name, _, wanted = need.partition(" ")
    value = _value(options, name)
    # A word in capitals matches any value.
    return _is_given(value) if not wanted or wanted.isupper() else value == wanted


def _is_given(value: object) -> bool:
    return value is not None and value is not False


def _value(options: argparse.Namespace, option: str) -> object:
    return getattr(options, option.removeprefix("--").replace("-", "_"))

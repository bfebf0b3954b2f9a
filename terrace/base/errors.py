"""The exception tree.

A `TerraceError` is something the user can act on: one line that names the value, the rule and the fix. The command line
prints it without a traceback. Everything else is a bug of ours and keeps its traceback.
"""

from collections.abc import Iterable

_LEAST_BEGINNING = 3  # letters of a prefix that identify a word


class TerraceError(Exception):
    """Base of every error a user can act on."""


class ConfigError(TerraceError):
    """An unknown key, a value of the wrong type, an unreadable table."""


class ClusterError(TerraceError):
    """A cluster that cannot exist: no tiers, a size below one, no bandwidth."""


class ModelError(TerraceError):
    """A model configuration that is incomplete or that Terrace does not implement."""


class PlanError(TerraceError):
    """A plan that cannot run on this cluster with this model and batch."""


class ProgramError(TerraceError):
    """A program that breaks a rule of the instruction set."""


class DataError(TerraceError):
    """Data that is missing, empty, unreadable or too short."""


class CheckpointError(TerraceError):
    """A checkpoint that is missing, damaged or of another model."""


class TrainingError(TerraceError):
    """A run that cannot continue, or missed its target."""


class ProbeError(TerraceError):
    """Measurements from which no constant can be determined."""


class ProductError(TerraceError):
    """A product whose package cannot be used (`terrace.base.products`)."""


class HangError(TerraceError):
    """A step that stopped; the message names the rank that stopped it."""


def first_line(error: BaseException) -> str:
    """The type of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"


def did_you_mean(word: str, known: Iterable[str], where: str = "") -> str:
    """`; did you mean 'x'?` with the nearest known word, or else a list of all; `where` is prefixed to the nearest.

    A plan of another trainer is nearest to the one that is the same (`terrace.base.coming_from`).
    """
    choices = sorted(known)
    from terrace.base.coming_from import preset_for  # here alone: most commands have no error

    if preset := preset_for(word, choices):
        return f"; did you mean {where + preset!r}?"
    begun = [each for each in choices if len(word) >= _LEAST_BEGINNING and each.startswith(word)]
    import difflib  # here alone, too

    near = difflib.get_close_matches(word, choices, n=1, cutoff=0.6) or begun
    if near:
        return f"; did you mean {where + near[0]!r}?"
    return f"; known: {', '.join(choices)}" if choices else ""

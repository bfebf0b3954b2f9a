"""Claims of the benchmarks: a figure, its goal, and the rival it was measured against; needs no torch.

Machines that run these are seldom idle, so absolute times mean little. Contestants take turns, the order flips every
round, and a ratio is the median over rounds of the ratio within a round, with its quartiles.
"""

import argparse
import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A measured figure and the goal it is held against.

    `found` with its quartiles is in `unit` ("" for a ratio to the rival). `bound` tells the page's reader why the
    figure cannot reach its goal, and is shown when the goal is missed.
    """

    name: str
    found: float
    low: float
    high: float
    goal: float
    unit: str = ""
    at_least: bool = False  # the goal is a lower limit
    rival: str = ""
    bound: str = ""

    @property
    def is_met(self) -> bool:
        return self.found >= self.goal if self.at_least else self.found <= self.goal

    @property
    def goal_words(self) -> str:
        return f"at {'least' if self.at_least else 'most'} {self.goal:g}{self._unit}"

    @property
    def found_words(self) -> str:
        spread = "" if self.low == self.high else f" ({self.low:.3g} - {self.high:.3g})"
        return f"{self.found:.3g}{self._unit}{spread}"

    @property
    def _unit(self) -> str:
        return f" {self.unit}" if self.unit else ""


def measured(name: str, values: Sequence[float], goal: float, **more: object) -> Claim:
    """Claim about the median of repeated measurements; `more` are further fields of `Claim`."""
    low, high = _quartiles(values)
    return Claim(name=name, found=statistics.median(values), low=low, high=high, goal=goal, **more)  # type: ignore[arg-type]


def compared(name: str, ours: Sequence[float], theirs: Sequence[float], goal: float, **more: object) -> Claim:
    """Claim about the ratio of two contestants that took turns, round by round."""
    return measured(name, [a / b for a, b in zip(ours, theirs, strict=True)], goal, **more)


def ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """The median over rounds of the ratio within a round."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))


def spread(numerator: Sequence[float], denominator: Sequence[float]) -> tuple[float, float]:
    """The first and the third quartile of the ratio within a round."""
    return _quartiles([a / b for a, b in zip(numerator, denominator, strict=True)])


def ratio_words(numerator: Sequence[float], denominator: Sequence[float], digits: int = 3) -> str:
    """The ratio with its quartiles."""
    low, high = spread(numerator, denominator)
    return f"{ratio(numerator, denominator):.{digits}f} ({low:.{digits}f} - {high:.{digits}f})"


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def versioned(package: str, what: str = "") -> str:
    """A rival for a claim: the installed version of its package, and the part of it that competes."""
    try:
        return f"{package} {version(package).split('+')[0]} {what}".strip()
    except PackageNotFoundError:
        return f"{package}, not installed"


def options_for_claims(parser: argparse.ArgumentParser) -> None:
    """Add `--check` and `--claims`, the options that `judge` reads."""
    parser.add_argument("--check", action="store_true", help="exit 1 when a target is missed")
    parser.add_argument("--claims", type=Path, metavar="FILE", help="add the figures to FILE, a line of JSON each")


def judge(claims: Sequence[Claim], options: argparse.Namespace, wrong: Sequence[str] = ()) -> int:
    """Print the missed targets, keep the claims where `--claims` says, and give the exit code.

    `wrong` are results that are no matter of speed, such as losses that differ: they fail without `--check`.
    """
    missed = [f"{claim.name}: {claim.found_words}, goal {claim.goal_words}" for claim in claims if not claim.is_met]
    print("\nmet" if not missed and not wrong else "\nMISSED: " + "; ".join([*wrong, *missed]))
    if options.claims is not None:
        with options.claims.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps({**asdict(claim), "load": os.getloadavg()[0]}) + "\n" for claim in claims)
    return 1 if wrong or (options.check and missed) else 0


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table in Markdown, so that it can go into the README as it is."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    for row in (header, ["-" * width for width in widths], *rows):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |", flush=True)


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a results file, one a line; none if it is not there yet."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []

"""A timeline: rows of spans with a category each. Pages, the terminal and traces show it; nothing here draws.

The rows of recordings, of played passes, of a cycle and of roles are all of this form, so each view is written once.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol


class Described(Protocol):
    """What a span shows: words for a reader, made only where they are read, and facts for a trace."""

    def __str__(self) -> str: ...

    @property
    def facts(self) -> Mapping[str, object]: ...


class Words(str):
    """A description without further facts."""

    @property
    def facts(self) -> Mapping[str, object]:
        return {}


class TimedSpan(NamedTuple):
    """A category from `start_s` to `end_s`. `label` is its name in a terminal, where it has room for more letters."""

    start_s: float
    end_s: float
    category: str
    what: Described = Words()
    label: str = ""


class TimelineRow(NamedTuple):
    """Spans in order of time. Rows of one `group` stand under its heading; `is_main` rows compute, others are lanes."""

    name: str
    spans: Sequence[TimedSpan]
    group: str = ""
    is_main: bool = True


class Stretch(NamedTuple):
    row: int
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Rows over the time from `start_s` to `end_s`; spans may reach out. `critical` stretches are underlined."""

    title: str
    rows: Sequence[TimelineRow]
    end_s: float
    start_s: float = 0.0
    critical: Sequence[Stretch] = field(default=())

    @property
    def length_s(self) -> float:
        """Seconds that are shown; never 0, by which positions are divided."""
        return (self.end_s - self.start_s) or 1.0

    @property
    def categories(self) -> set[str]:
        return {span.category for row in self.rows for span in self.inside(row)}

    def inside(self, row: TimelineRow) -> Iterator[TimedSpan]:
        """The spans of a row, cut to the shown time."""
        for span in row.spans:
            start_s, end_s = max(self.start_s, span.start_s), min(self.end_s, span.end_s)
            if end_s > start_s:
                yield span._replace(start_s=start_s, end_s=end_s)

    def between(self, start_s: float, end_s: float) -> "Timeline":
        """The same rows over a shorter time."""
        return replace(self, start_s=start_s, end_s=end_s)

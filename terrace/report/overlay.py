"""Several runs on one page: their curves in shared charts, final figures side by side, settings that differ."""

import json
from collections import Counter
from collections.abc import Sequence

from terrace.base.words import counted
from terrace.report.downloads import downloads
from terrace.report.markup import document, heading, html_table, lead, missing_list, section
from terrace.report.run_curves import Curve, curve_data, curve_tiles, drawable
from terrace.report.sides import Side

MOST_RUNS = 20  # the number of combinations of colours and dashes
_UNSET = "-"


def overlay_page(sides: Sequence[Side]) -> str:
    """The page of two or more runs, in the given order."""
    names = [side.name for side in sides]
    drawn = drawable(overlaid(sides))
    title = f"{counted(len(sides), 'run')}: {', '.join(names)}"
    missing = [f"{side.name}: {words}" for side in sides for words in side.missing]
    figures = [[key, *row] for key, row in figure_rows(sides)]
    differing = [[key, *row] for key, row in setting_rows(sides)]
    nothing = "<p>No setting differs.</p>"
    sections = [
        heading(title, ""),
        lead(f"{side.name}: {side.status}" for side in sides),
        section("Over the steps", curve_tiles(drawn)),
        section("Final figures", _table(["figure", *names], figures)),
        section("Settings that differ", _table(["setting", *names], differing) if differing else nothing),
        downloads(sides),
        missing_list(missing),
    ]
    page = document(title, sections, [], curves=[curve_data(curve) for curve in drawn])
    return page.encode(errors="replace").decode()


def overlaid(sides: Sequence[Side]) -> list[Curve]:
    """One chart per line of the runs' charts, with a line for each run."""
    kinds: dict[tuple[str, str], Curve] = {}
    own = [{curve.title: curve.lines for curve in side.curves} for side in sides]
    for side in sides:
        for curve in side.curves:
            for line in curve.lines:
                kinds.setdefault((curve.title, line), curve)
    num_lines = Counter(title for title, _ in kinds)
    found = []
    for (title, line), like in kinds.items():
        # Runs without the line get an empty one, so that colours are the same in all charts.
        lines = {side.name: curves.get(title, {}).get(line, ()) for side, curves in zip(sides, own, strict=True)}
        named = title if num_lines[title] == 1 or line == title.lower() else f"{title}: {line}"
        found.append(Curve(title=named, lines=lines, unit=like.unit, smooth=like.smooth, from_zero=like.from_zero))
    return found


def figure_rows(sides: Sequence[Side]) -> list[tuple[str, list[str]]]:
    """(Figure, its text in each run)."""
    keys = dict.fromkeys(key for side in sides for key in side.figures)
    return [(key, [side.figures[key].words if key in side.figures else _UNSET for side in sides]) for key in keys]


def setting_rows(sides: Sequence[Side]) -> list[tuple[str, list[str]]]:
    """(Key, its value in each run) of settings that differ between the runs whose settings can be read."""
    known = [side.settings for side in sides if side.settings is not None]
    rows = []
    for key in sorted({key for settings in known for key in settings}):
        values = [_shown(settings[key]) if key in settings else _UNSET for settings in known]
        if len(set(values)) > 1:
            given = iter(values)
            rows.append((key, ["?" if side.settings is None else next(given) for side in sides]))
    return rows


def _shown(value: object) -> str:
    # With quotes, so that 1 and "1" differ.
    return json.dumps(value, default=str, ensure_ascii=False)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return html_table(headings, rows, left=headings[:1]) if rows else ""

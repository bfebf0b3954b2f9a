"""The lab's picture: bars of step time at each accumulation, and of bytes between nodes, one row per contestant."""

from collections.abc import Callable, Mapping, Sequence
from html import escape

from bench.lab.entries import CONTESTANTS
from bench.lab.job import Job
from bench.lab.results import Case

_ROW, _BAR, _TOP, _FOOT = 44, 15, 120, 40
_LABELS, _GAP, _PANEL, _NUMBER = 262, 26, 300, 74
_OURS, _THEIRS = ("#0f766e", "#5eead4"), ("#475569", "#cbd5e1")  # first accumulation, then the second
_GREY, _INK = "#64748b", "#0f172a"

Value = Callable[[Case], float | None]


def lab_svg(cases: Mapping[tuple[str, int], Case], job: Job, links: str) -> str:
    """The picture; `links` are in words. Contestants without any result are left out; the page says why."""
    names = [entry for entry in CONTESTANTS if any(n == entry.name and not c.error for (n, _), c in cases.items())]
    accums = sorted({accum for _, accum in cases})[:2]
    outer = list(job.tiers)[-1]
    width = _LABELS + 2 * (_GAP + _PANEL + _NUMBER) + 12
    height = _TOP + _ROW * len(names) + _FOOT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="13">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(16, 30, "One training step on slow links", size=18, weight=650),
        _text(16, 50, _subtitle(cases, job, links), colour=_GREY),
        *_legend(accums),
    ]
    for index, entry in enumerate(names):
        y = _TOP + index * _ROW
        if index % 2 == 0:
            parts.append(f'<rect x="0" y="{y}" width="{width}" height="{_ROW}" fill="#f8fafc"/>')
        weight, colour = (650, _OURS[0]) if entry.is_ours else (400, _INK)
        parts.append(_text(_LABELS, y + _ROW / 2 + 4.5, entry.label, anchor="end", weight=weight, colour=colour))
    left = _LABELS + _GAP
    parts += _panel(left, "seconds a step (median)", lambda case: case.median_s, names, accums, cases, "s")
    left += _PANEL + _NUMBER + _GAP
    parts += _panel(left, "bytes between nodes, in S", lambda case: case.in_s(outer), names, accums, cases, "S")
    note = "S = bytes of all parameters in bf16. Median of all timed steps; lower is better."
    parts.append(_text(16, height - 14, note, size=12, colour=_GREY))
    return "\n".join([*parts, "</svg>\n"])


def _panel(
    left: float,
    title: str,
    value: Value,
    names: Sequence[object],
    accums: Sequence[int],
    cases: Mapping[tuple[str, int], Case],
    unit: str,
) -> list[str]:
    parts = [_text(left, _TOP - 12, title, weight=650)]
    height = _ROW * len(names)
    found = {key: value(case) for key, case in cases.items() if not case.error and key[1] in accums}
    longest = max((amount for amount in found.values() if amount is not None), default=0.0)
    parts.append(f'<line x1="{left}" x2="{left}" y1="{_TOP}" y2="{_TOP + height}" stroke="#94a3b8"/>')
    if not longest:
        parts.append(_text(left + 10, _TOP + height / 2, "not counted: no links with counters", colour=_GREY))
        return parts
    for index, entry in enumerate(names):
        name, ours = getattr(entry, "name", ""), getattr(entry, "is_ours", False)
        for half, accum in enumerate(accums):
            amount = found.get((name, accum))
            top = _TOP + index * _ROW + (_ROW - 2 * _BAR - 2) / 2 + half * (_BAR + 2)
            if amount is None:
                parts.append(_text(left + 6, top + 12, "-", size=12, colour=_GREY))
                continue
            length = max(1.0, amount / longest * _PANEL)
            colour = (_OURS if ours else _THEIRS)[half]
            parts.append(
                f'<rect x="{left}" y="{top:.1f}" width="{length:.1f}" height="{_BAR}" fill="{colour}" rx="1.5"/>'
            )
            parts.append(
                _text(left + length + 6, top + 12, f"{amount:.2f} {unit}", size=12, weight=650 if ours else 400)
            )
    return parts


def _legend(accums: Sequence[int]) -> list[str]:
    parts, x = [], 16.0
    for who, colours in (("Terrace", _OURS), ("others", _THEIRS)):
        for accum, colour in zip(accums, colours, strict=False):
            words = f"{who}, {accum} sequence{'s' if accum > 1 else ''} a rank and step"
            parts.append(f'<rect x="{x}" y="62" width="14" height="14" fill="{colour}" rx="1.5"/>')
            parts.append(_text(x + 20, 74, words, size=12))
            x += 34 + 6.4 * len(words)
    return parts


def _subtitle(cases: Mapping[tuple[str, int], Case], job: Job, links: str) -> str:
    size = max((case.num_params for case in cases.values()), default=0) / 1e6
    inside = job.ranks_per_node
    ranks = f"{job.num_nodes} nodes of {inside} gloo ranks"
    return f"{size:.1f} M parameters, bf16; {ranks}; {links}"


def _text(
    x: float, y: float, words: str, *, size: int = 13, weight: int = 400, colour: str = _INK, anchor: str = "start"
) -> str:
    style = f'font-size="{size}" font-weight="{weight}" fill="{colour}" text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>'

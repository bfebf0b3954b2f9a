"""Prints sections of a page (terrace.report.sections) on the terminal."""

from collections.abc import Iterable

from terrace.base.words import filled
from terrace.cli.terminal import Terminal
from terrace.report.sections import Section


def print_sections(sections: Iterable[Section]) -> None:
    console = Terminal()
    for section in sections:
        _print_section(console, section)


def _print_section(console: Terminal, section: Section) -> None:
    texts = [chart.text for chart in section.charts] + [section.text]
    lines = [text(console.width) for text in texts if text is not None]
    if lines:
        console.print(section.title, style="bold")
        print("\n".join(lines) + "\n")
    if section.table is not None and section.table.rows:
        console.print(section.table)
    if words := "\n".join(filter(None, section.words)):
        print(f"{filled(words)}\n")

"""The commands that documents show."""

import re
from pathlib import Path

_ROOT = Path(__file__).parents[2]
DOCS = [_ROOT / "README.md", *sorted((_ROOT / "docs").glob("*.md")), *sorted((_ROOT / "docs" / "design").glob("*.md"))]


def shown_commands() -> list[tuple[str, str]]:
    """(Name of the document, command) of each line that begins with a prompt."""
    found = []
    for path in DOCS:
        for block in re.findall(r"```(?:console|sh|bash)\n(.*?)```", path.read_text(encoding="utf-8"), re.S):
            for line in block.splitlines():
                if line.startswith("$ "):
                    found.append((path.name, line[2:].split("  #")[0].strip()))
    return found


def runs_here() -> list[tuple[str, str]]:
    """Those that start Terrace."""
    return [(name, command) for name, command in shown_commands() if command.split()[0] in ("terrace", "torchrun")]

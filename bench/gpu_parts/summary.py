"""The rows found so far, kept as they come: JSON lines that are appended, and a page that is replaced whole."""

import json
from collections.abc import Sequence
from pathlib import Path

from bench.gpu_parts.setting import Row
from terrace.base.files import open_atomic

Found = tuple[str, Row]  # the part, and a row of it


class Summary:
    """`results.jsonl` and `summary.md` in `folder`; `title` heads the page, and `parts` are those to come."""

    def __init__(self, folder: Path, title: str, parts: Sequence[str]) -> None:
        self._folder, self._title, self._parts = folder, title, parts
        self.found = list[Found]()
        (folder / "results.jsonl").write_text("", encoding="utf-8")
        self._write()

    def add(self, part: str, row: Row) -> None:
        """Keep a row in both files."""
        self.found.append((part, row))
        line = {"part": part, **row._asdict(), "verdict": row.verdict}
        with (self._folder / "results.jsonl").open("a", encoding="utf-8") as file:
            print(json.dumps(line), file=file, flush=True)
        self._write()

    def parts_with(self, verdict: str) -> list[str]:
        """Parts with a row of this verdict, each once."""
        return list(dict.fromkeys(part for part, row in self.found if row.verdict == verdict))

    def last_line(self) -> str:
        """Rows, and the parts with rows that are wrong or miss their goal."""
        text = f"{len(self.found)} rows"
        for verdict in ("WRONG", "missed"):
            parts = self.parts_with(verdict)
            text += f"; {verdict}: {', '.join(parts) or 'none'}"
        return text

    def _write(self) -> None:
        lines = [f"# {self._title}", "", self.last_line(), "", "| part | subject | found | goal | |"]
        lines.append("| --- | --- | --- | --- | --- |")
        for part, row in self.found:
            cells = (part, row.subject, row.found, row.goal, row.verdict)
            lines.append("| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |")
        begun = {part for part, _ in self.found}
        waiting = [part for part in self._parts if part not in begun]
        lines += ["", f"Without a row so far: {', '.join(waiting)}."] if waiting else []
        with open_atomic(self._folder / "summary.md") as file:
            file.write("\n".join([*lines, ""]).encode())

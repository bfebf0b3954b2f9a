"""The rows found so far, kept as they come: JSON lines that are appended, and a page that is replaced whole.

Both stay small: a line a row, so they can be copied from a machine that offers nothing else.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from bench.gpu_parts.setting import NOT_RUN, SKIPPED, Row
from terrace.base.files import open_atomic

Found = tuple[str, Row]  # the part, and a row of it
_NAMED = ("WRONG", "missed", SKIPPED, NOT_RUN)  # verdicts whose parts are named at the end; the first two always


class Summary:
    """`results.jsonl` and `summary.md` in `folder`; `title` heads the page, and `parts` are those to come.

    With `goes_on`, rows of other parts stay that an earlier call found under the same title: on this device.
    """

    def __init__(self, folder: Path, title: str, parts: Sequence[str], *, goes_on: bool = False) -> None:
        self._folder, self._title, self._parts = folder, title, parts
        self.found = self._earlier() if goes_on else list[Found]()
        (folder / "results.jsonl").write_text("".join(map(self._line, self.found)), encoding="utf-8")
        self._write()

    def add(self, part: str, row: Row) -> None:
        """Keep a row in both files."""
        self.found.append((part, row))
        with (self._folder / "results.jsonl").open("a", encoding="utf-8") as file:
            file.write(self._line((part, row)))
        self._write()

    def parts_with(self, verdict: str) -> list[str]:
        """Parts with a row of this verdict, each once."""
        return list(dict.fromkeys(part for part, row in self.found if row.verdict == verdict))

    def last_line(self) -> str:
        """Rows, and the parts with rows that are wrong, miss their goal, or were not tried."""
        text = f"{len(self.found)} rows"
        for verdict in _NAMED:
            if (parts := self.parts_with(verdict)) or verdict in _NAMED[:2]:
                text += f"; {verdict}: {', '.join(parts) or 'none'}"
        return text

    def _line(self, found: Found) -> str:
        part, row = found
        return json.dumps({"of": self._title, "part": part, **row._asdict(), "verdict": row.verdict}) + "\n"

    def _earlier(self) -> list[Found]:
        path = self._folder / "results.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        found = list[Found]()
        for line in lines:
            with suppress(ValueError, KeyError, TypeError):  # of another version, or cut short
                table = json.loads(line)
                if table["of"] == self._title and table["part"] not in self._parts:
                    found.append((table["part"], Row(*(table[name] for name in Row._fields))))
        return found

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

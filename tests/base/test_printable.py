"""Text from outside drives no terminal, wherever it is printed."""

import io
import sys
from pathlib import Path

import pytest
from rich.table import Table

from terrace.base.printable import escape, printable
from terrace.cli.main import main
from terrace.cli.output import printable_output
from terrace.cli.terminal import Terminal
from terrace.report.page import page_html
from terrace.report.sections import Page

EVIL = "a\x1b]0;title\x07\r\x9b2J\u202egnp\udce9\n\tb"
TOLD = "a\\x1b]0;title\\x07\\r\\x9b2J\\u202egnp\\udce9\n\tb"


def test_what_a_terminal_acts_on_is_spelled_out() -> None:
    assert printable(EVIL) == TOLD
    assert printable("né 漢字 🙂 👩\u200d🚀 \\x1b\n") == "né 漢字 🙂 👩\u200d🚀 \\x1b\n"
    assert escape("<\x1b>") == "&lt;\\x1b&gt;"
    assert "\x1b" not in page_html(Page(title=EVIL, figures=[(EVIL, EVIL)]))


def test_tables_and_prints_spell_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    with printable_output():
        print(EVIL)
        table = Table(EVIL, title=EVIL)
        table.add_row(EVIL)
        Terminal().print(table)
        Terminal().print(EVIL)
    assert sys.stdout is out
    assert out.getvalue().count("\\x1b]0;") == 5
    assert not {"\x1b", "\r", "\x07", "\x9b", "\u202e"} & set(out.getvalue())


@pytest.mark.parametrize(
    "words",
    [
        ("simulate", "--config", EVIL),
        ("train", EVIL),
        ("generate", EVIL, "--prompt", "a"),
        ("report", EVIL),
        ("plan", "--model", EVIL, "--cluster", "local", "--batch", "8", "--sequence", "8"),
        (EVIL,),
    ],
)
def test_no_argument_reaches_the_terminal_as_it_is(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert not {"\x1b", "\r", "\x07", "\x9b", "\u202e"} & set(said), said


def test_names_in_files_are_spelled_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "run.toml"
    config.write_text('[train]\n"st\\u001b[31meps" = 3\n')
    assert main(["simulate", "--config", str(config)]) == 2
    assert "unknown key train.st\\x1b[31meps" in capsys.readouterr().err

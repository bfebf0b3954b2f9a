"""Ctrl-C, or a launcher's SIGINT, while the command is imported."""

import pytest

from terrace import __main__ as command
from tests.chaos.torchrun import is_of_python


def test_an_interrupt_while_a_command_is_imported_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "import_module", interrupted)
    assert command.main() == 130
    assert capsys.readouterr().err == "terrace: interrupted\n"


def test_the_campaign_tells_an_interrupted_interpreter_from_terrace() -> None:
    head = 'Traceback (most recent call last):\n  File "<frozen runpy>", line 112, in _get_module_details\n'
    package = '  File "/x/terrace/__init__.py", line 6, in <module>\n'
    assert is_of_python(f"{head}KeyboardInterrupt\n")
    assert is_of_python(f"{head}{package}KeyboardInterrupt\n")
    assert not is_of_python(f'{head}  File "/x/terrace/cli/main.py", line 6, in <module>\nKeyboardInterrupt\n')
    assert not is_of_python(f"{head}ValueError\n")
    assert not is_of_python("terrace: interrupted\n")

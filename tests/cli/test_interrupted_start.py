"""Ctrl-C, or a launcher's SIGINT, while the command is imported."""

from collections.abc import Callable

import pytest

from terrace import __main__ as command
from tests.chaos.torchrun import is_of_python


class Named:
    """An attribute whose class is interrupted while it is made."""

    def __set_name__(self, owner: type, name: str) -> None:
        raise KeyboardInterrupt


def interrupted(name: str) -> None:
    raise KeyboardInterrupt


def interrupted_in_a_class(name: str) -> None:
    type("Interrupted", (), {"attribute": Named()})


def wrong(name: str) -> None:
    raise RuntimeError(name)


@pytest.mark.parametrize("loading", [interrupted, interrupted_in_a_class])
def test_an_interrupt_while_a_command_is_imported_is_one_line(
    loading: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "import_module", loading)
    assert command.main() == 130
    assert capsys.readouterr().err == "terrace: interrupted\n"


def test_an_error_while_a_command_is_imported_is_no_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "import_module", wrong)
    with pytest.raises(RuntimeError):
        command.main()


def test_the_campaign_tells_an_interrupted_interpreter_from_terrace() -> None:
    head = 'Traceback (most recent call last):\n  File "<frozen runpy>", line 112, in _get_module_details\n'
    package = '  File "/x/terrace/__init__.py", line 6, in <module>\n'
    assert is_of_python(f"{head}KeyboardInterrupt\n")
    assert is_of_python(f"{head}{package}KeyboardInterrupt\n")
    assert not is_of_python(f'{head}  File "/x/terrace/cli/main.py", line 6, in <module>\nKeyboardInterrupt\n')
    assert not is_of_python(f"{head}ValueError\n")
    assert not is_of_python("terrace: interrupted\n")

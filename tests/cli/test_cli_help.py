"""`--help`: every option is explained with its default, and the defaults it names are those that hold."""

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import terrace.cli.main
import terrace.launch.watchdog
from terrace.base.errors import ConfigError
from terrace.cli.main import main, parser_of
from terrace.train.resolve import resolve


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _parsers(inner)


OPTIONS = [(parser.prog, action) for parser in _parsers(parser_of()) for action in parser._actions]


@pytest.mark.parametrize(("prog", "action"), OPTIONS, ids=lambda value: getattr(value, "dest", value))
def test_an_option_is_explained_with_its_default(prog: str, action: argparse.Action) -> None:
    if isinstance(action, argparse._SubParsersAction):
        assert all(choice.help for choice in action._choices_actions), prog
        return
    assert action.help, f"{prog} {action.dest}"
    if action.default not in (None, False, [], argparse.SUPPRESS):
        default = f"{action.default:g}" if isinstance(action.default, float) else str(action.default)
        said = (action.help % {"default": action.default}).partition("default: ")[2]
        assert said.startswith((default, repr(default))), f"{prog} {action.dest}: {action.help}"


def test_no_option_takes_an_empty_value() -> None:
    """An empty name of a folder would be the working folder."""
    checked = 0
    for parser in _parsers(parser_of()):
        for action in parser._actions:
            if (
                action.nargs in (0, argparse.PARSER, argparse.REMAINDER)
                or action.default == ""
                or action.dest == "prompt"
            ):
                continue
            with pytest.raises(ConfigError, match=r"^\S+ is empty: give it a value"):
                parser._get_value(action, "")
            checked += 1
    assert checked > 60


@pytest.mark.parametrize("command", ["train", "simulate"])
def test_the_defaults_of_a_run_are_those_of_its_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    run = resolve(None, {}, {})
    for default in (run.cluster.name, run.plan.name, run.data.path):
        assert f"(default: {default}" in said
    assert run.model.family == "llama"
    assert "(default: a small Llama-style decoder)" in said


def test_every_exit_code_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    table = page.partition("| exit code |")[2].partition("\n\n")[0]
    said = {int(code): text for code, text in re.findall(r"^\| (\d+) \| (.+) \|$", table, re.MULTILINE)}
    modules = (terrace.cli.main, terrace.launch.watchdog)
    codes = {value for module in modules for name, value in vars(module).items() if name.startswith("EXIT_")}
    assert said.keys() == {0, *codes}
    assert "another rank stopped this one" in said[terrace.launch.watchdog.EXIT_HANG]


def test_the_list_of_commands_needs_none_of_their_modules() -> None:
    listing = (
        "import sys; from terrace.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", listing], capture_output=True, text=True, check=True, timeout=60)
    named = re.findall(r"^    (\w+)  ", done.stdout, re.MULTILINE)
    (commands,) = (action for action in parser_of()._actions if isinstance(action, argparse._SubParsersAction))
    assert named == list(commands.choices)
    assert not {f"terrace.cli.{name}" for name in named} & set(done.stdout.split())

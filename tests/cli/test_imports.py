"""Modules that a command imports before it does anything: the start of most commands is importing."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.tiny_runs import environment

_LOADED = """
import sys
before = set(sys.modules)
import terrace.cli.main, importlib
for name in sys.argv[1:]:
    importlib.import_module(f"terrace.cli.{name}")
print(*sorted(sys.modules.keys() - before))
"""
_HEAVY = {"torch", "numpy", "sympy", "safetensors", "tokenizers", "transformers", "jinja2", "pyarrow", "tensorboard"}


def modules(code: str, *words: str, cwd: Path | None = None) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        env=environment(),
        cwd=cwd,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return set(done.stdout.split())


# A tenth more than today's: a bound that is met says which import brought the rest.
@pytest.mark.parametrize(
    ("command", "most", "most_of_terrace", "draws_tables"),
    [("", 57, 10, False), ("generate", 98, 16, False), ("train", 300, 160, False), ("plan", 470, 300, True)],
)
def test_a_command_imports_what_it_uses(command: str, most: int, most_of_terrace: int, draws_tables: bool) -> None:
    found = modules(_LOADED, *filter(None, [command]))
    roots = {name.partition(".")[0] for name in found}
    assert not roots & _HEAVY
    assert ("rich" in roots) == draws_tables
    assert len(found) <= most, found
    assert sum(name.startswith("terrace") for name in found) <= most_of_terrace, found


_HELP = """
import contextlib, io, sys
from terrace.cli.main import HELP, main
for command in [*HELP.keys() - {"keys"}, "rl", "rehearse", "data prepare", "data lengths", "rehearse run"]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main([*command.split(), "--help"])
print(*sorted(sys.modules))
"""
_RUN = """
import contextlib, io, sys
from terrace.cli.main import main
for words in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(words.split()) == 0, words
print(*sorted(sys.modules))
"""


def test_help_imports_options_alone() -> None:
    """Of all commands together, but `keys`, whose help lists the sections of a run."""
    found = modules(_HELP)
    assert not {name.partition(".")[0] for name in found} & {*_HEAVY, "rich"}
    ours = {name for name in found if name.startswith("terrace")}
    assert {"terrace.cli.lines", "terrace.rl.commands.line", "terrace.lab.commands.lines"} <= ours
    assert len(ours) <= 24, sorted(ours)


# Commands, one after the other, and prefixes of modules that they do without.
@pytest.mark.parametrize(
    ("commands", "without"),
    [
        (("keys optimizer",), ("terrace.simulate", "terrace.planner", "terrace.report", "rich", *_HEAVY)),
        (("simulate zero3",), ("terrace.planner.search", "terrace.runtime.engine", "terrace.rl", *_HEAVY)),
        (("data lengths --distribution bimodal",), ("terrace.planner.search", "terrace.simulate.step", *_HEAVY)),
    ],
    ids=["keys", "simulate", "lengths"],
)
def test_a_command_imports_no_part_that_it_does_not_use(
    commands: Sequence[str], without: Sequence[str], tmp_path: Path
) -> None:
    found = modules(_RUN, *commands, cwd=tmp_path)
    assert [name for name in sorted(found) if any(f"{name}.".startswith(f"{part}.") for part in without)] == []

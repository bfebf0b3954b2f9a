"""Modules that a command imports before it does anything: the start of most commands is importing."""

import subprocess
import sys

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


def loaded(*commands: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", _LOADED, *commands],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout.split()


# A tenth more than today's: a bound that is met says which import brought the rest.
@pytest.mark.parametrize(
    ("command", "most", "most_of_terrace", "draws_tables"),
    [("", 57, 10, False), ("generate", 98, 16, False), ("train", 259, 128, False), ("plan", 430, 265, True)],
)
def test_a_command_imports_what_it_uses(command: str, most: int, most_of_terrace: int, draws_tables: bool) -> None:
    found = loaded(*filter(None, [command]))
    roots = {name.partition(".")[0] for name in found}
    assert not roots & _HEAVY
    assert ("rich" in roots) == draws_tables
    assert len(found) <= most, found
    assert sum(name.startswith("terrace") for name in found) <= most_of_terrace, found

"""Imports of all kinds: no circles, and what is near stays near."""

from functools import cache

import pytest

from tests.support.import_graph import at_import, circles, imports, reached

MAX_IMPORT_CHAIN = 20

_NEAR = ("train.config", "train.runs", "rl.config", "cli.generate", "runtime.engine", "checkpoint.peer_copies")


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Not by an import inside a function or under TYPE_CHECKING either."""
    assert len(imports(for_types=True)) > 500
    assert circles() == []


@pytest.mark.parametrize("module", _NEAR)
def test_what_needs_no_prediction_reaches_none(module: str) -> None:
    found = reached(f"terrace.{module}")
    assert [name for name in found if name.startswith(("terrace.simulate", "terrace.planner"))] == []


def test_text_from_a_trained_model_reaches_few_modules() -> None:
    """A little more than today's 269: more means that an import has brought another part of the house."""
    assert len(reached("terrace.cli.generate")) <= 280


def test_the_longest_import_chain_is_below_20_modules() -> None:
    """A chain is a path of imports at module level among the files of `terrace`, names of rooms and imports under
    TYPE_CHECKING left out; its length is the number of files on it.
    """

    @cache
    def longest(name: str) -> tuple[str, ...]:
        return (name, *max(map(longest, at_import()[name]), key=len, default=()))

    chain = max(map(longest, at_import()), key=len)
    assert 10 < len(chain) < MAX_IMPORT_CHAIN, " -> ".join(chain)

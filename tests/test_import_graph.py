"""Imports of all kinds: no circles, and what is near stays near."""

import pytest

from tests.support.import_graph import circles, imports, reached

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

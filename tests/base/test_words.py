"""Counts in sentences."""

import pytest

from terrace.base.words import counted, were


@pytest.mark.parametrize(
    ("number", "noun", "spec", "said"),
    [
        (1, "step", "", "1 step"),
        (0, "step", "", "0 steps"),
        (2, "micro-batch", "", "2 micro-batches"),
        (1234, "document", ",", "1,234 documents"),
        (2, "copy", "", "2 copies"),
        (2, "day", "", "2 days"),
    ],
)
def test_counted(number: int, noun: str, spec: str, said: str) -> None:
    assert counted(number, noun, spec) == said
    assert were(number, noun).endswith(" was" if number == 1 else "s were")

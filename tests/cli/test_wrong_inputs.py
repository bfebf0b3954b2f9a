"""A campaign of wrong inputs: every one ends in one line within seconds, without a traceback."""

import pytest

from tests.support.wrong_inputs import BAD, run, table


@pytest.mark.parametrize("number", [120, pytest.param(None, marks=[pytest.mark.nightly, pytest.mark.timeout(1800)])])
def test_wrong_inputs_end_in_one_line(number: int | None) -> None:
    found = run(number)
    assert len(found) >= (number or 5000)
    assert not [(each.how, each.case.words, each.said) for each in found if each.how in BAD], f"\n{table(found)}"
    assert sum(each.how == "refused" for each in found) > 0.8 * len(found)

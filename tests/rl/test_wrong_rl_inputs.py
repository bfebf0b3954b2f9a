"""Wrong inputs of `terrace rl`: each ends in one line within seconds, without a traceback, and none is taken."""

import pytest

from tests.support.wrong_inputs import BAD, table
from tests.support.wrong_rl_inputs import accepted, run


@pytest.mark.parametrize("number", [48, pytest.param(None, marks=[pytest.mark.nightly, pytest.mark.timeout(600)])])
def test_wrong_inputs_of_feedback_end_in_one_line(number: int | None) -> None:
    found = run(number)
    assert len(found) >= (number or 300) * 3 // 4
    wrong = [(each.how, each.case.words, each.said) for each in found if each.how in BAD]
    taken = [(each.how, each.case.words, each.said) for each in accepted(found)]
    assert not wrong + taken, f"\n{table(found)}"

"""A sample of the odd files and words of tests/chaos/wrong_inputs.py; the campaign plays all of them."""

import pytest

from tests.chaos.odd import trials
from tests.chaos.wrong_inputs import bad, run, table


@pytest.mark.timeout(240)
def test_odd_inputs_end_in_one_line() -> None:
    # A pipe that is read in vain takes the whole limit, and a device that never ends the memory.
    found = run(60, without=("a pipe", "a link to /dev/zero"))
    assert not bad(found), f"\n{table(found)}"
    assert sum(end.how == "refused" for _, end in found) > 30


def test_the_campaign_has_every_command() -> None:
    every = list(trials())
    assert len(every) >= 700
    commands = {
        "generate",
        "eval",
        "export",
        "report",
        "replay",
        "upcycle",
        "prune",
        "data prepare",
        "train",
        "plan",
        "simulate",
    }
    assert {trial.command for trial in every} == commands
    assert all(any(trial.must_refuse for trial in every if trial.command == each) for each in commands)

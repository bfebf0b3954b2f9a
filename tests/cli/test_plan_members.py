"""`terrace plan` on a cluster whose members differ: shares in the plan, and on every screen the same step."""

import re

import pytest

from terrace.cli import plan
from terrace.cli.main import main
from terrace.train.resolve import resolve
from tests.support.planning import Planning, here

__all__ = ["here"]

UNEQUAL = ("--nodes", "2", "--cluster.tiers.system.members", "[{ speed = 1.0 }, { speed = 0.3 }]")


@pytest.mark.parametrize("outer", [(), ("--outer", "every<=50")])
def test_a_plan_with_shares_is_written_and_is_the_step_that_simulate_plays(
    here: Planning, outer: tuple[str, ...]
) -> None:
    code, out, _ = here.say("plan", *UNEQUAL, *outer, "--best", "2", batch=256)
    assert code == 0
    found = re.search(
        r"shares = (\[.*?\]) of the 2 members of tier system: step ([\d.]+ \w+), with equal shares ([\d.]+ \w+), so "
        r"([\d.]+) times the tokens a second; member \d waits longest for the slowest",
        " ".join(out.split()),
    )
    assert found is not None, out
    assert float(found[4]) > 1.05
    run = resolve(None, {"plan": "plan.toml"}, {})
    assert str(list(run.plan.shares)) == found[1]
    assert run.plan.shares[0] > run.plan.shares[1]
    assert run.plan.outer.has_islands == bool(outer)
    assert main(["simulate", "plan.toml"]) == 0
    assert f"step {found[2]}" in " ".join(here.out().split())
    assert main(["doctor", "--plan", "plan.toml"]) == 0
    assert f"predicted step {found[2]}" in " ".join(here.out().split())


def test_alike_members_say_nothing(here: Planning) -> None:
    code, out, _ = here.say("plan", "--nodes", "2", "--best", "1")
    assert (code, "shares" in out) == (0, False)


def test_the_file_keeps_members_where_no_plan_has_shares(here: Planning, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search sees the slower member alone; the file and the screen have both."""
    monkeypatch.setattr(plan, "best_deal", lambda *_: None)
    code, out, _ = here.say("plan", *UNEQUAL, "--axes", "data", "--best", "1", batch=16)
    assert code == 0
    words = " ".join(out.split())
    assert re.search(r"= (\d+) x (.+?) \+ \1 x \2 at 0.3 of its speed", words), words
    assert "members of tier system differ, and no plan with shares is faster" in words
    run = resolve(None, {"plan": "plan.toml"}, {})
    assert run.plan.shares == ()
    assert [each.speed for each in run.cluster.tiers[-1].members] == [1.0, 0.3]

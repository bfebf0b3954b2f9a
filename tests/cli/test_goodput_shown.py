"""Goodput on the screens of `terrace plan`: columns and lines where parts fail, and nothing where none do."""

import re

import pytest

from terrace.cli import goodput
from terrace.report import goodput as columns
from tests.support.planning import Planning, here

__all__ = ["here"]

SMALL = ("--nodes", "4", "--axes", "data", "--best", "3", "--force")
FAILING = ("--cluster.failures.device_hours", "2000", "--cluster.failures.restart_s", "300")


def joined(text: str) -> str:
    return " ".join(text.split())


def test_nothing_else_changes_on_a_screen(here: Planning, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the columns and the lines the screens of a cluster whose parts fail are those of one where none do."""
    commands = (("plan", *SMALL), ("plan", "--scale", "--nodes", "4", "--plan", "zero1"))
    plain = [here.say(*words, batch=64).out for words in commands]  # as nothing below may be reached here
    failing = [here.say(*words, *FAILING, batch=64).out for words in commands]
    assert all("goodput" not in out for out in plain)
    assert all("goodput" in out for out in failing)
    monkeypatch.setattr(columns, "add_columns", lambda *_: None)
    monkeypatch.setattr(goodput, "show_ways", lambda *_: None)
    assert [here.say(*words, *FAILING, batch=64).out for words in commands] == plain


def test_a_plan_of_a_cluster_whose_parts_fail(here: Planning) -> None:
    said = here.say("plan", *SMALL, *FAILING, "--cluster.failures.spares", "0", batch=64)
    assert said.code == 0, said.error
    rows = re.findall(r"^ *(\d) +\S.* (\d+\.\d) % +(\d+) steps? ", said.out, re.M)
    assert [number for number, _, _ in rows] == ["1", "2", "3"]
    # 32 devices of 2,000 hours fail every 62.5 hours; repairs of 24 hours are waited for.
    assert "something fails every 62.5 h" in said.out
    waits = 24 / (24 + 62.5)
    ways = "checkpoints on disk|copies in memory|islands that come and go"
    found = dict(re.findall(rf"^ ({ways}) +(\d+\.\d) %", said.out, re.M))
    assert len(found) == 3
    assert float(found["checkpoints on disk"]) == pytest.approx(100 * (1 - waits) * (1 - 300 / 3600 / 62.5), abs=0.2)
    assert float(found["islands that come and go"]) > 85
    assert f"with 0 spares {100 * waits:.1f} % of the time waits for a machine" in joined(said.out)
    assert "is a job of its own (terrace train --meet)" in joined(said.out)
    # The plan's file has the table, so a scaling curve of it has the columns.
    curve = here.call("plan", "--scale", "--plan", "plan.toml")
    assert "goodput" in curve.out


def test_a_curve_loses_more_on_more_devices(here: Planning) -> None:
    out = here.say("plan", "--scale", "--nodes", "8", "--plan", "zero1", *FAILING, batch=64).out
    for scaling in ("weak scaling", "strong scaling"):
        part = out.split(scaling)[1].split("strong scaling")[0]
        shares = [float(each) for each in re.findall(r"(\d+\.\d) % +\d+ steps?", part)]
        assert len(shares) == 4
        assert shares == sorted(shares, reverse=True)
        assert shares[0] > shares[-1]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"device_hours": "0", "restart_s": "9"}, "failures.device_hours = 0.0 must be positive"),
        ({"machine_hours": "-3", "restart_s": "9"}, "failures.machine_hours = -3.0 must be positive"),
        ({"device_hours": "nan", "restart_s": "9"}, "failures.device_hours = nan must be positive"),
        ({"device_hours": "inf", "restart_s": "9"}, "failures.device_hours = inf must be positive"),
        ({"device_hours": "9"}, "failures.restart_s = 0 must be positive"),
        ({"restart_s": "9"}, "failures has no effect without hours"),
        ({"device_hours": "9", "restart_s": "9", "spares": "-1"}, "failures.spares = -1 must be a number of machines"),
        ({"device_hours": "9", "restart_s": "9", "spares": "1.5"}, "failures.spares = 1.5 must be of type int"),
        ({"device_hours": "9", "restart_s": "9", "repair_hours": "3"}, "repair_hours = 3 has no effect without"),
        ({"device_hours": "9", "restart_s": "9", "spare": "1"}, "unknown key cluster.failures.spare; did you mean"),
        ({"device_hours": "1", "restart_s": "600"}, "one fails every 112 s, sooner than restart_s = 600 is over"),
    ],
)
def test_a_table_that_cannot_be(here: Planning, keys: dict[str, str], said: str) -> None:
    words = [word for name, value in keys.items() for word in (f"--cluster.failures.{name}", value)]
    assert said in here.refused("plan", *SMALL, *words, batch=64)

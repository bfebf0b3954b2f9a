"""`terrace rent`: the rows of offers are the plans of `terrace plan`, and an answer that keeps to the limits."""

import re
from pathlib import Path

import pytest

from tests.support.planning import Planning, here

__all__ = ["here"]

OFFERS = """
currency = "EUR"
days = {days}

[[offers]]
cluster = "dgx-h100"
price = 2.5
nodes = [1, 2]

[[offers]]
name = "cheap"
cluster = "dgx-a100"
price = 0.5
nodes = [1]
[offers.keys.failures]
device_hours = 500
restart_s = 600
spares = 1
"""
TASK = ("--tokens", "1e9", "--batch", 64, "--sequence", 256, "--axes", "data")


def rent(here: Planning, *more: object, offers: str = OFFERS, days: str = "30") -> tuple[int, str, str]:
    Path("offers.toml").write_text(offers.replace("{days}", days))
    said = here.call("rent", "--offers", "offers.toml", "--model", here.model, *TASK, *more)
    return said.code, said.out, " ".join(said.error.split())


def test_rows_are_the_plans_that_are_found_there(here: Planning) -> None:
    code, out, error = rent(here, "--page", "page.html")
    assert code == 0, error
    rows = {(cells[0], cells[1]): cells for cells in map(str.split, out.splitlines()) if cells[1:2] in (["1"], ["2"])}
    assert set(rows) == {("dgx-h100", "1"), ("dgx-h100", "2"), ("cheap", "1")}
    plan = here.say("plan", "--nodes", "2", "--axes", "data", cluster="dgx-h100", batch=64)
    step = re.search(r"^ 1 +(\S+ \S+) ", plan.out, re.M)
    assert step is not None
    assert step[1] == " ".join(rows["dgx-h100", "2"][3:5])
    assert "cost, EUR" in out
    assert "rent " in out
    page = Path("page.html").read_text()
    assert page.count("<circle") == 3
    assert "cost against time" in page
    # Nothing is overwritten, and nothing is searched before that is known.
    code, out, error = rent(here, "--page", "page.html")
    assert (code, out) == (2, "")
    assert "page.html is there already" in error


def test_goodput_makes_days_longer_and_spares_are_paid(here: Planning) -> None:
    failing = rent(here)[1]
    plain = rent(here, offers=OFFERS.split("[offers.keys")[0])[1]
    assert "goodput" in failing
    assert "goodput" not in plain
    assert re.search(r"^ cheap .* \d\d\.\d %", failing, re.M)

    def cost(out: str) -> float:
        found = re.search(r"^ cheap .*? (\S+) +\S+ .?Wh", out, re.M)
        assert found is not None
        return float(found[1].replace(",", ""))

    assert cost(failing) > 2 * cost(plain)  # a spare beside the only machine, and restarts


def test_a_limit_is_kept(here: Planning) -> None:
    code, out, _ = rent(here, days="1e-9")
    assert code == 0
    assert out.count("over the day limit") == 3
    assert "no offer is within 1e-09 days" in " ".join(out.split())


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("dgx-a100", "dgx-a101", "offer 2, cluster dgx-a101: no cluster preset or file 'dgx-a101'"),
        ("price = 0.5", "prize = 0.5", "unknown key offers file.offers[1].prize"),
        ("nodes = [1]", "nodes = 1", "must be a list"),
        ("spares = 1", "spares = -1", "failures.spares = -1"),
        ("restart_s", "restarts", "restarts"),
    ],
)
def test_wrong_offers_are_refused_in_a_line(here: Planning, old: str, new: str, said: str) -> None:
    code, out, error = rent(here, offers=OFFERS.replace(old, new))
    assert (code, out) == (2, "")
    assert said in error


def test_options_that_are_missing_or_of_no_use(here: Planning) -> None:
    said = here.call("rent", "--model", here.model)
    assert said.code == 2
    assert "--offers, --tokens, --batch, --sequence must be given" in said.error
    for words in (("--batch", 0), ("--sequence", 0)):
        code, out, error = rent(here, *words)
        assert (code, out) == (2, "")
        assert f"{words[0]} 0 must be at least 1" in error
    code, out, error = rent(here, "--sequence", 1024)  # no offer changes that
    assert (code, out) == (2, "")
    assert "sequence = 1024 is longer than the 512 positions the model has" in error
    assert "unknown argument '--cluster.name'" in rent(here, "--cluster.name", "x")[2]
    assert "--force has no effect" in rent(here, "--force")[2]

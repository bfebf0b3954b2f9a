"""Unequal members in cgroups: the shares that are dealt, and in the night the whole benchmark."""

import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from bench.members import planned_shares

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("quotas", "shares"),
    [([0.6, 0.6, 0.3, 0.3], (12, 12, 6, 6)), ([0.5, 0.5], (9, 9)), ([0.8, 0.2], (14, 4))],
)
def test_the_planner_deals_by_the_quotas(quotas: list[float], shares: tuple[int, ...]) -> None:
    sizes = {"hidden": 192, "layers": 4, "sequence": 256, "micro_batch": 2, "micros": 9}
    found = planned_shares(Namespace(quotas=quotas, **sizes))
    assert sum(found) == sum(shares)
    assert all(abs(one - other) <= 1 for one, other in zip(found, shares, strict=True)), found


@pytest.mark.nightly
@pytest.mark.timeout(500)
def test_planned_shares_train_more_tokens_of_a_budget() -> None:
    words = ["-m", "bench.members", "--hidden", "64", "--layers", "2", "--micros", "3", "--rounds", "3"]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False, timeout=450)
    if done.returncode and "members need cgroups" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    assert "shares = [4, 4, 2, 2]" in done.stdout
    gain = float(done.stdout.partition("over equal shares: ")[2].split()[0])
    assert gain > 1.1  # of 1.5; a machine that is not idle takes some

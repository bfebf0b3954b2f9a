"""`--ranks N`: a cluster's tiers resized to N ranks, the innermost first."""

import argparse
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from terrace.cli.main import main
from terrace.cli.options import resolve_run
from terrace.cli.train import _table
from terrace.cluster.cluster import Cluster
from terrace.cluster.presets import sizes_for
from terrace.train.config import run_toml
from terrace.train.resolve import parse_run
from tests.support.tiny_runs import one_line


def resolved(*words: str, ranks: int, cluster: str | None = None) -> Cluster:
    names = ("config", "model", "plan", "data")
    options = argparse.Namespace(**dict.fromkeys(names), cluster=cluster, ranks=ranks)
    return resolve_run(options, ["--train.batch", str(ranks), *words]).cluster


@given(num_ranks=st.integers(1, 500), sizes=st.lists(st.integers(1, 12), min_size=1, max_size=4))
def test_all_ranks_are_used_and_only_the_outermost_tier_grows(num_ranks: int, sizes: list[int]) -> None:
    found = sizes_for(num_ranks, sizes)
    assert math.prod(found) == num_ranks
    assert all(1 <= new <= old for new, old in zip(found[:-1], sizes[:-1], strict=True))
    for index, (new, old) in enumerate(zip(found[:-1], sizes[:-1], strict=True)):
        left = num_ranks // math.prod(found[:index])
        assert not any(left % more == 0 for more in range(new + 1, old + 1))


@pytest.mark.parametrize(
    ("cluster", "ranks", "sizes"),
    [
        (None, 1, (1, 1, 1)),
        (None, 2, (2, 1, 1)),
        (None, 3, (1, 1, 3)),
        (None, 4, (2, 2, 1)),
        (None, 8, (2, 2, 2)),
        ("dgx-h100", 3, (3, 1)),
        ("dgx-h100", 16, (8, 2)),
        ("dgx-h100", 20, (5, 4)),
        ("frontier", 2, (2, 1, 1)),
        ("frontier", 24, (2, 4, 3)),
    ],
)
def test_ranks_of_a_cluster(cluster: str | None, ranks: int, sizes: tuple[int, ...]) -> None:
    assert tuple(tier.size for tier in resolved(cluster=cluster, ranks=ranks).tiers) == sizes


def test_a_shared_link_is_divided_anew() -> None:
    # 8 devices share the link of a node; with half of them each has twice the share, unless the share itself is given.
    whole, half = (resolved(cluster="ethernet", ranks=ranks).tiers[-1] for ranks in (8, 4))
    assert half.bandwidth_bytes_per_s == 2 * whole.bandwidth_bytes_per_s
    given = resolved("--cluster.tiers.system.bandwidth_bytes_per_s", "1e9", cluster="ethernet", ranks=4)
    assert given.tiers[-1].bandwidth_bytes_per_s == 1e9


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train --ranks 0", "--ranks 0 must be at least 1"),
        ("train --ranks two", "argument --ranks: invalid int value: 'two'"),
        ("train --ranks 2 --cluster.tiers.node.size 1", "so does --cluster.tiers.node.size: leave one out"),
        ("simulate --ranks 2 --cluster.tiers.node.size 1", "so does --cluster.tiers.node.size: leave one out"),
        ("probe --ranks 2 --cluster.tiers.node.size 1", "so does --cluster.tiers.node.size: leave one out"),
        ("rl --task sort --ranks 8 --cluster.tiers.node.size 1", "so does --cluster.tiers.node.size: leave one out"),
        ("rl --task sort --ranks 4", "mapping.system multiply to 2, but tier 'system' joins 1"),
        ("train --ranks 65 --train.batch 65", "has 65 ranks, and one machine starts at most 64"),
        ("train --ranks 3", "batch"),
        ("train --ranks 2 --cluster.tiers 3", "cluster.tiers"),
        ("train --ranks 2 --cluster.tiers.node 3", "tiers.node must be a table"),
        ("probe --ranks 2 --cluster.tiers.node 3", "tiers.node must be a table"),
    ],
)
def test_refused_in_one_line(
    words: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words.split()) == 2
    assert said in one_line(capsys.readouterr().err)


def test_a_resumed_run_is_resized(tmp_path: Path) -> None:
    options = argparse.Namespace(**dict.fromkeys(("config", "model", "plan", "data", "cluster")), ranks=None)
    (tmp_path / "config.toml").write_text(run_toml(resolve_run(options, [])))
    options.resume, options.folder, options.ranks = str(tmp_path), None, 4
    assert [tier.size for tier in parse_run(_table(options, [])).cluster.tiers] == [2, 2, 1]

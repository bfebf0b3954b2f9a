"""Finalists that predictions cannot tell apart: fewest bytes across the slowest tier, then the simpler plan."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from terrace.plan.search_limits import FINALISTS
from terrace.planner import ties
from terrace.planner.ranking import Estimate
from terrace.planner.search import find
from terrace.planner.space import Space
from terrace.planner.stages import SERIAL
from terrace.planner.task import Candidate, Placement
from terrace.planner.ties import AS_FEW, AS_FULL, FULL, crossing_bytes, settle, slowest_tier
from terrace.report.uncertainty import is_tie, search_words, ties_words
from terrace.simulate.bands import tie_share
from tests.support.planner_cases import CLUSTERS, mesh_of, small_task

TASK = small_task(CLUSTERS["dgx 4x2"])  # 4 devices a node, 2 nodes, whose link is the slower one
_DATA, _TENSOR = mesh_of((4, 1, 1, 1), (2, 1, 1, 1)), mesh_of((2, 2, 1, 1), (2, 1, 1, 1))
ZERO1 = Candidate(0, 1, SERIAL, 1, 1, Placement(-1, -1, 1), _DATA)


@pytest.fixture(autouse=True)
def _a_tie_of_two_percents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ties, "tie_share", lambda: 0.02)


def estimate(step_s: float, sent: int, candidate: Candidate = ZERO1) -> Estimate:
    return Estimate(
        candidate=candidate,
        num_micros=1,
        step_s=step_s,
        time_s={"forward": step_s},
        memory_bytes={"params": 1},
        sent_bytes={("sync", "system"): sent, ("gather", "node"): 10**9 - sent},
    )


def test_fewest_bytes_across_the_slowest_tier_come_first_within_a_tie() -> None:
    assert slowest_tier(TASK) == "system"
    many, few, slower = estimate(1.0, 200), estimate(1.015, 100), estimate(1.03, 1)
    found = settle(TASK, [many, few, slower])
    assert found.best == (few, many, slower)
    assert (found.num_tied, found.fastest, found.tier) == (2, 1, "system")
    words = ties_words(found, 3)
    assert words.startswith("plans 1 to 2 tie: ")
    assert "system (100 B a rank)" in words
    assert "plan 2, 1.00 s, and plan 1 comes before it since it sends fewer bytes" in " ".join(words.split())


def test_of_as_few_bytes_the_simpler_plan_comes_first_then_the_faster() -> None:
    again = ZERO1._replace(recompute=1)
    recomputed, simple = estimate(1.0, 100, again), estimate(1.01, round(100 * (1 + AS_FEW)))
    axes, faster = estimate(1.0, 100, ZERO1._replace(mesh=_TENSOR)), estimate(1.005, 100)
    assert settle(TASK, [recomputed, simple]).best == (simple, recomputed)
    assert settle(TASK, [axes, recomputed]).best == (recomputed, axes), "an axis is more than a key"
    assert settle(TASK, [simple, faster]).best == (faster, simple)
    more = replace(simple, sent_bytes={("sync", "system"): 106})
    assert settle(TASK, [recomputed, more]).best == (recomputed, more)


def test_of_as_few_bytes_the_plan_that_leaves_a_fifth_of_the_device_comes_first() -> None:
    whole = TASK.cluster.device.memory_bytes

    def uses(each: Estimate, share: float) -> Estimate:
        return replace(each, memory_bytes={"params": int(share * whole)})

    full, roomy = uses(estimate(1.0, 100), FULL + 0.1), uses(estimate(1.015, 100, ZERO1._replace(mesh=_TENSOR)), FULL)
    found = settle(TASK, [full, roomy])
    assert found.best == (roomy, full)
    assert "plan 1 comes before it since it leaves more memory" in " ".join(ties_words(found, 2).split())
    near = uses(full, FULL + 0.9 * AS_FULL)
    assert settle(TASK, [near, roomy]).best == (near, roomy), "as little beyond a fifth"
    assert settle(TASK, [uses(full, 0.7), uses(roomy, 0.1)]).best[0].step_s == 1.0, "both leave a fifth"
    fewer = replace(full, sent_bytes={("sync", "system"): 90})
    assert settle(TASK, [roomy, fewer]).best == (fewer, roomy), "bytes are asked first"


def test_a_plan_beyond_the_tie_never_wins() -> None:
    """Not even one that sends nothing, in as many finalists as there may be."""
    fast, slow = estimate(1.0, 10**9), estimate(1.021, 0)
    assert settle(TASK, [fast, slow]).best == (fast, slow)
    assert "no other plan ties with plan 1" in ties_words(settle(TASK, [fast, slow]), 2)
    assert ties_words(settle(TASK, [fast]), 1) == ""


def test_only_finalists_settle_a_tie_and_more_may_tie_than_were_found() -> None:
    many = [estimate(1 + place / 1000, 100 - 5 * place) for place in range(8)]
    shown = [settle(TASK, many[:count]) for count in (FINALISTS, FINALISTS + 1, 8)]
    assert [found.best[0] for found in shown] == [many[FINALISTS - 1]] * 3
    assert shown[-1].best[FINALISTS:] == tuple(many[FINALISTS:])
    assert [found.num_tied for found in shown] == [5, 6, 8]
    assert all(found.may_be_more for found in shown)
    assert " ".join(ties_words(shown[0], 1).split()).startswith("at least 5 plans tie: ")
    assert "the shortest predicted step is 1.00 s" in " ".join(ties_words(shown[0], 1).split())
    assert "the shortest predicted step is that of plan 5, 1.00 s" in " ".join(ties_words(shown[0], 5).split())
    assert "Of the 5 that come first in the search plan 1 has" in " ".join(ties_words(shown[2], 8).split())
    ended = settle(TASK, [*many[:4], estimate(2.0, 1)])
    assert not ended.may_be_more
    assert ties_words(ended, 5).startswith("plans 1 to 4 tie: ")
    assert ties_words(ended, 2).startswith("4 plans tie: ")


@pytest.mark.parametrize("cluster", ["frontier 2x2x2", "dgx 4x2"])
def test_the_first_plan_does_not_depend_on_how_many_are_asked_for(cluster: str) -> None:
    task = small_task(CLUSTERS[cluster], batch=32)
    space = Space(task=task, axes=("data",))
    found = {count: find(space, count=count)[0].best for count in (FINALISTS, FINALISTS + 3)}
    first = {settle(task, each).best[0].candidate for each in found.values()}
    assert len(first) == 1
    # Fewer finalists settle it otherwise in at least these spaces, so a command never searches for fewer.
    assert settle(task, find(space, count=1)[0].best).best[0].candidate not in first


@given(st.lists(st.tuples(st.floats(1, 1.1), st.integers(0, 10)), min_size=1, max_size=8))
def test_the_first_is_within_the_tie_of_the_fastest_and_none_is_lost(drawn: list[tuple[float, int]]) -> None:
    given_ = [estimate(step_s, sent) for step_s, sent in drawn]
    found = settle(TASK, given_)
    least_s = min(each.step_s for each in given_[:FINALISTS])
    assert sorted(map(id, found.best)) == sorted(map(id, given_))
    end_s = 1.02 * least_s
    assert [each.step_s <= end_s for each in found.best].count(True) == found.num_tied
    assert all(each.step_s <= end_s for each in found.best[: found.num_tied])
    assert found.best[found.fastest].step_s == min(each.step_s for each in given_)
    fewest = min(crossing_bytes(each, "system") for each in given_[:FINALISTS] if each.step_s <= end_s)
    assert crossing_bytes(found.best[0], "system") <= (1 + AS_FEW) * fewest


def test_one_device_sends_nothing() -> None:
    cluster = CLUSTERS["dgx 4x2"]
    task = small_task(replace(cluster, tiers=tuple(replace(tier, size=1) for tier in cluster.tiers)))
    assert slowest_tier(task) is None
    found = settle(task, find(Space(task=task), count=3)[0].best)
    assert "fewest bytes" not in ties_words(found, 3)


def test_a_search_says_how_much_it_played() -> None:
    found, _ = find(Space(task=TASK, axes=("data",)), count=2)
    words = " ".join(search_words(found).split())
    assert words.startswith(f"{found.num_played} plans played, the cheapest of {found.num_shapes} shapes")
    assert "--limit" not in words
    stopped = search_words(replace(found, is_complete=False))
    assert "stopped at --limit" in stopped


def test_a_tie_has_no_direction() -> None:
    near = 1 + 0.9 * tie_share()
    assert is_tie(1.0, near)
    assert is_tie(near, 1.0)
    assert not is_tie(1.0, 1 + 1.1 * tie_share())

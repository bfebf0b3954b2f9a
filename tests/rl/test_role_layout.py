"""Shares of rows and who answers for them, by plan: pure functions, without processes."""

from collections.abc import Mapping, Sequence
from itertools import combinations_with_replacement, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terrace.base.errors import ConfigError, PlanError
from terrace.rl.calls.call import Call, call, call_of, calls_of
from terrace.rl.calls.layout import RoleLayout, even_shares
from terrace.rl.workers.critic import Critic
from terrace.rl.workers.policy import Actor, Reference
from terrace.rl.workers.reward_model import RewardModel
from tests.support.parity import exact
from tests.support.toy_roles import Scaler
from tests.support.toys import cluster_of

SCORE, TRAIN = Call("score", "data", "data"), Call("train", "data", "mean")
GENERATE, SAVE, ASK = Call("generate", "replica", "replica"), Call("save", None, "all"), Call("ask", None, "first")
LENGTHS = [5, 1, 1, 1]  # of four rows


def layout_of(
    *sizes: int, replicas: Sequence[Sequence[int]] = (), schedule: str | None = None, **tiers: Mapping[str, int]
) -> RoleLayout:
    cluster = cluster_of(*sizes)
    names = dict(zip(("inner", "outer"), (tier.name for tier in cluster.tiers), strict=False))
    mapping = {names[tier]: axes for tier, axes in tiers.items()}
    return RoleLayout.of(cluster, exact("zero1", cluster, mapping=mapping, schedule=schedule), replicas)


def test_data_ranks_have_a_share_each_and_all_answer() -> None:
    layout = layout_of(2, 2)
    assert layout.bounds(SCORE, [1] * 8) == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert layout.sources(SCORE) == layout.sources(TRAIN) == layout.sources(SAVE) == (0, 1, 2, 3)
    assert layout.sources(ASK) == (0,)


def test_tensor_ranks_share_rows_and_the_first_answers() -> None:
    layout = layout_of(2, 2, inner={"tensor": 2}, outer={"data": 2})
    assert layout.bounds(SCORE, LENGTHS) == [(0, 1), (0, 1), (1, 4), (1, 4)]
    assert layout.sources(SCORE) == (0, 2)


def test_a_call_that_pads_every_row_has_equally_many_on_all() -> None:
    layout = layout_of(2, 2, inner={"tensor": 2}, outer={"data": 2})
    assert layout.bounds(Call("score", "data", "data", "rows"), LENGTHS) == [(0, 2), (0, 2), (2, 4), (2, 4)]
    scoring = ((Actor, "logprobs"), (Reference, "logprobs"), (Critic, "values"), (RewardModel, "rewards"))
    assert all(calls_of(worker)[method].balance == "rows" for worker, method in scoring)


def test_the_last_stage_of_a_pipeline_answers() -> None:
    layout = layout_of(2, 2, inner={"tensor": 2}, outer={"pipeline": 2})
    assert layout.bounds(SCORE, LENGTHS) == [(0, 4)] * 4
    assert layout.sources(SCORE) == layout.sources(ASK) == (2,)
    beside = layout_of(2, 2, inner={"pipeline": 2}, outer={"data": 2})
    assert beside.bounds(SCORE, LENGTHS) == [(0, 1), (0, 1), (1, 4), (1, 4)]
    assert beside.sources(SCORE) == (1, 3)


def test_a_schedule_whose_chunks_return_to_the_first_stage_has_it_answer() -> None:
    inner, outer = {"data": 2}, {"pipeline": 2}
    assert layout_of(2, 2, schedule="zbv", inner=inner, outer=outer).sources(SCORE) == (0, 1)
    assert layout_of(2, 2, schedule="interleaved:2", inner=inner, outer=outer).sources(SCORE) == (2, 3)


def test_context_ranks_share_rows() -> None:
    layout = layout_of(2, 2, inner={"context": 2}, outer={"data": 2})
    assert layout.bounds(SCORE, LENGTHS) == [(0, 1), (0, 1), (1, 4), (1, 4)]
    assert layout.sources(SCORE) == (0, 2)


def test_replicas_share_rows_whatever_trains() -> None:
    layout = layout_of(2, 2, inner={"tensor": 2}, outer={"pipeline": 2}, replicas=((0, 2), (1, 3)))
    assert layout.bounds(GENERATE, [1, 1, 1, 1]) == [(0, 2), (2, 4), (0, 2), (2, 4)]
    assert layout.sources(GENERATE) == (0, 1)
    assert layout.sources(Call("tokens", "replica", "mean")) == (0, 1)
    some = layout_of(2, 2, replicas=((3, 2),))
    assert some.bounds(GENERATE, [1, 1]) == [(0, 0), (0, 0), (0, 2), (0, 2)]
    assert some.sources(GENERATE) == (3,)


def test_without_a_split_all_ranks_have_all_rows() -> None:
    assert layout_of(2, 2).bounds(SAVE, LENGTHS) == [(0, 4)] * 4
    assert RoleLayout.alike(3).bounds(Call("x", "replica", "replica"), [1, 1]) == [(0, 1), (1, 2), (2, 2)]


def test_what_cannot_be_shared_is_refused() -> None:
    with pytest.raises(ConfigError, match="the role's layout has data: give it replicas"):
        layout_of(2, 2).bounds(GENERATE, [1])
    with pytest.raises(PlanError, match="rank 1: replicas are of different ranks, from 0 to 3"):
        layout_of(2, 2, replicas=((0, 1), (1, 2)))
    cluster = cluster_of(2, 2)
    with pytest.raises(PlanError, match='write "tokens"'):
        RoleLayout.of(cluster, exact("zero1", cluster, balance="cost"))


@settings(max_examples=200)
@given(st.lists(st.integers(0, 9), max_size=7), st.integers(1, 5))
def test_the_largest_share_is_as_small_as_can_be(tokens: list[int], num: int) -> None:
    sizes = even_shares(tokens, num)
    assert len(sizes) == num
    assert sum(sizes) == len(tokens)
    assert sizes.count(0) == max(0, num - len(tokens)), "a share is empty only where rows run out"

    def largest(ends: tuple[int, ...]) -> int:
        return max(sum(1 + each for each in tokens[start:stop]) for start, stop in pairwise((0, *ends, len(tokens))))

    found, total = list[int](), 0
    for size in sizes[:-1]:
        total += size
        found.append(total)
    best = min(map(largest, combinations_with_replacement(range(len(tokens) + 1), num - 1)))
    assert largest(tuple(found)) == best


def test_equal_rows_are_dealt_out_evenly() -> None:
    assert even_shares([5] * 10, 4) in ([2, 3, 2, 3], [3, 2, 3, 2], [3, 3, 2, 2], [2, 2, 3, 3], [2, 3, 3, 2])
    assert even_shares([5] * 8, 4) == [2, 2, 2, 2]
    assert even_shares([], 2) == [0, 0]


def test_methods_say_how_they_are_called() -> None:
    assert calls_of(Scaler)["score"] == Call("score", "data", "data")
    assert "hidden" not in calls_of(Scaler)
    with pytest.raises(ConfigError, match=r"actor\.hidden: Scaler\.hidden is no call; write @call"):
        call_of(Scaler, "hidden", "actor")
    with pytest.raises(ConfigError, match="did you mean 'score'"):
        call_of(Scaler, "scores", "actor")
    for wrong in ({"split": "rows"}, {"take": "last"}, {"balance": "cost"}, {"split": "data", "take": "replica"}):
        with pytest.raises(ConfigError, match=r"split|take|balance"):
            call(**wrong)  # type: ignore[arg-type]

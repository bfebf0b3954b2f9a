"""Slow ranks: named where one is, nobody where none is, however noisy the machine."""

import random
from collections.abc import Sequence

import pytest

from terrace.launch.postmortem import Heartbeat, decode
from terrace.launch.slow import Comparison, OwnTimes, in_lines, slowest_of

NUM_STEPS = 20


def beats(own_s: list[list[float]], step_s: float = 1.0) -> list[Heartbeat]:
    """The heartbeats of ranks after these own times."""
    found = []
    for rank, times in enumerate(own_s):
        own = OwnTimes(NUM_STEPS)
        for each in times:
            own.add(each, step_s)
        low_s, typical_s, whole_s = own.figures()
        beat = Heartbeat(number=1, low_s=low_s, typical_s=typical_s, step_s=whole_s, place=f"host {rank}")
        found.append(decode(rank, beat.encode().encode()))
    return found


def named(own_s: list[list[float]], peers: list[list[int]], factor: float = 1.5, step_s: float = 1.0) -> list[int]:
    return [each.rank for each in Comparison(peers, factor).look(beats(own_s, step_s))]


def noisy(seed: int, sigma: float, slow: dict[int, float], num_ranks: int = 8) -> list[list[float]]:
    """Own times that scatter, each rank's by itself, with some steps ten times as long."""
    draw = random.Random(seed)
    return [
        [
            0.2 * slow.get(rank, 1.0) * draw.lognormvariate(0, sigma) * (10 if draw.random() < 0.1 else 1)
            for _ in range(NUM_STEPS)
        ]
        for rank in range(num_ranks)
    ]


def test_noise_names_nobody_and_hides_nobody() -> None:
    everybody = [list(range(8))]
    for seed in range(300):
        assert named(noisy(seed, 0.4, {}), everybody) == [], seed
        assert named(noisy(seed, 0.1, {5: 2.0}), everybody) == [5], seed


def test_the_slowest_rank_has_most_own_work_in_most_steps() -> None:
    own_s = [[0.1] * NUM_STEPS, [0.3] * NUM_STEPS, [0.2] * 15 + [9.0] * 5]
    assert slowest_of(beats(own_s)) == (1, 0.3)
    assert slowest_of(beats([*own_s, [0.1]])) is None  # one that has not made enough steps


def test_ranks_are_compared_with_their_peers() -> None:
    own_s = [[0.1] * NUM_STEPS, [0.1] * NUM_STEPS, [0.4] * NUM_STEPS, [0.4] * NUM_STEPS]
    assert named(own_s, [[0, 1], [2, 3]]) == []  # stages of different work
    assert named(own_s, [[0], [1], [2], [3]]) == []  # nobody to compare with, yet
    assert named(own_s, [[0, 1, 2]]) == [2]
    assert in_lines(Comparison([[0, 1, 2]], 1.5).look(beats(own_s)), NUM_STEPS) == [
        "rank 2 is slow: 0.4 s of own work a step where fast peers take 0.1 s, 4.0 times as long, in most of the last "
        "20 steps (host 2)"
    ]


def test_most_ranks_may_be_slow() -> None:
    own_s = [[0.1] * NUM_STEPS, [0.3] * NUM_STEPS, [0.4] * NUM_STEPS, [0.2] * NUM_STEPS]
    assert in_lines(Comparison([[0, 1, 2, 3]], 1.5).look(beats(own_s)), NUM_STEPS) == [
        "ranks 1-3 are slow: 0.4 s of own work a step where fast peers take 0.1 s, up to 4.0 times as long (rank 2), "
        "in most of the last 20 steps (host 2)"
    ]
    for seed in range(60):
        slow = dict.fromkeys(range(6), 2.0)
        assert named(noisy(seed, 0.1, slow), [list(range(8))]) == sorted(slow), seed


@pytest.mark.parametrize("slow", [range(8), range(1, 8), [0]])
def test_where_nobody_is_fast_the_first_steps_count(slow: Sequence[int]) -> None:
    group = range(1) if slow == [0] else range(8)
    comparison = Comparison([group], 1.5)
    assert comparison.look(beats([[0.1] * NUM_STEPS for _ in group])) == ()
    now = beats([[0.3 if rank in slow else 0.1] * NUM_STEPS for rank in group])
    found = comparison.look(now)
    assert [each.rank for each in found] == list(slow)
    (line,) = in_lines(found, NUM_STEPS)
    assert " s of own work a step where in the run's first steps it took 0.1 s, " in line
    # As for other slow ranks: until half of the excess is gone.
    assert [each.rank for each in comparison.look(beats([[0.13] * NUM_STEPS for _ in group]))] == list(slow)
    assert comparison.look(beats([[0.12] * NUM_STEPS for _ in group])) == ()
    assert comparison.look(beats([[0.13] * NUM_STEPS for _ in group])) == ()


def test_noise_over_a_long_run_names_nobody() -> None:
    for seed in range(20):
        comparison = Comparison([list(range(8))], 1.5)
        for part in range(20):
            assert comparison.look(beats(noisy(1000 * seed + part, 0.4, {}))) == (), seed


@pytest.mark.parametrize("last", [[0.1] * 9 + [0.4] * 11, [0.1] * 6 + [0.4] * 14])
def test_some_slow_steps_are_not_enough(last: list[float]) -> None:
    assert named([[0.1] * NUM_STEPS, [0.1] * NUM_STEPS, last], [[0, 1, 2]]) == []


def test_what_costs_nothing_is_not_told() -> None:
    own_s = [[0.01] * NUM_STEPS, [0.01] * NUM_STEPS, [0.03] * NUM_STEPS]
    assert named(own_s, [[0, 1, 2]]) == []
    assert named(own_s, [[0, 1, 2]], step_s=0.1) == [2]
    assert named([times[:-1] for times in own_s], [[0, 1, 2]], step_s=0.1) == []  # too few steps yet


def test_a_slow_rank_stays_so_until_it_is_clearly_faster() -> None:
    for own_s, expected in ((0.13, [2]), (0.12, [])):
        found = beats([[0.1] * NUM_STEPS, [0.1] * NUM_STEPS, [own_s] * NUM_STEPS])
        comparison = Comparison([[0, 1, 2]], 1.5)
        assert comparison.look(found) == ()
        comparison.look(beats([[0.1] * NUM_STEPS, [0.1] * NUM_STEPS, [0.2] * NUM_STEPS]))
        assert [each.rank for each in comparison.look(found)] == expected

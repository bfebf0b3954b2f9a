"""Slow ranks: named where one is, nobody where none is, however noisy the machine."""

import random

import pytest

from terrace.launch.postmortem import Heartbeat, decode
from terrace.launch.slow import OwnTimes, slow_ranks

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
    return [each.rank for each in slow_ranks(beats(own_s, step_s), peers, factor)]


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
    for seed in range(60):
        assert named(noisy(seed, 0.4, {}), everybody) == [], seed
        assert named(noisy(seed, 0.1, {5: 2.0}), everybody) == [5], seed


def test_ranks_are_compared_with_their_peers() -> None:
    own_s = [[0.1] * NUM_STEPS, [0.1] * NUM_STEPS, [0.4] * NUM_STEPS, [0.4] * NUM_STEPS]
    assert named(own_s, [[0, 1], [2, 3]]) == []  # stages of different work
    assert named(own_s, [[0], [1], [2], [3]]) == []  # nobody to compare with
    assert named(own_s, [[0, 1, 2]]) == [2]
    (found,) = slow_ranks(beats(own_s), [[0, 1, 2]], 1.5)
    assert found.words(NUM_STEPS) == (
        "rank 2 is slow: 0.4 s of own work a step where its peers take 0.1 s, 4.0 times as long, in most of its last "
        "20 steps (host 2)"
    )


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
        assert slow_ranks(found, [[0, 1, 2]], 1.5) == ()
        assert [each.rank for each in slow_ranks(found, [[0, 1, 2]], 1.5, known=[2])] == expected

"""By how much the plan that the search finds is slower than the best of playing every plan of a small space."""

from collections.abc import Sequence
from functools import cache

import pytest

from bench.planner import GPT3
from terrace.cluster.presets import load_cluster
from terrace.model.config import parse_model
from terrace.planner.explain import reasons
from terrace.planner.search import find
from terrace.planner.space import Space
from terrace.planner.task import Task
from tests.support.drawn_spaces import drawn_space
from tests.support.exhaustive import exhaustive
from tests.support.nightly import nightly
from tests.support.planner_cases import long_13b

SPACES = range(40)
FEW = (1, 7, 10, 23)  # of some dozens of plans each, which are played in every run


@cache
def regret(seed: int) -> float:
    """Part by which the best plan found is slower than the best there is; 0 where nothing fits."""
    space = drawn_space(seed)
    everything = exhaustive(space, space.task.cluster.device.usable_bytes)
    found, _ = find(space)
    assert bool(found.best) == bool(everything)
    if not everything:
        return 0.0
    return min(each.step_s for each in found.best) / min(each.step_s for each in everything) - 1


@pytest.mark.parametrize("seeds", [FEW, *nightly(SPACES)], ids=["few", "all"])
def test_the_plan_found_is_nearly_the_best_of_all(seeds: Sequence[int]) -> None:
    """Of 40 drawn spaces: half a percent slower in the mean, two percent at worst."""
    regrets = [regret(seed) for seed in seeds]
    assert sum(regrets) / len(regrets) <= 0.005
    assert max(regrets) <= 0.02


def gpt3_on_16384_devices() -> Space:
    cluster = load_cluster("dgx-a100").resized(2048)
    return Space(task=Task(model=parse_model(GPT3), cluster=cluster, batch=1536, sequence=2048))


@pytest.mark.parametrize(
    "space", [gpt3_on_16384_devices(), *map(drawn_space, (*FEW, 11, 38)), *nightly(*map(drawn_space, (2, 21, 25, 39)))]
)
def test_no_small_change_is_faster_unless_a_pin_rules_it_out(space: Space) -> None:
    """Such as recomputing, which the search does only where memory asks for it."""
    found, evaluator = find(space)
    best = min(found.best, key=lambda each: each.step_s)
    changes = [each for each in reasons(space, evaluator, best.candidate) if each.cost and not each.reason]
    assert any("recompute" in each.words for each in changes)
    assert all(each.note == "ruled out by a pin" for each in changes if each.step_s < 0.999 * best.step_s)
    allowed = {each.words for each in changes if not each.note and each.words.startswith("micro_batch")}
    assert all(space.pins.allows("micro_batch", int(words.split()[-1])) for words in allowed)


def test_more_memory_makes_no_plan_slower() -> None:
    """Where nothing is waited for, a price does not grow by the margin that it has while numbers are open.

    A 13B Llama on 64 A100 with sequences of 8,192: two sequences a micro-batch need much recomputation, and their
    prices without it are below those of one sequence, which needs little.
    """
    space = long_13b()
    steps = [min(each.step_s for each in find(space, capacity_bytes=most)[0].best) for most in (80.75e9, 76.5e9)]
    assert steps[0] <= steps[1]

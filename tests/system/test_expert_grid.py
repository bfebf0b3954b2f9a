"""Mixtures in fp64 under every division of experts: loss, gradient norm, parameters, counts and bias of one process.

The plans are those of tests/support/expert_plans.py; a deviation from one process is noticed
(`test_faults_are_noticed` of tests/system/test_expert_ranks.py).
"""

from collections import Counter

import pytest

from terrace.launch.start import LocalPool
from terrace.plan.presets import PRESETS
from terrace.simulate.chunks import Numbers
from tests.support.expert_plans import AXES, CHUNKS, EIGHT, ROUTED, SIZES, Sizes, beside, divided, tables
from tests.support.nightly import nightly
from tests.support.parity import check
from tests.support.toys import MODELS, cluster_of

pytestmark = pytest.mark.timeout(900)


def text(sizes: Sizes) -> str:
    return "x".join(map(str, sizes))


@pytest.mark.parametrize("sizes", nightly(*((sizes,) for sizes in SIZES)), ids=text)
def test_every_division(pool: LocalPool, sizes: Sizes) -> None:
    check(pool, cluster_of(*sizes), divided(sizes))


@pytest.mark.parametrize("axis", nightly(*AXES))
def test_divisions_beside_every_axis(pool: LocalPool, axis: str) -> None:
    check(pool, cluster_of(*EIGHT), beside(axis))


def test_the_grid_leaves_nothing_out() -> None:
    cases = [(sizes, case) for sizes in SIZES for case in divided(sizes)]
    assert [len(tables(sizes)) for sizes in SIZES] == [1, 3, 6, 9, 10, 18, 18, 27]
    cases += [(EIGHT, case) for axis in AXES for case in beside(axis)]
    plans = {repr((sizes, case.plan)) for sizes, case in cases}
    assert len(plans) >= 60
    spread = [case for _, case in cases if case.plan.experts]
    placements = Counter(case.plan.name for case in spread)
    assert placements.keys() == PRESETS.keys()
    numbers = [Numbers(**case.plan.expert_chunks) for case in spread]
    assert {each[:2] for each in numbers} == set(CHUNKS)
    assert {each[:2] for each in numbers if each.ahead > 1} == {each for each in CHUNKS if max(each) > 2}
    assert {(case.model, case.balance) for case in spread} >= set(ROUTED)
    mixtures = [block.declared.mixture for name, _ in ROUTED for block in MODELS[name].declared]
    assert {mixture.experts.gate for mixture in mixtures if mixture.each} == {
        "softmax",
        "sigmoid",
        "noisy",
        "cosine",
        "expert_choice",
    }
    keys = {key for case in spread for key in case.balance.active}
    assert keys == {"sequence", "z", "capacity", "bias"}

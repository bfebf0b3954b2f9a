"""Work done once for equal values, whether or not they are one object."""

import copy

from terrace.base.alike import first_equal, once_each
from terrace.model.blocks import block_specs
from terrace.plan.presets import preset
from terrace.program.lowering import build
from tests.support.planner_cases import gpt
from tests.support.toys import cluster_of


def test_equal_values_have_the_index_of_the_first() -> None:
    assert first_equal([(1, 2), (3,), copy.copy((1, 2)), [4], [4], (3,)]) == [0, 1, 0, 3, 3, 1]
    assert first_equal([]) == []


def test_a_function_is_called_once_for_equal_values() -> None:
    seen: list[int] = []

    def negative(value: int) -> int:
        seen.append(value)
        return -value

    assert once_each(negative, [1, 1, 2, 1]) == [-1, -1, -2, -1]
    assert seen == [1, 2]


def test_equal_blocks_share_their_messages_without_being_one_object() -> None:
    blocks = block_specs(gpt(4, 64, 4, vocab=96, positions=64))
    cluster = cluster_of(2, 2)
    apart = build(cluster, preset("zero3", cluster), tuple(map(copy.deepcopy, blocks)), 1)
    assert apart.model.alike == [0, 1, 1, 1, 1, 5]
    assert apart.messages == build(cluster, preset("zero3", cluster), blocks, 1).messages
    assert len(set(map(apart.model.alike_inside, range(6)))) == 3

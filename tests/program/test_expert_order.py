"""The order in which the messages of a layer's experts take their lanes."""

from typing import Any

import pytest

from terrace.plan.in_block_messages import RoutedMessage
from terrace.plan.wire import MessageClass
from terrace.program.block_program.routed import expert_steps
from terrace.program.block_program.steps import Send
from tests.support.expert_traffic import traffic_of

INNER, OUTER = 0, 1
EVERY = "d1 d2 d3 d4 c1 c2 c3 c4"


def on_lanes(backward: bool = False, **sizes: Any) -> list[str]:
    """By tier, dispatches and combines of chunks in their order."""
    lanes: list[list[str]] = [[], []]
    for step in expert_steps(traffic_of(8, (2, 8), 4, **sizes))[backward]:
        for message in step.messages if isinstance(step, Send) else ():
            assert isinstance(message, RoutedMessage)
            if message.message_class is not MessageClass.ROUTE:
                lanes[message.tier].append(f"{message.message_class.value[0]}{message.chunk + 1}")
    return [" ".join(lane) for lane in lanes]


@pytest.mark.parametrize(
    ("ahead", "inner"), [(1, "d1 d2 c1 d3 c2 d4 c3 c4"), (2, "d1 d2 d3 c1 d4 c2 c3 c4"), (3, EVERY), (9, EVERY)]
)
@pytest.mark.parametrize("backward", [False, True])
def test_chunks_ahead_on_the_inner_tier(ahead: int, inner: str, backward: bool) -> None:
    """On the outer one, over which the last results come, all go out first."""
    found = on_lanes(backward, expert=(2, 2), chunks=(4, 4), ahead=ahead)
    assert found[OUTER] == EVERY
    assert found[INNER] == inner


def test_over_one_tier_all_chunks_go_out_first() -> None:
    assert on_lanes(expert=(1, 2), chunks=(4, 1))[OUTER] == EVERY


def test_two_hops_over_one_tier_take_turns() -> None:
    """Rows of a later chunk would hold up the copies of those that are there."""
    (lane, _), (every, _) = (on_lanes(expert=(2, 1), rows=(2, 1), chunks=(3, 3), ahead=ahead) for ahead in (1, 2))
    assert lane == "d1 d2 d1 d3 d2 c1 c1 d3 c2 c2 c3 c3"
    assert every == "d1 d2 d1 d3 d2 d3 c1 c1 c2 c2 c3 c3"


def test_a_pass_with_fewer_chunks_has_fewer_ahead() -> None:
    few, many = (on_lanes(backward, expert=(2, 2), chunks=(2, 4), ahead=3)[INNER] for backward in (False, True))
    assert (few, many) == ("d1 d2 c1 c2", EVERY)

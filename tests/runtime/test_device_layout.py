"""The layout of a micro-batch on its device: pairs for each window of the layers, and memory freed with it."""

import gc
import weakref
from typing import cast

import torch

from terrace.comm.group_p2p import GroupP2P
from terrace.plan.context import ContextGroup
from terrace.plan.layout import INSIDE
from terrace.runtime.clock import make_clock
from terrace.runtime.context.device_layout import DeviceLayout
from terrace.runtime.context.peer_exchange import PeerComm
from terrace.runtime.in_block import InBlockComm
from terrace.runtime.linear import WeightGradients
from terrace.sequence.build import build_token_layout
from terrace.sequence.group_layout import GroupLayout
from terrace.sequence.segments import Segment
from tests.support.lanes import EagerLane

CPU = torch.device("cpu")


def layout_of(window: int, *others: int) -> DeviceLayout:
    """That of the second of two ring ranks, for a row of 32 tokens."""
    segment = Segment(0, 32, (0, 1), (2,))
    held = tuple(segment.shard(place) for place in segment.ring_ranks)
    whole = GroupLayout(
        segments=(segment,),
        documents=(),
        local_runs=held,
        ulysses=1,
        num_local_tokens=16,
        window=window,
        other_windows=others,
    )
    group = ContextGroup(members=(0, 1), ulysses=1, ring_degrees=(2,), sizes=(2,))
    in_block = InBlockComm({INSIDE: EagerLane()}, make_clock(CPU), WeightGradients())
    return DeviceLayout(build_token_layout(whole, 1), PeerComm(group, 1, cast(GroupP2P, None), in_block), CPU)


def test_each_window_has_its_own_pairs() -> None:
    """Whichever is read first: a window of one token needs no keys of the other rank."""
    first, second = layout_of(0, 1), layout_of(0, 1)
    runs = [[pair.queries for step in first.ring_steps for pair in step.pairs[index]] for index in (0, 1)]
    assert runs[0] != runs[1]
    assert [first.of_window(index).query_runs for index in (0, 1)] == runs
    assert [second.of_window(index).query_runs for index in (1, 0)] == runs[::-1]
    dense = [
        [pair for step in (0, 1) for pair in first.of_window(index).pairs(step, torch.float32)] for index in (0, 1)
    ]
    assert [[pair.queries for pair in each] for each in dense] == runs


def test_a_layout_is_freed_without_a_collection() -> None:
    gc.disable()
    try:
        layout = layout_of(0, 1)
        layout.of_window(1).pairs(0, torch.float32)
        known = weakref.ref(layout)
        del layout
        assert known() is None
    finally:
        gc.enable()

"""Random programs of two streams against all orders in which a device could run them.

A device runs the operations of a stream in their order, and may mix the streams in any way that respects events and
waits of the host. Two accesses race if there are two such orders in which they stand differently. The brute force plays
all orders; the clocks must name the same pairs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.virtual_cuda.findings import Kind
from tests.virtual_cuda.rehearsal import rehearsed

cuda: Any = torch.cuda  # without types


@dataclass(frozen=True)
class Act:
    """A step of the host: an operation on a stream, a record, a wait of a stream, or a wait of the host."""

    what: str  # read, write, record, wait, synchronise
    stream: int
    place: int  # of the four elements, or of the two events


ACTS = st.builds(
    Act,
    st.sampled_from(["read", "write", "write", "record", "wait", "synchronise"]),
    st.integers(0, 1),
    st.integers(0, 1),
)


@settings(max_examples=100)
@given(st.lists(ACTS, min_size=2, max_size=9))
def test_clocks_find_what_all_orders_show(program: list[Act]) -> None:
    assert noticed(program) == bool(racing(program))


def noticed(program: list[Act]) -> bool:
    """Whether the virtual device reports a race."""
    with rehearsed() as rehearsal:
        x = torch.zeros(2, device="cuda")
        cuda.synchronize()
        streams = [cuda.Stream(), cuda.Stream()]
        events = [cuda.Event(), cuda.Event()]
        for act in program:
            with cuda.stream(streams[act.stream]):
                if act.what == "read":
                    x[act.place].clone()
                elif act.what == "write":
                    x[act.place].fill_(1.0)
                elif act.what == "record":
                    events[act.place].record()
                elif act.what == "wait":
                    streams[act.stream].wait_event(events[act.place])
                else:
                    streams[act.stream].synchronize()
    return any(fault.kind is Kind.RACE for fault in rehearsal.faults)


def racing(program: list[Act]) -> set[tuple[int, int]]:
    """Pairs of accesses to one element, one a write, that stand in both orders in the orders a device may choose."""
    seen: dict[tuple[int, int], set[bool]] = {}
    accesses = [index for index, act in enumerate(program) if act.what in ("read", "write")]
    pairs = [
        (one, two)
        for one, two in combinations(accesses, 2)
        if program[one].place == program[two].place and "write" in (program[one].what, program[two].what)
    ]
    for order in orders(program):
        at = {index: place for place, index in enumerate(order)}
        for one, two in pairs:
            seen.setdefault((one, two), set()).add(at[one] < at[two])
    return {pair for pair, found in seen.items() if len(found) == 2}


def orders(program: list[Act]) -> Iterator[list[int]]:
    """All orders of the device's work. The host issues in program order, as early as its waits allow."""
    before = [needed(program, index) for index in range(len(program))]

    def extended(done: tuple[int, ...]) -> Iterator[list[int]]:
        if len(done) == len(program):
            yield list(done)
        for index in range(len(program)):
            if index not in done and before[index] <= set(done):
                yield from extended((*done, index))

    yield from extended(())


def needed(program: list[Act], index: int) -> set[int]:
    """The steps that must be over before a step begins."""
    act, earlier = program[index], range(index)
    found = {i for i in earlier if program[i].stream == act.stream and program[i].what != "synchronise"}
    found |= {i for i in earlier if program[i].what == "synchronise"}  # the host goes on after its wait
    if act.what == "wait":  # the latest record of the event, if there is one, and so all before that on its stream
        records = [i for i in earlier if program[i].what == "record" and program[i].place == act.place]
        found |= set(records[-1:])
    return found

"""What NCCL and torch's process groups allow, and the checks that need the logs of all ranks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tests.virtual_cuda.findings import Fault, Kind


@dataclass(frozen=True)
class Rule:
    """A rule, the fault that breaks it, and where it is said."""

    kind: Kind
    words: str
    source: str


_GUIDE, _GROUP = "NCCL user guide", "torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp"
_PYTHON = "torch/distributed/distributed_c10d.py"
RULES = (
    Rule(
        Kind.ORDER,
        "all ranks of a communicator issue its collectives in one order, with equal sizes and dtypes",
        f"{_GUIDE}, Collective Operations",
    ),
    Rule(
        Kind.ORDER,
        "messages between two ranks of a communicator arrive in the order in which they were sent",
        f"{_GUIDE}, Point-to-point communication",
    ),
    Rule(
        Kind.COMMUNICATOR,
        "operations of a communicator on several streams need an order that the caller makes",
        f"{_GUIDE}, CUDA Stream Semantics",
    ),
    Rule(
        Kind.MAKING,
        "making a communicator blocks until all its ranks take part",
        f"{_GUIDE}, Creating a Communicator",
    ),
    Rule(
        Kind.MAKING,
        "members of a group that only they make meet under a name, of their ranks and the number of groups before it",
        f"{_PYTHON}, _process_group_name",
    ),
    Rule(
        Kind.LATE_MAKING,
        "a group without device_id makes its communicator at its first message, which blocks the host",
        f"{_GROUP}, initNCCLComm; {_PYTHON}, _new_process_group_helper",
    ),
    Rule(
        Kind.BOUND_WORLD,
        "in a world bound to a device, groups are split off its communicator by all ranks of the world",
        f"{_PYTHON}, _new_process_group_helper: split_from; {_GUIDE}, ncclCommSplit",
    ),
    Rule(
        Kind.MEMORY,
        "tensors of messages are dense and on a CUDA device",
        f"{_GROUP}, check_gpu_single_tensor",
    ),
    Rule(
        Kind.STUCK,
        "a receive holds its stream until the matching send is issued, and the host at its next wait",
        f"{_GUIDE}, Point-to-point communication; {_GROUP}, pointToPoint",
    ),
)

# Collectives: arguments that are written, and whether all ranks pass the same number of elements.
COLLECTIVES: dict[str, tuple[frozenset[str], bool]] = {
    "allreduce_": (frozenset({"tensors"}), True),
    "broadcast_": (frozenset({"tensors"}), True),
    "reduce_": (frozenset({"tensors"}), True),
    "allgather_": (frozenset({"output_tensors"}), True),
    "_allgather_base_": (frozenset({"output_tensor"}), True),
    "reduce_scatter_": (frozenset({"output_tensors"}), True),
    "_reduce_scatter_base_": (frozenset({"output_tensor"}), True),
    "alltoall_base_": (frozenset({"output"}), False),
    "alltoall_": (frozenset({"output_tensors"}), False),
}


class Key(NamedTuple):
    """A communicator, equal on all its ranks: those, and how many with the same ranks came before."""

    ranks: tuple[int, ...]
    number: int


class Entry(NamedTuple):
    """What a rank did: `make`, `collective`, `send`, `receive`, or `stuck` in a receive."""

    what: str
    key: Key
    words: str  # what is equal on all ranks: operation, and size and dtype or the number of a group
    peer: int  # the other rank of a send or receive, else -1
    line: str


Logs = Sequence[Sequence[Entry]]  # by rank


def faults_of(logs: Logs) -> list[Fault]:
    """Faults that no rank can see alone."""
    return [*_collectives(logs), *_messages(logs), *_making(logs), *_stuck(logs)]


def _collectives(logs: Logs) -> Iterator[Fault]:
    by_key: dict[Key, dict[int, list[Entry]]] = {}
    for rank, log in enumerate(logs):
        for entry in log:
            if entry.what == "collective":
                by_key.setdefault(entry.key, {}).setdefault(rank, []).append(entry)
    for found in by_key.values():
        (first, own), *others = found.items()
        for rank, theirs in others:
            fault = _first_difference(first, own, rank, theirs)
            if fault is not None:
                yield fault


def _messages(logs: Logs) -> Iterator[Fault]:
    for rank, log in enumerate(logs):
        sent: dict[tuple[Key, int], list[Entry]] = {}
        for entry in log:
            if entry.what == "send":
                sent.setdefault((entry.key, entry.peer), []).append(entry)
        for (key, peer), own in sent.items():
            received = [e for e in logs[peer] if e.what == "receive" and e.key == key and e.peer == rank]
            fault = _first_difference(rank, own, peer, received)
            if fault is not None:
                yield fault


def _first_difference(rank: int, own: Sequence[Entry], other: int, theirs: Sequence[Entry]) -> Fault | None:
    for number, (one, two) in enumerate(zip(own, theirs, strict=False)):
        if one.words != two.words:
            words = f"message {number} of {list(one.key.ranks)}: rank {rank} {one.words} at {one.line}; "
            return Fault(Kind.ORDER, f"{words}rank {other} {two.words} at {two.line}")
    return None


def _making(logs: Logs) -> Iterator[Fault]:
    """Play the making of communicators, which blocks each rank until all members have come."""
    waiting = {rank: [entry for entry in log if entry.what == "make"] for rank, log in enumerate(logs)}
    while True:
        met = {log[0].key for log in waiting.values() if log}
        ready = {key for key in met if all(_meets(waiting[rank], key) for rank in key.ranks)}
        # All are there, but under two names.
        apart = {key for key in ready if len({waiting[rank][0].words for rank in key.ranks}) > 1}
        if not ready or apart:
            break
        for log in waiting.values():
            if log and log[0].key in ready:
                del log[0]
    stuck = {rank: log[0] for rank, log in waiting.items() if log}
    if stuck:
        told = (f"rank {rank} makes {list(each.key.ranks)} {each.words} at {each.line}" for rank, each in stuck.items())
        yield Fault(Kind.MAKING, "; ".join(told))


def _meets(log: Sequence[Entry], key: Key) -> bool:
    return bool(log) and log[0].key == key


def _stuck(logs: Logs) -> Iterator[Fault]:
    ends: Mapping[int, Entry] = {rank: log[-1] for rank, log in enumerate(logs) if log}
    for rank, entry in ends.items():
        if entry.what == "stuck":
            there = ends.get(entry.peer)
            other = f"{there.what} {there.words} at {there.line}" if there is not None else "nothing"
            words = f"rank {rank} waits at {entry.line} for rank {entry.peer}, whose last act is {other}"
            yield Fault(Kind.STUCK, words)

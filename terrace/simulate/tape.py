"""A tape: the nodes of a block's graph in order, and the memory that playing it forward and backward holds.

A node reads tensors, writes one, and keeps some for its backward. A block keeps the union of its nodes' tensors between
forward and backward. The peaks follow by playing the tape with autograd's rules:

- forward: a tensor lives until its last read and until no variable holds it, or, if kept, to the end;
- backward: a node makes a gradient of the size of each tensor it read; then the gradient of its output is freed, and
  every kept tensor that no earlier node keeps. A sum passes its gradient on unchanged. Where a tensor was read twice,
  the second gradient is added into the first, or into a new one if the first is shared.

A *replay* is a run of nodes whose results are dropped and replays (terrace.runtime.replay). It keeps only the
tensors that it reads from outside. All its own tensors are replays at once, when the backward of the first node that
keeps one of them begins, and each is then freed as any kept tensor is.

The block's input, its output and the gradient of its output live to the end, since the executor holds them.

In a split backward the first half also holds, for the second, the operands that each *product* (`weighs`) kept and the
gradient of its result (terrace.runtime.linear), or its `codes` (terrace.runtime.scaled_linear).
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from terrace.model.operations import INPUT, OUTPUT


class Node(NamedTuple):
    """A node of autograd's graph, or a few that always occur together.

    `keeps` may name tensors that no node reads or writes, such as the statistics of a norm. `backward_adds` counts
    memory that lives only while its backward runs, such as the gradient of a weight before it is accumulated.
    """

    reads: tuple[str, ...]
    writes: str
    keeps: tuple[str, ...] = ()
    forward_adds: int = 0  # bytes that live only while the forward runs
    backward_adds: int = 0  # likewise for the backward
    is_sum: bool = False
    variables: tuple[str, ...] = ()  # tensors that variables of the enclosing function still hold
    weighs: bool = False  # a product whose weight gradient can be computed later
    codes: int = 0  # bytes that this gradient needs of the result's gradient, if not the gradient itself
    name: str = ""  # of its operation
    replay: str = ""  # of which it is a part, if any


def kept_by_operation(tape: Sequence[Node], sizes: Mapping[str, int]) -> dict[str, int]:
    """Bytes that each operation is the first to keep, excluding the block's input."""
    seen = {INPUT}
    kept: dict[str, int] = {}
    for node, keeps in zip(tape, _keeps(tape, dropped(tape)), strict=True):
        # A tensor that two nodes keep is stored once.
        new = [name for name in keeps if name not in seen]
        seen.update(new)
        if new:
            kept[node.name] = kept.get(node.name, 0) + sum(sizes[name] for name in new)
    return kept


def dropped(tape: Sequence[Node]) -> dict[str, str]:
    """For each dropped tensor, the replay that recomputes it."""
    outside = _read_from_outside(tape)
    return {
        name: node.replay
        for node in tape
        if node.replay
        for name in (node.writes, *node.keeps)
        if name not in outside[node.replay]
    }


def _read_from_outside(tape: Sequence[Node]) -> dict[str, set[str]]:
    read: dict[str, set[str]] = {}
    for node in tape:
        if node.replay:
            read.setdefault(node.replay, set()).update(node.reads)
    for node in tape:
        if node.replay:
            read[node.replay].discard(node.writes)
    return read


def _keeps(tape: Sequence[Node], replays: Mapping[str, str]) -> list[tuple[str, ...]]:
    """The tensors that each node keeps from the forward to the backward."""
    outside = _read_from_outside(tape)
    found = []
    for node in tape:
        own = node.keeps
        if node.replay:
            own = (*own, *(name for name in node.reads if name in outside[node.replay]))
        found.append(tuple(dict.fromkeys(name for name in own if name not in replays)))
    return found


def forward_peak(tape: Sequence[Node], sizes: Mapping[str, int], keeping: bool) -> int:
    """Peak bytes alive during a forward, with the input and (if `keeping`) all kept tensors."""
    # Later uses overwrite earlier ones.
    last_read = {name: index for index, use in enumerate(tape) for name in (*use.reads, *use.variables)}
    # The executor holds both ends of the block.
    alive, kept = {INPUT}, {INPUT, OUTPUT}
    peak = sizes[INPUT]
    keeps = _keeps(tape, dropped(tape))
    for index, node in enumerate(tape):
        kept.update(keeps[index] if keeping else ())
        alive.update((node.writes, *node.keeps))
        peak = max(peak, sum(sizes[name] for name in alive) + node.forward_adds)
        alive = {name for name in alive if name in kept or last_read.get(name, -1) > index}
    return peak


def backward_peak(tape: Sequence[Node], sizes: Mapping[str, int]) -> int:
    """Peak bytes alive during a backward, with kept tensors and the gradients at both ends."""
    return _backward(tape, sizes, halves=False)[0]


def split_backward(tape: Sequence[Node], sizes: Mapping[str, int]) -> tuple[int, int]:
    """Peak of the first half of a split backward, and the bytes held for the second."""
    return _backward(tape, sizes, halves=True)


def _backward(tape: Sequence[Node], sizes: Mapping[str, int], *, halves: bool) -> tuple[int, int]:
    replays = dropped(tape)
    keeps = [tuple(dict.fromkeys((*node.keeps, *kept))) for node, kept in zip(tape, _keeps(tape, replays), strict=True)]
    first_keeper = {name: index for index, names in reversed(list(enumerate(keeps))) for name in names}
    # The backward starts with every kept tensor alive.
    held = {INPUT, OUTPUT, *first_keeper} - replays.keys()
    replayed: set[str] = set()
    gradients = {OUTPUT: 0}  # tensor -> the buffer that holds its gradient
    buffers = [sizes[OUTPUT]]
    outside = {0}  # the caller holds the gradient of the output to the end
    due, due_gradients, due_codes = set[str](), set[int](), 0  # what weight gradients need
    peak = 0
    for index, node in reversed(list(enumerate(tape))):
        arriving = gradients.pop(node.writes)
        if halves and node.weighs:
            due.update(node.keeps)
            due_codes += node.codes
            if not node.codes:
                due_gradients.add(arriving)
                outside.add(arriving)
        added = node.backward_adds
        for replay in {replays[name] for name in node.keeps if name in replays} - replayed:
            replayed.add(replay)
            held |= {name for name, other in replays.items() if other == replay and name in first_keeper}
            live = outside | {arriving, *gradients.values()}
            whole = due_codes + sum(sizes[name] for name in held) + sum(buffers[buffer] for buffer in live)
            peak = max(peak, whole + _replay_adds(tape, replay, held, sizes))
        for name in node.reads:
            # The gradient of a sum is the arriving one itself, without a copy.
            if node.is_sum:
                buffer = arriving
            else:
                buffers.append(sizes[name])
                buffer = len(buffers) - 1
            if name not in gradients:
                gradients[name] = buffer
                continue
            shared = outside | {arriving, *(other for key, other in gradients.items() if key != name)}
            if gradients[name] in shared:  # others hold it, so the sum takes a new buffer
                added += sizes[name]
                gradients[name] = buffer
            else:
                added += 0 if node.is_sum else sizes[name]  # gone once it has been added
        # A set: one buffer may be the gradient of several tensors.
        live = outside | {arriving, *gradients.values()}
        added += due_codes
        peak = max(peak, sum(sizes[name] for name in held) + sum(buffers[buffer] for buffer in live) + added)
        freed = {name for name in keeps[index] if first_keeper[name] == index and name not in (INPUT, OUTPUT)}
        held -= freed - due
    return peak, due_codes + sum(sizes[name] for name in due) + sum(buffers[buffer] for buffer in due_gradients)


def _replay_adds(tape: Sequence[Node], replay: str, held: set[str], sizes: Mapping[str, int]) -> int:
    """Bytes that live only while a replay runs."""
    return max(
        node.forward_adds + (0 if node.writes in held else sizes[node.writes]) for node in tape if node.replay == replay
    )

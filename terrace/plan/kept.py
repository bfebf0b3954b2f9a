"""What is kept below the device (`Plan.keep`), and the pieces in which it passes through the device.

Optimizer states that are kept on a medium stay there between steps. UPDATE brings them through a ring of fixed size:
they are read ahead, updated in the ring, and written back (docs/offload.md). The states of a flat buffer that one
instruction changes are read and written together, as a *group*. A group of n elements is cut into pieces of
`Keep.piece` elements; a piece takes, with a part for each of its states,

    bytes(piece) = round4096( sum over states of round64(bytes of the state's elements) + 64 )

The last 64 bytes are the piece's mark (terrace.runtime.kept.file), and 4096 bytes are what direct I/O moves. All
ranks move the same bytes, whichever elements of the buffer they own.

Parameters and accumulated gradients have pieces of their own (`param_pieces`, `grad_pieces`), without a ring: a GATHER
reads the parameters of a flat buffer and its REFRESH writes them; its gradients are written behind a SYNC and read by
UPDATE or ORTHOGONALISE.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from terrace.plan.flats import FlatParamSpec
from terrace.plan.keep import MATRICES, MOMENTUM, NUM_WAYS, STATES, VECTOR, GroupName
from terrace.plan.pieces import Piece, whole_pieces, with_mark
from terrace.plan.plan import Plan
from terrace.plan.state_bytes import moments, rests_master
from terrace.plan.state_formats import state_bytes
from terrace.plan.update import parse_update
from terrace.plan.wire import FORMATS

# Elements: states in narrow formats are updated in chunks of the flat buffer (terrace.runtime.stored), so pieces begin
# where these do.
CHUNK = 1 << 16


class Group(NamedTuple):
    """States of `numel` elements of a flat buffer that travel together, in these formats, parameters first.

    `numel` is the number on the rank that owns most elements of this group.
    """

    name: GroupName
    formats: tuple[str, ...]
    numel: int


def groups(plan: Plan, flat: FlatParamSpec) -> tuple[Group, ...]:
    """The groups of a flat buffer that are kept below the device, in the order in which a step changes them.

    A spread table has none: its rows have a medium of their own (terrace.plan.kept_rows).
    MOMENTUM, of Muon, is changed by ORTHOGONALISE, the others by UPDATE: MATRICES, the parameters of matrices that are
    updated whole, then STATES, those of elementwise updates. Projectors and moments of projected matrices are small and
    stay on the device.
    """
    if not plan.keep.optimizer_below or not flat.trainable or flat.is_spread:
        return ()
    owned = flat.padded // flat.layout.span(flat.layout.optimizer)
    state = plan.optimizer_states or plan.sums
    master = (plan.master,) if rests_master(plan, flat) else ()
    if not flat.num_orthogonal:
        number = sum(numel > 0 for numel in moments(plan.update, owned, flat.padded))
        found = [Group(STATES, (*master, *(state,) * number), owned)]
    else:
        alone = min(owned, flat.padded - flat.num_orthogonal)
        found = [
            Group(MOMENTUM, () if parse_update(plan.update).projects else (state,), owned),
            Group(MATRICES, master, owned),
            Group(STATES, (*master, state, state), alone),
        ]
    return tuple(group for group in found if group.formats and group.numel)


def pieces(plan: Plan, group: Group) -> tuple[Piece, ...]:
    return _pieces(group.formats, group.numel, plan.keep.piece)


@lru_cache(maxsize=4096)
def _pieces(formats: tuple[str, ...], numel: int, size: int) -> tuple[Piece, ...]:
    number = -(-numel // size)
    # A cut may lie this much before its multiple of `size` (`cuts`), and the last piece takes what it leaves.
    slack = 0 if number == 1 else slack_of(formats)
    last = numel - (number - 1) * size + slack
    sizes = (*(size,) * (number - 1), last)
    return tuple(Piece(each, piece_bytes(formats, each)) for each in sizes)


def slack_of(formats: Sequence[str]) -> int:
    """Elements by which a cut of a group may lie before a multiple of the piece."""
    return (VECTOR if is_exact(formats) else CHUNK) - 1


def is_exact(formats: Sequence[str]) -> bool:
    """Whether states in these formats are updated in place, as `terrace.runtime.stored.Exact` is."""
    return all(name in ("fp32", "fp64") for name in formats)


def part_bytes(formats: Sequence[str], numel: int) -> tuple[int, ...]:
    return tuple(-(-state_bytes(name, numel) // VECTOR) * VECTOR for name in formats)


def piece_bytes(formats: Sequence[str], numel: int) -> int:
    return with_mark(sum(part_bytes(formats, numel)))


def cuts(number: int, size: int, numel: int, formats: Sequence[str], start: int, num_decayed: int) -> list[slice]:
    """The elements of each of `number` pieces on a rank that owns `numel` elements from `start` on of its buffer.

    The first `num_decayed` of them take weight decay, in an operation of their own. A rank with fewer elements than the
    group has room for leaves its last pieces empty.
    """
    bounds = [0]
    for nominal in range(size, number * size, size):
        if not is_exact(formats):
            bound = nominal - start % CHUNK
        else:
            bound = nominal - ((nominal - num_decayed) % VECTOR if nominal > num_decayed else 0)
        bounds.append(min(numel, bound))
    bounds.append(numel)
    return [slice(first, last) for first, last in pairwise(bounds)]


def param_pieces(plan: Plan, flat: FlatParamSpec) -> tuple[Piece, ...]:
    """The pieces of a rank's slice of the working copy; none if it is on the device."""
    layout = flat.layout
    if not layout.params_below:
        return ()
    return whole_pieces(plan.keep.piece, flat.padded // layout.span(layout.params), flat.element_bytes(plan))


def grad_pieces(plan: Plan, flat: FlatParamSpec) -> tuple[Piece, ...]:
    """The pieces of the slice of the gradient that a rank's optimizer updates; none if it is on the device."""
    layout = flat.layout
    if not layout.grads_below or not flat.trainable:
        return ()
    owned = flat.padded // layout.span(layout.optimizer)
    return whole_pieces(plan.keep.piece, owned, FORMATS[grad_format(plan)].element_bytes)


def grad_format(plan: Plan) -> str:
    """The dtype of gradients below the device: that of sums, or, for the host's cores, that of parameters."""
    return plan.compute if plan.keep.hands_over else plan.sums


@dataclass(frozen=True)
class Traffic:
    """Pieces that pass in one instruction: their number, and bytes in one direction."""

    num_pieces: int = 0
    num_bytes: int = 0


NO_TRAFFIC = Traffic()


def traffic(plan: Plan, flats: Sequence[FlatParamSpec], *, orthogonalises: bool) -> Traffic:
    """What passes in the UPDATE of a block with these flat buffers, or in its ORTHOGONALISE."""
    if not plan.keep.states_pass:
        return NO_TRAFFIC
    found = [piece for flat in flats for piece in _passing(plan, flat, orthogonalises)]
    return Traffic(len(found), sum(piece.num_bytes for piece in found))


def _passing(plan: Plan, flat: FlatParamSpec, orthogonalises: bool) -> Iterator[Piece]:
    for group in groups(plan, flat):
        if (group.name == MOMENTUM) == orthogonalises:
            yield from pieces(plan, group)


def params_bytes(plan: Plan, flats: Sequence[FlatParamSpec], *, trained: bool = False) -> int:
    """Bytes of a block's working copy below the device; with `trained`, of its trainable buffers alone."""
    chosen = (flat for flat in flats if flat.trainable or not trained)
    return sum(piece.num_bytes for flat in chosen for piece in param_pieces(plan, flat))


def grads_bytes(plan: Plan, flats: Sequence[FlatParamSpec]) -> int:
    """Bytes of a block's accumulated gradients below the device."""
    return sum(piece.num_bytes for flat in flats for piece in grad_pieces(plan, flat))


def updated_bytes(plan: Plan, flat: FlatParamSpec) -> int:
    """Bytes that the host's cores read and write in an update: states, gradient, and parameters in its place."""
    item, found = FORMATS[plan.compute].element_bytes, groups(plan, flat)
    return 2 * sum(
        group.numel * item + sum(state_bytes(stored, group.numel) for stored in group.formats) for group in found
    )


def resting_bytes(plan: Plan, blocks: Sequence[Sequence[FlatParamSpec]]) -> dict[str, int]:
    """Bytes that a rank keeps on each medium for blocks with these flat buffers, without rows of tables."""
    keep, found = plan.keep, dict.fromkeys((str(medium) for medium in plan.keep.media), 0)
    if keep.optimizer_below:
        found[keep.optimizer] += sum(piece.num_bytes for piece in _passed(plan, blocks))
    if keep.params_below:
        found[keep.params] += sum(params_bytes(plan, flats) for flats in blocks)
    if keep.grads_below:
        found[keep.grads] += sum(grads_bytes(plan, flats) for flats in blocks)
    return found


def ring_bytes(plan: Plan, blocks: Sequence[Sequence[FlatParamSpec]]) -> int:
    """Bytes on the device of the ring, and of a buffer each way of a medium for pieces of parameters and gradients.

    Where gradients are handed over, the ring is memory of the host.
    """
    sizes = [piece.num_bytes for piece in _passed(plan, blocks)] if not plan.keep.hands_over else []
    ring = min(plan.keep.ring, len(sizes)) * max(sizes, default=0)
    return ring + NUM_WAYS * sum(whole_piece_bytes(plan, blocks).values())


def whole_piece_bytes(plan: Plan, blocks: Sequence[Sequence[FlatParamSpec]]) -> dict[str, int]:
    """Bytes of the largest piece of parameters or gradients on each medium that keeps some."""
    keep, found = plan.keep, dict[str, int]()
    for medium, pieces_of in ((keep.params, param_pieces), (keep.grads, grad_pieces)):
        sizes = (piece.num_bytes for flats in blocks for flat in flats for piece in pieces_of(plan, flat))
        if size := max(sizes, default=0):
            found[medium] = max(found.get(medium, 0), size)
    return found


def gradient_bytes(plan: Plan, flats: Sequence[FlatParamSpec]) -> int:
    """Bytes on the device of a block's accumulated gradients that are kept below it, while they are there."""
    item = FORMATS[plan.sums].element_bytes
    below = (flat for flat in flats if flat.trainable and flat.layout.grads_below)
    return sum(flat.padded // flat.layout.span(flat.layout.grads) * item for flat in below)


def is_final_at_once(flats: Sequence[FlatParamSpec]) -> bool:
    """Whether a block's gradients are complete right after its last backward, without a message."""
    below = [flat.layout for flat in flats if flat.trainable and flat.layout.grads_below]
    return all(layout.degree == 1 for layout in below)


def updating_bytes(plan: Plan, blocks: Sequence[Sequence[FlatParamSpec]]) -> int:
    """Most bytes on the device of working copies kept below it, in updates: those of two consecutive blocks."""
    if not plan.keep.params_below:
        return 0
    sizes = [size for flats in blocks if (size := working_bytes(plan, flats))]
    return max(map(sum, pairwise((0, *sizes))), default=0)


def working_bytes(plan: Plan, flats: Sequence[FlatParamSpec]) -> int:
    """Bytes on the device of a block's trainable parameters that are kept below it, in its update."""
    return sum(
        flat.padded // flat.layout.span(flat.layout.params) * flat.element_bytes(plan)
        for flat in flats
        if flat.trainable and flat.layout.params_below
    )


def _passed(plan: Plan, blocks: Sequence[Sequence[FlatParamSpec]]) -> Iterator[Piece]:
    for flats in blocks if plan.keep.optimizer_below else ():
        for flat in flats:
            for group in groups(plan, flat):
                yield from pieces(plan, group)

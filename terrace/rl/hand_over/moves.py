"""Moves parameters from the boxes that ranks hold to the boxes that they need, tier by tier.

From the outermost tier inward, each unit inside a tier receives once all elements that some member needs and no member
has; then the same happens inside each unit, down to single ranks. Elements come from the nearest holders, evenly
divided among them, and go in even parts to the members that need them. So

    no rank receives an element that it does not need, or one twice;
    over all tiers a rank receives |need minus own| elements;
    a unit receives |its need minus its own| over all tiers outside it.

A rank forwards only elements that it needs itself, so no rank needs transit buffers. A set of ranks is an integer
bit mask. HybridFlow (Sheng et al. 2409.19256, section 5) does this for one layout, tensor and pipeline ranks
(terrace.rl.hand_over.dealing); here training may shard parameters in any way.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from terrace.base.boxes import Box, numel, sizes, to_text
from terrace.base.errors import PlanError
from terrace.rl.hand_over.overlay import overlay

Parts = Mapping[str, Sequence[Box]]  # parameter -> boxes of it


class Cell(NamedTuple):
    """A box of a parameter whose elements all have the same holders and the same needers (bit masks of ranks)."""

    parameter: str
    box: Box
    holders: int
    needers: int


class Move(NamedTuple):
    """A box of a parameter that rank `source` sends to rank `target`; `tier` is the outermost one it crosses."""

    parameter: str
    box: Box
    source: int
    target: int
    tier: int


_Piece = tuple[str, Box, int]  # (parameter, box, sender); plain tuples, since a large cluster has millions
_Sets = dict[tuple[int, int], list[_Piece]]  # (holders, needers) -> pieces


def cells_of(holds: Sequence[Parts], needs: Sequence[Parts]) -> list[Cell]:
    """Cells of everything that is needed, from the parts that each rank holds and needs (these may overlap).

    Raises `PlanError` for a part that is needed but held by no rank.
    """
    world = len(holds)
    boxes: dict[str, list[tuple[Box, int]]] = {}
    # Bits of needers are above the bits of holders.
    for first, parts in ((world, needs), (0, holds)):
        for rank, named in enumerate(parts):
            for name, own in named.items():
                boxes.setdefault(name, []).extend((box, 1 << (first + rank)) for box in own)
    found = []
    for name, labelled in boxes.items():
        for box, ranks in overlay(labelled):
            holders, needers = ranks & ((1 << world) - 1), ranks >> world
            if needers and not holders:
                raise PlanError(
                    f"no rank holds {name}[{to_text(box)}], which is needed: hand over from ranks that together hold "
                    "the whole model"
                )
            if needers:
                found.append(Cell(name, box, holders, needers))
    return found


def moves_of(cells: Iterable[Cell], tiers: Sequence[int], rank: int | None = None) -> list[Move]:
    """Moves that give every rank its elements, outer tiers first, so that a source always has its box by then.

    `tiers` are the sizes of the cluster's tiers, innermost first. With `rank`, only the moves from and to it; moves
    inside other units are then not computed.
    """
    sets: _Sets = {}
    for cell in cells:
        sets.setdefault((cell.holders, cell.needers), []).append((cell.parameter, cell.box, -1))
    return sorted(_inside(len(tiers) - 1, 0, sets, tiers, rank), key=lambda move: -move.tier)


def missing(cells: Iterable[Cell], tiers: Sequence[int], tier: int) -> list[int]:
    """Elements that each unit inside `tier` needs but does not hold, and so receives over this tier or outer ones.

    Units inside tier 0 are ranks; the unit inside `len(tiers)` is the whole world, which misses nothing.
    """
    size = math.prod(tiers[:tier])
    found = [0] * (math.prod(tiers) // size)
    totals: dict[tuple[int, int], int] = {}
    for cell in cells:
        sets = cell.holders, cell.needers
        totals[sets] = totals.get(sets, 0) + numel(cell.box)
    for (holders, needers), count in totals.items():
        have = {rank // size for rank in members(holders)}
        for unit in {rank // size for rank in members(needers)} - have:
            found[unit] += count
    return found


def crossing(cells: Sequence[Cell], tiers: Sequence[int]) -> tuple[int, ...]:
    """Elements that all ranks together send over each tier.

    Elements that the enclosing unit lacks arrive over an outer tier, so they are subtracted.
    """
    entering = [sum(missing(cells, tiers, tier)) for tier in range(len(tiers) + 1)]
    return tuple(inner - outer for inner, outer in pairwise(entering))


def members(ranks: int) -> list[int]:
    """The ranks in a bit mask, sorted."""
    found = []
    while ranks:
        lowest = ranks & -ranks
        found.append(lowest.bit_length() - 1)
        ranks ^= lowest
    return found


def _inside(tier: int, first: int, sets: _Sets, tiers: Sequence[int], rank: int | None) -> Iterator[Move]:
    """Moves over `tier` and its inner tiers, inside the unit that starts at rank `first`."""
    size = math.prod(tiers[:tier])
    asked: dict[int, int] = {}  # set of holders -> receivers served so far
    for start in range(first, first + size * tiers[tier], size):
        unit = _unit(start, size)
        here: _Sets = {}  # pieces that some members need and others have
        wanted: dict[int, list[tuple[int, list[_Piece]]]] = {}
        for (holders, needers), pieces in sets.items():
            need, have = needers & unit, holders & unit
            if have and need & ~have:
                here.setdefault((have, need), []).extend(pieces)
            elif need and not have:
                wanted.setdefault(need, []).append((holders, pieces))
        for need, found in wanted.items():
            receivers = members(need)
            sent = [piece for held in found for piece in _sourced(*held, len(receivers), asked)]
            for receiver, part in zip(receivers, _even_parts(sent, len(receivers)), strict=True):
                for name, box, source in part:
                    if rank is None or rank in (source, receiver):
                        yield Move(name, box, source, receiver, tier)
                if part and len(receivers) > 1:
                    here.setdefault((1 << receiver, need), []).extend(part)
        if tier and here and (rank is None or start <= rank < start + size):
            yield from _inside(tier - 1, start, here, tiers, rank)


def _sourced(holders: int, pieces: Sequence[_Piece], num_receivers: int, asked: dict[int, int]) -> Iterator[_Piece]:
    """Assign a sending holder to each piece, in even parts: one per receiver, or per holder if there are fewer."""
    sources = members(holders)
    # Rotate over the holders, so that all end up sending the same amount.
    turn = asked.get(holders, 0)
    asked[holders] = turn + num_receivers
    for place, part in enumerate(_even_parts(pieces, min(len(sources), num_receivers))):
        source = sources[(turn + place) % len(sources)]
        yield from [(name, box, source) for name, box, _ in part]


def _even_parts(pieces: Sequence[_Piece], count: int) -> list[list[_Piece]]:
    """Split `pieces` into `count` runs of equal element counts, up to one row of a box that is cut."""
    if count == 1:
        return [list(pieces)]
    total, position = sum(numel(box) for _, box, _ in pieces), 0
    parts: list[list[_Piece]] = [[]]
    for name, box, source in pieces:
        rest: Box | None = box
        while rest is not None:
            # Part ends are computed from the beginning, so rounding errors do not accumulate.
            end = total * len(parts) // count - position
            head, rest = (rest, None) if numel(rest) <= end or len(parts) == count else _cut_at(rest, end)
            if head is not None:
                parts[-1].append((name, head, source))
                position += numel(head)
            if rest is not None:
                parts.append([])
    return parts + [[] for _ in range(count - len(parts))]


def _cut_at(box: Box, elements: int) -> tuple[Box | None, Box | None]:
    """Split a box after about `elements` elements, between rows of the first dim with more than one row."""
    lengths = sizes(box)
    dim = next((dim for dim, length in enumerate(lengths) if length > 1), None)
    if dim is None or elements <= 0:
        return None, box
    row = math.prod(lengths[dim + 1 :])
    num_rows = (elements + row // 2) // row
    if num_rows == 0:
        return None, box
    if num_rows >= lengths[dim]:
        return box, None
    start, stop = box[dim]
    middle = start + num_rows
    return (*box[:dim], (start, middle), *box[dim + 1 :]), (*box[:dim], (middle, stop), *box[dim + 1 :])


def _unit(start: int, size: int) -> int:
    return ((1 << size) - 1) << start

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
from itertools import groupby, pairwise
from operator import itemgetter
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


_Piece = tuple[str, Box]  # (parameter, box); plain tuples, since a large cluster has millions
_Pieces = tuple[_Piece, ...]  # one object for all units that receive the same, so that its id says which it is
_Sets = dict[tuple[int, int], list[_Pieces]]  # (holders, needers) -> pieces, with ranks counted from a unit's first


class Bundle(NamedTuple):
    """Pieces that rank `source` sends to rank `target`, counted from the first of their unit."""

    source: int
    target: int
    pieces: _Pieces


class Exchange(NamedTuple):
    """Bundles over `tier` inside a unit, then the exchanges inside its members, each with its first rank.

    Members that need and hold alike share one value.
    """

    tier: int
    bundles: list[Bundle]
    inside: list[tuple[int, "Exchange"]]


Sends = dict[tuple[int, int], int]  # (source, target) -> bytes


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
    found = _moves(exchange_of(cells, tiers, rank), 0)
    own = (move for move in found if rank is None or rank in (move.source, move.target))
    return sorted(own, key=lambda move: -move.tier)


def exchange_of(cells: Iterable[Cell], tiers: Sequence[int], rank: int | None = None) -> Exchange:
    """The exchanges of `moves_of`; with `rank`, only of units that it is in."""
    sets: _Sets = {}
    for cell in cells:
        sets.setdefault((cell.holders, cell.needers), []).append(((cell.parameter, cell.box),))
    return _Exchanges(tiers).inside(len(tiers) - 1, sets, rank)


def sends_of(exchange: Exchange, element_bytes: Mapping[str, int], num_tiers: int) -> list[Sends]:
    """Tier -> bytes from rank to rank of an exchange and of those inside; `element_bytes` are by parameter."""
    bundles = dict[int, int]()  # by the id of their pieces
    inner = dict[int, list[Sends]]()  # by the id of an exchange

    def sent(each: Exchange) -> list[Sends]:
        if id(each) in inner:
            return inner[id(each)]
        found: list[Sends] = [{} for _ in range(num_tiers)]
        own = found[each.tier]
        for source, target, pieces in each.bundles:
            if id(pieces) not in bundles:
                bundles[id(pieces)] = sum(numel(box) * element_bytes[name] for name, box in pieces)
            own[source, target] = own.get((source, target), 0) + bundles[id(pieces)]
        for start, members_exchange in each.inside:
            for total, more in zip(found, sent(members_exchange), strict=True):
                for (source, target), num_bytes in more.items():
                    total[start + source, start + target] = num_bytes
        inner[id(each)] = found
        return found

    return sent(exchange)


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


def _moves(exchange: Exchange, first: int) -> Iterator[Move]:
    for source, target, pieces in exchange.bundles:
        for name, box in pieces:
            yield Move(name, box, first + source, first + target, exchange.tier)
    for start, inner in exchange.inside:
        yield from _moves(inner, first + start)


class _Exchanges:
    """Exchanges of one set of cells; what units have in common is computed once."""

    def __init__(self, tiers: Sequence[int]) -> None:
        self._tiers = tiers
        # By the ids of pieces, which are kept along with what was found.
        self._inside: dict[tuple[object, ...], tuple[_Sets, Exchange]] = {}
        self._parts: dict[tuple[object, ...], tuple[list[list[_Pieces]], _Parted]] = {}
        self._members: dict[int, list[int]] = {}

    def inside(self, tier: int, sets: _Sets, rank: int | None) -> Exchange:
        """Exchanges over `tier` and its inner tiers; `rank` and all others are counted from the unit's first."""
        key = tier, rank, *((*both, *map(id, pieces)) for both, pieces in sets.items())
        if key not in self._inside:
            self._inside[key] = sets, self._exchange(tier, sets, rank)
        return self._inside[key][1]

    def _exchange(self, tier: int, sets: _Sets, rank: int | None) -> Exchange:
        size = math.prod(self._tiers[:tier])
        found, unit = Exchange(tier, [], []), (1 << size) - 1
        asked: dict[int, int] = {}  # set of holders -> receivers served so far
        for start in range(0, size * self._tiers[tier], size):
            here: _Sets = {}  # pieces that some members need and others have
            wanted: dict[int, list[tuple[int, list[_Pieces]]]] = {}
            for (holders, needers), pieces in sets.items():
                need, have = needers >> start & unit, holders >> start & unit
                if have and need & ~have:
                    here.setdefault((have, need), []).extend(pieces)
                elif need and not have:
                    wanted.setdefault(need, []).append((holders, pieces))
            for need, held in wanted.items():
                receivers = self._ranks(need)
                turns = []
                for holders, _ in held:
                    # Rotate over the holders, so that all end up sending the same amount.
                    turns.append((self._ranks(holders), asked.get(holders, 0)))
                    asked[holders] = turns[-1][1] + len(receivers)
                for receiver, part in zip(receivers, self._parted(held, len(receivers)), strict=True):
                    for index, place, own in part:
                        sources, turn = turns[index]
                        source = sources[(turn + place) % len(sources)]
                        found.bundles.append(Bundle(source, start + receiver, own))
                        if len(receivers) > 1:
                            here.setdefault((1 << receiver, need), []).append(own)
            if tier and here and (rank is None or start <= rank < start + size):
                inner = self.inside(tier - 1, here, None if rank is None else rank - start)
                found.inside.append((start, inner))
        return found

    def _parted(self, held: Sequence[tuple[int, list[_Pieces]]], num_receivers: int) -> "_Parted":
        """For each receiver (index in `held`, place in a row of its holders, pieces), all in even parts.

        Pieces are divided among as many holders as there are receivers, or all if these are fewer.
        """
        counts = [min(len(self._ranks(holders)), num_receivers) for holders, _ in held]
        key = num_receivers, *((count, *map(id, pieces)) for count, (_, pieces) in zip(counts, held, strict=True))
        if key not in self._parts:
            sent = list[_Tagged]()
            for index, (count, (_, pieces)) in enumerate(zip(counts, held, strict=True)):
                whole = [(name, box, (index, 0)) for each in pieces for name, box in each]
                for place, part in enumerate(_even_parts(whole, count)):
                    sent += [(name, box, (index, place)) for name, box, _ in part]
            found = [
                [(*tag, tuple((name, box) for name, box, _ in own)) for tag, own in groupby(part, itemgetter(2))]
                for part in _even_parts(sent, num_receivers)
            ]
            self._parts[key] = [pieces for _, pieces in held], found
        return self._parts[key][1]

    def _ranks(self, ranks: int) -> list[int]:
        if ranks not in self._members:
            self._members[ranks] = members(ranks)
        return self._members[ranks]


_Parted = list[list[tuple[int, int, _Pieces]]]
_Tagged = tuple[str, Box, tuple[int, int]]  # a piece, the index of its holders, and a place in their row


def _even_parts(pieces: Sequence[_Tagged], count: int) -> list[list[_Tagged]]:
    """Split `pieces` into `count` runs of equal element counts, up to one row of a box that is cut."""
    if count == 1:
        return [list(pieces)]
    total, position = sum(numel(box) for _, box, _ in pieces), 0
    parts: list[list[_Tagged]] = [[]]
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

"""Building Spreads: what one member of a pool does for the attention of a micro-batch (terrace.sequence.view).

Every member computes its own from the same `Layout`, and what one sends is what the other receives, in the same order
of rows: tokens segment by segment, in the order of the layout, and rising within each; then padding.

A place's attended rows are in that order too: the tokens of its shards, then the padding of its shards, then what
`num_attended` leaves over. Padding of a shard travels with it, and no pair reads it: a row of queries that is in no
pair has output zero and gets no gradient. Rows of a later round are peer after peer, within each in that order.

A shard goes round the ring of its segment, the parts of a place each to the same part of the next; rings of several
degrees and sizes share the rounds, each as long as it has steps. Where the last step left a shard it goes `home` from.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, compress, pairwise
from typing import NamedTuple

from terrace.sequence.layout import Layout
from terrace.sequence.pairs import Stretch, pairs_across, pairs_within
from terrace.sequence.segments import Segment, Step, route
from terrace.sequence.view import NOTHING, Exchange, Round, Run, Spread, merged_runs, num_rows

Messages = tuple[tuple[int, tuple[Run, ...]], ...]


class _Ring(NamedTuple):
    """A segment that the place attends to, and its steps."""

    segment: Segment
    steps: tuple[Step, ...]


class _Shard(NamedTuple):
    """A shard in the rows of a round."""

    ring: _Ring
    stretches: tuple[Stretch, ...]
    padding: Run


def spread(layout: Layout, member: int) -> Spread:
    """Return what a member of the pool does."""
    place = member // layout.ulysses
    rings = [_ring(segment, place) for segment in layout.segments if place in segment.places]
    own = _laid(rings)
    num_attended = max(layout.num_attended, num_rows(_rows(own)))
    tokens = [stretch for shard in own for stretch in shard.stretches]
    padding = (sum(stop - start for start, stop, _ in tokens), num_attended)
    return Spread(
        member=member,
        tokens=layout.held[member],
        num_held=layout.num_held,
        num_attended=num_attended,
        into=Exchange(
            tuple(_sends(layout, member, padding[1] - padding[0])), _receives(layout, member, tokens, padding)
        ),
        rounds=tuple(_rounds(layout, member % layout.ulysses, own, num_attended)),
    )


def _ring(segment: Segment, place: int) -> _Ring:
    return _Ring(segment, route(segment.shape, segment.places.index(place)))


def _laid(rings: Iterable[_Ring], step: int = 0, first: int = 0) -> list[_Shard]:
    """Return the shards of a step in rows from `first` on: all their tokens, then all their padding."""
    laid = []
    for ring in rings:
        stretches, source = [], ring.steps[step].source
        for start, stop in ring.segment.shard(source):
            stretches.append(Stretch(start, stop, first))
            first += stop - start
        laid.append((ring, tuple(stretches), ring.segment.padding(source)))
    ends = accumulate((padding for _, _, padding in laid), initial=first)
    return [
        _Shard(ring, stretches, (start, start + padding))
        for (ring, stretches, padding), start in zip(laid, ends, strict=False)
    ]


def _rows(shards: Iterable[_Shard]) -> tuple[Run, ...]:
    """Return the rows of shards in the order of messages."""
    shards = list(shards)
    tokens = (stretch.rows(stretch.start, stretch.stop) for shard in shards for stretch in shard.stretches)
    return merged_runs(chain(tokens, (shard.padding for shard in shards)))


def _messages(rows: Mapping[int, Iterable[Run]]) -> Messages:
    """Return the messages of peers, those without rows left out."""
    messages = ((peer, merged_runs(runs)) for peer, runs in sorted(rows.items()))
    return tuple((peer, runs) for peer, runs in messages if runs)


def _sends(layout: Layout, member: int, num_padding: int) -> Iterator[tuple[int, tuple[Run, ...]]]:
    """Yield what the member sends `into` attention: each of its rows to all parts of a place."""
    place, part = divmod(member, layout.ulysses)
    rows: dict[int, list[tuple[int, int, Run]]] = {}  # by place: (segment, token, rows)
    row = 0
    for start, stop in layout.held[member]:
        while start < stop:
            order = layout.segment_of(start)
            index, end = layout.segments[order].locate(start)
            end = min(end, stop)
            to = layout.segments[order].places[index]
            rows.setdefault(to, []).append((order, start, (row, row + end - start)))
            row += end - start
            start = end
    runs = {to: [run for _, _, run in sorted(pieces)] for to, pieces in rows.items()}
    start, stop = _paddings(layout, place, num_padding)[part]
    runs.setdefault(place, []).append((row, row + stop - start))
    for to, message in _messages(runs):
        yield from ((to * layout.ulysses + other, message) for other in range(layout.ulysses))


def _paddings(layout: Layout, place: int, num_padding: int) -> list[Run]:
    """Return which of the place's rows of padding those of each of its parts are."""
    first = place * layout.ulysses
    lacking = (layout.num_held - num_rows(layout.held[first + part]) for part in range(layout.ulysses))
    ends = [min(end, num_padding) for end in accumulate(lacking, initial=0)]
    return list(pairwise(ends))


def _receives(layout: Layout, member: int, tokens: Iterable[Stretch], padding: Run) -> Messages:
    """Return what comes to the member's attended rows, `tokens` and `padding`."""
    rows: dict[int, list[Run]] = {}
    for stretch in tokens:
        start = stretch.start
        while start < stretch.stop:
            holder, end = layout.holder(start)
            end = min(end, stretch.stop)
            rows.setdefault(holder, []).append(stretch.rows(start, end))
            start = end
    place = member // layout.ulysses
    for part, (start, stop) in enumerate(_paddings(layout, place, padding[1] - padding[0])):
        rows.setdefault(place * layout.ulysses + part, []).append((padding[0] + start, padding[0] + stop))
    return _messages(rows)


def _rounds(layout: Layout, part: int, own: list[_Shard], num_attended: int) -> Iterator[Round]:
    """Yield the rounds of such a part of a place that has the shards `own`."""
    shards, exchange, size, step = own, NOTHING, num_attended, 0
    tokens = [stretch for shard in own for stretch in shard.stretches]
    pairs = list(pairs_within(tokens, layout.documents, layout.window))
    while shards or step == 0:
        for queries, keys in zip(own, shards, strict=True):
            pairs += pairs_across(queries.stretches, keys.stretches, layout.documents, layout.window)
        goes = [len(shard.ring.segment.places) > step + 1 for shard in own]
        stays = [not goes_on for goes_on in goes]
        home = NOTHING  # what stays in round 0 is there
        if step > 0:
            home = _home(layout.ulysses, part, list(compress(own, stays)), list(compress(shards, stays)))
        yield Round(size, exchange, tuple(pairs), home)
        step += 1
        own = list(compress(own, goes))
        shards, exchange = _passed(layout.ulysses, part, list(compress(shards, goes)), step)
        size, pairs = max((shard.padding[1] for shard in shards), default=0), []


def _home(ulysses: int, part: int, own: Sequence[_Shard], shards: Sequence[_Shard]) -> Exchange:
    """Return how shards go home after their last step, in return for those of `own`."""
    sends: dict[int, list[_Shard]] = {}
    receives: dict[int, list[_Shard]] = {}
    for mine, shard in zip(own, shards, strict=True):
        places, last = shard.ring.segment.places, shard.ring.steps[-1]
        sends.setdefault(places[last.to], []).append(shard)
        receives.setdefault(places[last.by], []).append(mine)
    return Exchange(_between(ulysses, part, sends), _between(ulysses, part, receives))


def _passed(ulysses: int, part: int, shards: Sequence[_Shard], step: int) -> tuple[list[_Shard], Exchange]:
    """Return the shards of a step, in the order of those of the step before, and the exchange between the two."""
    sends: dict[int, list[_Shard]] = {}
    rings: dict[int, list[_Ring]] = {}  # by the place that their shards come from
    for shard in shards:
        ring, places, now = shard.ring, shard.ring.segment.places, shard.ring.steps[step]
        sends.setdefault(places[now.to], []).append(shard)
        rings.setdefault(places[now.by], []).append(ring)
    receives: dict[int, list[_Shard]] = {}
    first = 0
    for place in sorted(rings):
        receives[place] = _laid(rings[place], step, first)
        first = receives[place][-1].padding[1]
    come = {place: iter(laid) for place, laid in receives.items()}
    passed = [next(come[shard.ring.segment.places[shard.ring.steps[step].by]]) for shard in shards]
    return passed, Exchange(_between(ulysses, part, sends), _between(ulysses, part, receives))


def _between(ulysses: int, part: int, shards: Mapping[int, Iterable[_Shard]]) -> Messages:
    """Return the messages between places, which same parts exchange."""
    messages = ((place * ulysses + part, _rows(shards[place])) for place in sorted(shards))
    return tuple((peer, runs) for peer, runs in messages if runs)

"""Builds the `TokenLayout` of one member of a context group (terrace.sequence.token_layout).

Every member builds its layout from the same `GroupLayout`. Sender and receiver agree on the order of rows: tokens by
segment in the order of the group layout, ascending within each, then padding.

Attention tokens of a ring rank have the same order: the tokens of its shards, the padding of its shards, then rows up
to `num_attention_tokens`. A shard's padding is sent with it, but no pair reads it: a query row in no pair has zero
output and no gradient. Rows of a later round are grouped by peer, in the same order within each.

A shard moves around the ring of its segment, from each Ulysses rank to the same Ulysses rank of the next ring rank.
Rings of different degrees and sizes share rounds; each participates in as many rounds as it has steps. After its last
step, a shard's gradients return to its owner.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, compress, pairwise
from typing import NamedTuple

from terrace.sequence.group_layout import GroupLayout
from terrace.sequence.pairs import Stretch, pairs_across, pairs_within
from terrace.sequence.segments import RouteStep, Segment, route
from terrace.sequence.token_layout import NOTHING, Exchange, Round, Run, TokenLayout, merged_runs, num_rows

Messages = tuple[tuple[int, tuple[Run, ...]], ...]


class _Ring(NamedTuple):
    """A segment that the ring rank attends to, and its steps."""

    segment: Segment
    steps: tuple[RouteStep, ...]


class _Shard(NamedTuple):
    ring: _Ring
    stretches: tuple[Stretch, ...]
    padding: Run


def build_token_layout(layout: GroupLayout, member: int) -> TokenLayout:
    ring_rank = member // layout.ulysses
    segments = (segment for segment in layout.segments if ring_rank in segment.ring_ranks)
    own = _placed(_Ring(each, route(each.shape, each.ring_ranks.index(ring_rank))) for each in segments)
    num_attention_tokens = max(layout.num_attention_tokens, num_rows(_rows(own)))
    tokens = [stretch for shard in own for stretch in shard.stretches]
    padding = (sum(stop - start for start, stop, _ in tokens), num_attention_tokens)
    return TokenLayout(
        member=member,
        tokens=layout.local_runs[member],
        num_local_tokens=layout.num_local_tokens,
        num_attention_tokens=num_attention_tokens,
        into=Exchange(
            tuple(_sends(layout, member, padding[1] - padding[0])), _receives(layout, member, tokens, padding)
        ),
        rounds=tuple(_rounds(layout, member % layout.ulysses, own, num_attention_tokens)),
    )


def _placed(rings: Iterable[_Ring], step: int = 0, first: int = 0) -> list[_Shard]:
    # Rows of a step begin at `first`: the tokens of all shards, then the padding of all shards.
    placed = []
    for ring in rings:
        stretches, source = [], ring.steps[step].source
        for start, stop in ring.segment.shard(source):
            stretches.append(Stretch(start, stop, first))
            first += stop - start
        placed.append((ring, tuple(stretches), ring.segment.padding(source)))
    ends = accumulate((padding for _, _, padding in placed), initial=first)
    return [
        _Shard(ring, stretches, (start, start + padding))
        for (ring, stretches, padding), start in zip(placed, ends, strict=False)
    ]


def _rows(shards: Iterable[_Shard]) -> tuple[Run, ...]:
    shards = list(shards)
    tokens = (stretch.rows(stretch.start, stretch.stop) for shard in shards for stretch in shard.stretches)
    return merged_runs(chain(tokens, (shard.padding for shard in shards)))


def _messages(rows: Mapping[int, Iterable[Run]]) -> Messages:
    messages = ((peer, merged_runs(runs)) for peer, runs in sorted(rows.items()))
    return tuple((peer, runs) for peer, runs in messages if runs)


def _sends(layout: GroupLayout, member: int, num_padding: int) -> Iterator[tuple[int, tuple[Run, ...]]]:
    ring_rank, ulysses_rank = divmod(member, layout.ulysses)
    # Every local row goes to all Ulysses ranks of the ring rank that attends to it, which take different heads.
    rows: dict[int, list[tuple[int, int, Run]]] = {}  # by ring rank: (segment, token, rows)
    row = 0
    for start, stop in layout.local_runs[member]:
        while start < stop:
            order = layout.segment_of(start)
            index, end = layout.segments[order].locate(start)
            end = min(end, stop)
            to = layout.segments[order].ring_ranks[index]
            rows.setdefault(to, []).append((order, start, (row, row + end - start)))
            row += end - start
            start = end
    runs = {to: [run for _, _, run in sorted(pieces)] for to, pieces in rows.items()}
    start, stop = _paddings(layout, ring_rank, num_padding)[ulysses_rank]
    runs.setdefault(ring_rank, []).append((row, row + stop - start))
    for to, message in _messages(runs):
        yield from ((to * layout.ulysses + other, message) for other in range(layout.ulysses))


def _paddings(layout: GroupLayout, ring_rank: int, num_padding: int) -> list[Run]:
    # Local rows without a token are dealt to the padding rows of the ring rank, Ulysses rank by Ulysses rank.
    first = ring_rank * layout.ulysses
    lacking = (
        layout.num_local_tokens - num_rows(layout.local_runs[first + ulysses_rank])
        for ulysses_rank in range(layout.ulysses)
    )
    ends = [min(end, num_padding) for end in accumulate(lacking, initial=0)]
    return list(pairwise(ends))


def _receives(layout: GroupLayout, member: int, tokens: Iterable[Stretch], padding: Run) -> Messages:
    rows: dict[int, list[Run]] = {}
    for stretch in tokens:
        start = stretch.start
        while start < stretch.stop:
            holder, end = layout.holder(start)
            end = min(end, stretch.stop)
            rows.setdefault(holder, []).append(stretch.rows(start, end))
            start = end
    ring_rank = member // layout.ulysses
    for ulysses_rank, (start, stop) in enumerate(_paddings(layout, ring_rank, padding[1] - padding[0])):
        rows.setdefault(ring_rank * layout.ulysses + ulysses_rank, []).append((padding[0] + start, padding[0] + stop))
    return _messages(rows)


def _rounds(layout: GroupLayout, ulysses_rank: int, own: list[_Shard], num_attention_tokens: int) -> Iterator[Round]:
    shards, exchange, size, step = own, NOTHING, num_attention_tokens, 0
    tokens = [stretch for shard in own for stretch in shard.stretches]
    windows = (layout.window, *layout.other_windows)
    found = [list(pairs_within(tokens, layout.documents, window)) for window in windows]
    # A ring participates in as many rounds as it has steps; `passes_on` selects rings whose keys are passed on.
    while shards or step == 0:
        for queries, keys in zip(own, shards, strict=True):
            for pairs, window in zip(found, windows, strict=True):
                pairs += pairs_across(queries.stretches, keys.stretches, layout.documents, window)
        passes_on = [len(shard.ring.segment.ring_ranks) > step + 1 for shard in own]
        ends = [not passes for passes in passes_on]
        return_gradients = NOTHING  # gradients of round 0 stay with their owner
        if step > 0:
            return_gradients = _returned(
                layout.ulysses, ulysses_rank, list(compress(own, ends)), list(compress(shards, ends))
            )
        first, *others = map(tuple, found)
        yield Round(size, exchange, first, return_gradients, tuple(others))
        step += 1
        own = list(compress(own, passes_on))
        shards, exchange = _passed(layout.ulysses, ulysses_rank, list(compress(shards, passes_on)), step)
        size, found = max((shard.padding[1] for shard in shards), default=0), [[] for _ in windows]


def _returned(ulysses: int, ulysses_rank: int, own: Sequence[_Shard], shards: Sequence[_Shard]) -> Exchange:
    # After its last step a shard's gradients are sent to its owner; this rank receives those of its own shard.
    sends: dict[int, list[_Shard]] = {}
    receives: dict[int, list[_Shard]] = {}
    for owned, shard in zip(own, shards, strict=True):
        ring_ranks, last = shard.ring.segment.ring_ranks, shard.ring.steps[-1]
        sends.setdefault(ring_ranks[last.to], []).append(shard)
        receives.setdefault(ring_ranks[last.by], []).append(owned)
    return Exchange(_between(ulysses, ulysses_rank, sends), _between(ulysses, ulysses_rank, receives))


def _passed(ulysses: int, ulysses_rank: int, shards: Sequence[_Shard], step: int) -> tuple[list[_Shard], Exchange]:
    sends: dict[int, list[_Shard]] = {}
    rings: dict[int, list[_Ring]] = {}  # by source ring rank
    for shard in shards:
        ring, ring_ranks, now = shard.ring, shard.ring.segment.ring_ranks, shard.ring.steps[step]
        sends.setdefault(ring_ranks[now.to], []).append(shard)
        rings.setdefault(ring_ranks[now.by], []).append(ring)
    # Rows are laid out by sender, but shards are returned in the order of the previous step, so that they stay paired
    # with the queries' shards.
    receives: dict[int, list[_Shard]] = {}
    first = 0
    for ring_rank in sorted(rings):
        receives[ring_rank] = _placed(rings[ring_rank], step, first)
        first = receives[ring_rank][-1].padding[1]
    arriving = {ring_rank: iter(placed) for ring_rank, placed in receives.items()}
    passed = [next(arriving[shard.ring.segment.ring_ranks[shard.ring.steps[step].by]]) for shard in shards]
    return passed, Exchange(_between(ulysses, ulysses_rank, sends), _between(ulysses, ulysses_rank, receives))


def _between(ulysses: int, ulysses_rank: int, shards: Mapping[int, Iterable[_Shard]]) -> Messages:
    # Keys travel between equal Ulysses ranks, which have the same heads.
    return _messages({ring_rank * ulysses + ulysses_rank: _rows(placed) for ring_rank, placed in shards.items()})

"""Spreads of all members of a pool, carried out on token numbers: who sends what, who sees what, what comes home."""

import math
import operator
from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, chain, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terrace.plan.context import ContextGroup, Heads, local_tokens
from terrace.plan.mesh import Mesh
from terrace.plan.plan import Plan
from terrace.plan.wire import FORMATS
from terrace.sequence.assign import assign
from terrace.sequence.build import build_token_layout
from terrace.sequence.cost import Link, WorkCost
from terrace.sequence.group_layout import GroupLayout
from terrace.sequence.segments import Segment, route
from terrace.sequence.static import static_group_layout
from terrace.sequence.token_layout import NOTHING, Exchange, Pair, PairKind, Run, TokenLayout, cut_runs, num_rows
from terrace.sequence.traffic import SentBytes, SentRows, sent_bytes, sent_rows
from tests.support.effort import lines_run

PADDING = -1
Rows = list[int]  # the token of every row


def rows_of(runs: Sequence[Run]) -> Rows:
    return [row for start, stop in runs for row in range(start, stop)]


def carried(exchanges: Sequence[Exchange], rows: Sequence[Rows], sizes: Sequence[int]) -> list[Rows]:
    """Return what an exchange of all members makes of their rows; rows that nothing comes to are padding."""
    under_way = {}
    for member, exchange in enumerate(exchanges):
        assert [peer for peer, _ in exchange.sends] == sorted({peer for peer, _ in exchange.sends})
        for peer, runs in exchange.sends:
            under_way[member, peer] = [rows[member][row] for row in rows_of(runs)]
    come = [[PADDING] * size for size in sizes]
    for member, exchange in enumerate(exchanges):
        assert [peer for peer, _ in exchange.receives] == sorted({peer for peer, _ in exchange.receives})
        to = [row for _, runs in exchange.receives for row in rows_of(runs)]
        assert len(to) == len(set(to)), "two rows come to the same"
        for peer, runs in exchange.receives:
            message = under_way.pop((peer, member))
            assert len(message) == num_rows(runs) > 0
            for row, token in zip(rows_of(runs), message, strict=True):
                come[member][row] = token
    assert not under_way, "sent and not received"
    return come


def seen(pair: Pair) -> list[tuple[int, int]]:
    """Return the rows (query, key) of a pair, by the definition of its kind."""
    queries, keys = rows_of([pair.queries]), rows_of([pair.keys])
    if pair.kind is PairKind.FULL:
        return [(query, key) for query in queries for key in keys]
    if pair.kind is PairKind.CAUSAL:
        assert len(queries) == len(keys)
        return [(query, key) for at, query in enumerate(queries) for key in keys[: at + 1]]
    assert pair.mask is not None
    visible = []
    for at, query in enumerate(queries):
        stands = at + pair.mask.shift
        first = max((begin for begin in pair.mask.begins if begin <= stands), default=0)
        if pair.mask.window:
            first = max(first, stands - pair.mask.window + 1)
        visible += [(query, keys[key]) for key in range(first, min(stands + 1, len(keys)))]
    return visible


def ringed(layout: GroupLayout) -> set[int]:
    """Return the tokens whose keys go to other places."""
    rings = [segment for segment in layout.segments if len(segment.ring_ranks) > 1]
    return {token for segment in rings for token in range(segment.start, segment.stop)}


def carry_out(layout: GroupLayout) -> tuple[list[TokenLayout], list[Counter[tuple[int, int]]]]:
    """Check all members of a layout against each other; return them and the (query, key) tokens each works on."""
    token_layouts = [build_token_layout(layout, member) for member in range(len(layout.local_runs))]
    held = [rows_of(one.tokens) + [PADDING] * (one.num_local_tokens - num_rows(one.tokens)) for one in token_layouts]
    attended = carried([one.into for one in token_layouts], held, [one.num_attention_tokens for one in token_layouts])
    for one, rows in zip(token_layouts, attended, strict=True):
        assert rows == attended[one.member // layout.ulysses * layout.ulysses], "parts of a place attend alike"
    firsts = [token for rows in attended[:: layout.ulysses] for token in rows if token != PADDING]
    assert sorted(firsts) == sorted(rows_of([run for runs in layout.local_runs for run in runs])), "each at one place"
    marked = [[member * 10**6 + row for row in range(len(rows))] for member, rows in enumerate(attended)]
    keys, worked, come_home = marked, [Counter[tuple[int, int]]() for _ in token_layouts], Counter[int]()
    tokens = dict(zip(chain(*marked), chain(*attended), strict=True))
    for step in range(max(len(one.rounds) for one in token_layouts)):
        rounds = [one.rounds[step] if step < len(one.rounds) else None for one in token_layouts]
        sizes = [round_.num_rows if round_ else 0 for round_ in rounds]
        if step:
            keys = carried([round_.exchange if round_ else NOTHING for round_ in rounds], keys, sizes)
        homes = carried(
            [round_.return_gradients if round_ else NOTHING for round_ in rounds], keys, [len(r) for r in attended]
        )
        for member, round_ in enumerate(rounds):
            assert PADDING not in keys[member]
            for query, key in (found for pair in (round_.pairs if round_ else ()) for found in seen(pair)):
                worked[member][attended[member][query], tokens[keys[member][key]]] += 1
            back = [
                (own, return_gradients)
                for own, return_gradients in zip(marked[member], homes[member], strict=True)
                if return_gradients != PADDING
            ]
            assert all(own == return_gradients for own, return_gradients in back), "a gradient came to the wrong row"
            come_home.update(own for own, _ in back)
    go_round = ringed(layout)
    going = {mark for mark, token in tokens.items() if token in go_round}
    assert all(one.rounds[0].return_gradients == NOTHING for one in token_layouts)
    assert all(count == 1 for count in come_home.values())
    assert going <= come_home.keys()
    assert not {token for mark in come_home.keys() - going if (token := tokens[mark]) != PADDING}
    return token_layouts, worked


def wanted(layout: GroupLayout) -> set[tuple[int, int]]:
    """Return the (query, key) tokens of the definition: same document, up to itself, inside the window."""
    pairs = set()
    begins = {*layout.documents, *(segment.start for segment in layout.segments if segment.start < segment.stop)}
    for segment in layout.segments:
        first = segment.start
        for query in range(segment.start, segment.stop):
            first = query if query in begins else first
            reach = max(first, query - layout.window + 1) if layout.window else first
            pairs |= {(query, key) for key in range(reach, query + 1)}
    return pairs


def check(layout: GroupLayout) -> tuple[list[TokenLayout], list[Counter[tuple[int, int]]]]:
    token_layouts, worked = carry_out(layout)
    for part in range(layout.ulysses):
        total: Counter[tuple[int, int]] = Counter()
        for ring_rank in range(len(layout.local_runs) // layout.ulysses):
            total.update(worked[ring_rank * layout.ulysses + part])
        assert PADDING not in {token for pair in total for token in pair}
        assert total.keys() == wanted(layout)
        assert set(total.values()) <= {1}, "worked on twice"
    return token_layouts, worked


@st.composite
def layouts(draw: st.DrawFn) -> GroupLayout:
    ulysses, num_ring_ranks = draw(st.integers(1, 3)), draw(st.integers(1, 8))
    lengths = draw(st.lists(st.integers(0, 90), min_size=1, max_size=6))
    gaps = draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))
    ends = accumulate(length + gap for length, gap in zip(lengths, gaps, strict=True))
    starts = [end - length for end, length in zip(ends, lengths, strict=True)]
    segments = []
    for start, length in draw(st.permutations(list(zip(starts, lengths, strict=True)))):
        shape = tuple(draw(st.lists(st.integers(1, 4), max_size=3)))
        while math.prod(shape) > num_ring_ranks:
            shape = shape[:-1]
        degree = math.prod(shape)
        ring_ranks = tuple(draw(st.permutations(range(num_ring_ranks)))[:degree])
        num_chunks = 1 if degree == 1 else 2 * degree
        chunk = draw(st.sampled_from([0, -(-length // num_chunks) + draw(st.integers(1, 3))]))
        segments.append(Segment(start, start + length, ring_ranks, shape, chunk))
    tokens = [(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    nothing = draw(st.integers(0, 90))
    segments.append(Segment(nothing, nothing, (0,)))
    num_members = ulysses * num_ring_ranks
    cuts = sorted(draw(st.lists(st.integers(0, sum(lengths)), min_size=num_members - 1, max_size=num_members - 1)))
    bounds = [0, *cuts, sum(lengths)]
    order = draw(st.permutations(range(num_members)))
    held = [cut_runs(tokens, bounds[at], bounds[at + 1])[:: draw(st.sampled_from([1, -1]))] for at in order]
    held[0] += ((nothing, nothing),)
    end = tokens[-1][1]
    return GroupLayout(
        segments=tuple(segments),
        documents=tuple(sorted(draw(st.sets(st.integers(0, max(end - 1, 0)), max_size=20)))),
        local_runs=tuple(held),
        ulysses=ulysses,
        num_local_tokens=max(num_rows(runs) for runs in held) + draw(st.integers(0, 2)),
        num_attention_tokens=draw(st.sampled_from([0, 0, 150])),
        window=draw(st.sampled_from([0, 0, 1, 7, 40, 70])),
    )


@settings(max_examples=40, deadline=None)
@given(layout=layouts())
def test_every_query_meets_every_key_it_sees_once(layout: GroupLayout) -> None:
    check(layout)


@settings(max_examples=10, deadline=None)
@given(
    lengths=st.lists(st.sampled_from([1, 5, 30, 80, 200]), min_size=1, max_size=10),
    degrees=st.sampled_from([(2,), (2, 2), (3, 2), (2, 1, 2)]),
    ulysses=st.integers(1, 2),
    window=st.sampled_from([0, 50]),
)
def test_what_is_assigned_by_cost_is_carried_out(
    lengths: list[int], degrees: tuple[int, ...], ulysses: int, window: int
) -> None:
    links = tuple(Link(bytes_per_s=1e9, latency_s=1e-9) for _ in degrees)
    cost = WorkCost(links=links, pair_s=1e-8, key_bytes=8, query_bytes=8, window=window)
    tokens, num_members = sum(lengths), math.prod(degrees) * ulysses
    num_local_tokens = -(-tokens // num_members)
    held = [
        cut_runs([(0, tokens)], member * num_local_tokens, (member + 1) * num_local_tokens)
        for member in range(num_members)
    ]
    segments = assign(lengths, degrees, cost, tokens + 2 * num_members).segments
    check(
        GroupLayout(
            segments=segments,
            documents=(),
            local_runs=tuple(held),
            ulysses=ulysses,
            num_local_tokens=num_local_tokens,
            window=window,
        )
    )


@pytest.mark.parametrize("window", [1, 63, 64, 65, 99])
def test_a_document_is_cut_at_its_window(window: int) -> None:
    bounds = list(accumulate((200, 64, 65, 99, 100, 30, 30), initial=0))
    segments = (Segment(0, bounds[-1], (0,)),)
    held = (((0, bounds[-1]),),)
    check(
        GroupLayout(
            segments=segments,
            documents=tuple(bounds),
            local_runs=held,
            ulysses=1,
            num_local_tokens=bounds[-1],
            window=window,
        )
    )


@pytest.mark.parametrize("shape", [(4,), (2, 3), (3, 1, 2), (2, 2, 3)])
def test_a_step_of_a_ring_goes_over_one_degree(shape: tuple[int, ...]) -> None:
    num_ring_ranks = math.prod(shape)
    strides = list(accumulate(shape, operator.mul, initial=1))
    for index in range(num_ring_ranks):
        steps = route(shape, index)
        assert sorted(step.source for step in steps[:-1]) == list(range(num_ring_ranks))
        for number, step in enumerate(steps[1:-1], 1):
            at, to = (
                [other // stride % degree for stride, degree in zip(strides, shape, strict=False)]
                for other in (index, step.to)
            )
            moved = max(ring_rank for ring_rank, stride in enumerate(strides[:-1]) if number % stride == 0)
            assert [(one + (ring_rank == moved)) % shape[ring_rank] for ring_rank, one in enumerate(at)] == to


def static_case(
    node: tuple[int, int], system: tuple[int, int], micro_batch: int, sequence: int
) -> tuple[Plan, Mesh, ContextGroup]:
    """Return a plan, and its pool, of (ulysses, ring) on a node and a system, and two data ranks beyond."""
    sizes = (node[0] * node[1], system[0] * system[1])
    mapping = {
        name: {"context": {"ulysses": ulysses, "ring": ring}}
        for name, (ulysses, ring) in (("node", node), ("system", system))
    }
    plan = Plan(params="device", grads="device", optimizer="device", mapping=mapping, micro_batch=micro_batch)
    mesh = Mesh(tuple((1, 1, ulysses, ring, 1, 1, 1) for ulysses, ring in (node, system)))
    at = {mesh_key(mesh, rank): rank for rank in range(sizes[0] * sizes[1])}
    return (
        plan,
        mesh,
        ContextGroup(tuple(at[key] for key in sorted(at)), node[0] * system[0], (node[1], system[1]), sizes),
    )


def mesh_key(mesh: Mesh, rank: int) -> tuple[int, ...]:
    """Return what members are sorted by: places over the tiers, innermost fastest, then parts alike."""
    return (*reversed(mesh.coordinates(rank, ["ring"])), *reversed(mesh.coordinates(rank, ["ulysses"])))


STATIC = [
    ((1, 1), (1, 1), 1, 12),
    ((2, 1), (1, 1), 3, 5),
    ((1, 2), (1, 1), 2, 13),
    ((2, 1), (1, 2), 3, 21),
    ((2, 2), (1, 2), 2, 50),
    ((1, 3), (1, 2), 1, 31),
    ((1, 8), (1, 1), 1, 3),
    ((2, 1), (2, 3), 1, 40),
]


@pytest.mark.parametrize(("node", "system", "micro_batch", "sequence"), STATIC)
@pytest.mark.parametrize("window", [0, 9])
def test_a_static_spread_sends_as_much_everywhere(
    node: tuple[int, int], system: tuple[int, int], micro_batch: int, sequence: int, window: int
) -> None:
    plan, mesh, group = static_case(node, system, micro_batch, sequence)
    documents = sorted({*range(0, micro_batch * sequence, sequence), *range(4, micro_batch * sequence, 11)})
    token_layouts, _ = check(static_group_layout(plan, mesh, sequence, window, documents))
    ring, ulysses, held = mesh.total("ring"), mesh.total("ulysses"), local_tokens(plan, mesh, sequence)
    for one in token_layouts:
        rows = sent_rows(one, group)
        assert (one.num_local_tokens, one.num_attention_tokens, len(one.rounds)) == (held, ulysses * held, ring)
        assert sum(rows.into) == sum(rows.back) == (ulysses - 1) * held
        chunks = micro_batch * -(-sequence // (2 * ring)) * 2
        assert sum(rows.ring) == (ring - 1) * chunks
        assert rows.ring == (sum(rows.ring) - (system[1] - 1) * chunks, (system[1] - 1) * chunks)
        assert sum(rows.return_gradients) == (chunks if ring > 1 else 0)
        assert sum(rows.gradients) == max(0, ring - 2) * chunks
        sizes = [{num_rows(runs) for _, runs in round_.exchange.sends} for round_ in one.rounds[1:]]
        assert all(size == {chunks} for size in sizes)


def test_work_of_a_causal_ring_is_even_and_one_call_a_round() -> None:
    plan, mesh, _ = static_case((1, 4), (1, 2), 1, 160)
    token_layouts, worked = check(static_group_layout(plan, mesh, 160, 0, [0]))
    work = [counter.total() for counter in worked]
    assert max(work) - min(work) <= 10 * 10  # a chunk by itself
    for one in token_layouts:
        assert [len(round_.pairs) for round_ in one.rounds[1:]] == [1] * 7
        assert all(pair.kind is PairKind.FULL for round_ in one.rounds[1:] for pair in round_.pairs)
        causal = [pair.kind for pair in one.rounds[0].pairs]
        assert len(causal) == (1 if one.member == 7 else 2)


def test_short_neighbours_share_a_call_and_keys_out_of_reach_are_dropped() -> None:
    segments = [Segment(start, stop, (0,)) for start, stop in pairwise((0, 20, 40, 60, 80, 100, 180))]
    layout = GroupLayout(
        segments=tuple(segments), documents=(), local_runs=(((0, 180),),), ulysses=1, num_local_tokens=180
    )
    pairs = check(layout)[0][0].rounds[0].pairs
    assert [(pair.queries, pair.kind) for pair in pairs] == [
        ((0, 60), PairKind.MASK),
        ((60, 100), PairKind.MASK),
        ((100, 180), PairKind.CAUSAL),
    ]
    plan, mesh, _ = static_case((1, 4), (1, 1), 1, 800)
    token_layouts, _ = check(static_group_layout(plan, mesh, 800, 50, [0]))
    assert (
        sum(num_rows((pair.keys,)) for one in token_layouts for round_ in one.rounds[1:] for pair in round_.pairs)
        == 6 * 49
    )


def test_bytes_follow_the_table() -> None:
    """By hand: 2 parts, 2 places on the system, a row of 16 tokens in chunks of 4: parts hold 4 and attend to 8."""
    plan, mesh, group = static_case((2, 1), (1, 2), 1, 16)
    one = build_token_layout(static_group_layout(plan, mesh, 16, 0, [0]), 0)
    assert sent_rows(one, group) == SentRows(
        into=(4, 0), ring=(0, 8), gradients=(0, 0), return_gradients=(0, 8), back=(4, 0)
    )
    # 8 query heads and 2 key heads of 16: parts have 4 and 1; 2 bytes an item
    assert sent_bytes(one, group, Heads(8, 2, 16), FORMATS["bf16"]) == SentBytes(
        forward=(32 * 4 * (4 + 2 + 4), 32 * 8 * 2), backward=(32 * 4 * (4 + 4 + 2), 32 * 8 * 2 * 2)
    )
    few = sent_bytes(one, group, Heads(8, 1, 16), FORMATS["bf16"])
    assert few == sent_bytes(one, group, Heads(8, 2, 16), FORMATS["bf16"]), (
        "with fewer key heads than parts, each is sent one"
    )


def test_the_effort_of_a_layout_grows_with_documents_and_ranks() -> None:
    """512 documents on 64 ring ranks, and 4096 on 1024: at most 100 lines of Python for each document and rank."""
    for num_documents, num_ring_ranks in ((512, 64), (4096, 1024)):
        tokens = 1000 * num_documents
        share = tokens // num_ring_ranks
        segments = [Segment(start, start + 1000, (start // 1000 % num_ring_ranks,)) for start in range(0, tokens, 1000)]
        segments[-1] = Segment(tokens - 1000, tokens, tuple(range(num_ring_ranks)), (8, num_ring_ranks // 8))
        held = tuple(((ring_rank * share, (ring_rank + 1) * share),) for ring_rank in range(num_ring_ranks))
        layout = GroupLayout(segments=tuple(segments), documents=(), local_runs=held, ulysses=1, num_local_tokens=share)
        effort = lines_run(partial(build_token_layout, layout, num_ring_ranks // 2))
        assert effort < 100 * (num_documents + num_ring_ranks)

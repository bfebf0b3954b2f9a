"""Lengths as data: what is read, how rows are drawn, and the attention of rows against every pair counted."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terrace.base.errors import DataError
from terrace.plan.context import chunk_tokens
from terrace.sequence.lengths import DISTRIBUTIONS, Lengths, Ragged, drawn_micros, drawn_rows, read_lengths
from terrace.sequence.ragged import Loads, deal_drawn, drawn_shares, row_loads
from tests.support.balance import cost_on


def counted(row: tuple[int, ...], sequence: int, ring: int) -> list[Loads]:
    """By the definition, token by token; a query has half a pair with itself, so that L tokens have L^2 / 2."""
    chunk = chunk_tokens(sequence, ring)
    owner = [min(token // chunk, 2 * ring - 1 - token // chunk) if ring > 1 else 0 for token in range(sequence)]
    found, start = [[0.0] * 4 for _ in range(ring)], 0
    for length in row:
        for query in range(start, start + length):
            load, others = found[owner[query]], set()
            load[1] += 1
            for key in range(start, query + 1):
                if owner[key] == owner[query]:
                    load[0] += 0.5 if key == query else 1
                else:
                    load[2] += 1
                    others.add(key // chunk)
            load[3] += len(others)
        start += length
    return [Loads(*each) for each in found]


@given(st.integers(1, 4), st.lists(st.integers(1, 30), min_size=1, max_size=5))
@settings(max_examples=25, deadline=None)
def test_loads_are_those_of_every_pair(ring: int, row: list[int]) -> None:
    assert list(row_loads(tuple(row), sum(row), ring)) == counted(tuple(row), sum(row), ring)


def test_a_window_leaves_as_many_pairs_as_it_lets_see() -> None:
    (load,) = row_loads((10, 30), 40, 1, window=8)
    assert load.own_pairs == 8 * (10 - 4) + 8 * (30 - 4)


@pytest.mark.parametrize("ring", [1, 4])
def test_documents_of_whole_rows_leave_all_of_them(ring: int) -> None:
    shares = drawn_shares(Ragged(Lengths((64,), "rows"), 2), 64, 2, ring, 2, 0, (300.0, 500.0))
    assert shares.own == pytest.approx((1, 1))
    assert shares.later == pytest.approx((1, 1) if ring > 1 else (0, 0))
    assert (shares.slowest, shares.mean, shares.spread) == (1, 1, 0)


def test_few_keys_cost_more_than_their_pairs_and_meeting_rarely_evens_ranks() -> None:
    lengths = Lengths((100, 100, 100, 2500), "two kinds")
    often, rarely = (drawn_shares(Ragged(lengths, each), 4096, 1, 1, 8, 0, (0.0, 0.0)) for each in (1, 8))
    assert often.mean == pytest.approx(rarely.mean, rel=0.1)
    assert often.mean < rarely.slowest < often.slowest < 1
    slow = drawn_shares(Ragged(lengths), 4096, 1, 1, 8, 0, (400.0, 400.0))
    assert slow.mean > often.mean


def test_dealing_by_cost_evens_ranks() -> None:
    lengths = read_lengths("github", 4096)
    even = drawn_shares(Ragged(lengths), 4096, 1, 1, 8, 0, (0.0, 0.0))
    dealt = deal_drawn(lengths, 4096, (4, 2), 1, 1, 2, cost_on(2, pair_s=1e-8))
    assert dealt.mean == pytest.approx(even.mean, rel=0.1)
    assert dealt.mean <= dealt.slowest < 1.05 * dealt.mean < even.slowest
    assert dealt.wait_s > 0
    assert all(dealt.sent_bytes)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_rows_are_filled_and_the_same_again(name: str) -> None:
    rows = drawn_rows(read_lengths(name, 1000), 1000)
    assert {sum(row) for row in rows} == {1000}
    assert all(map(all, rows))
    again = drawn_micros(read_lengths(name, 1000), 1000, 3, 5)
    assert again == drawn_micros.__wrapped__(read_lengths(name, 1000), 1000, 3, 5)
    assert len(again) == 5


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "is empty"),
        (b"\n \n", "is empty"),
        (b"tokens\n12\n", "line 1: 'tokens' is no length"),
        (b"12\n0\n", "line 2: '0' is no length"),
        (b"12\n-4\n", "line 2: '-4' is no length"),
        (b"12\n1.5\n", "line 2: '1.5' is no length"),
        (b"12\n65\n", "line 2: a document of 65 tokens is longer than a sequence of 64"),
        (b"9" * 5000, "longer than a sequence"),
        (b"\xff\xfe\x00", "it is no text"),
    ],
)
def test_a_file_without_lengths_is_refused_in_a_line(tmp_path: Path, content: bytes, why: str) -> None:
    (tmp_path / "lengths.txt").write_bytes(content)
    with pytest.raises(DataError, match=why) as refused:
        read_lengths(str(tmp_path / "lengths.txt"), 64)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400


def test_a_file_is_read_line_by_line(tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text("12\n\n 64\n3", encoding="utf-8")
    assert read_lengths(str(tmp_path / "lengths.txt"), 64).documents == (12, 64, 3)
    with pytest.raises(DataError, match="did you mean 'arxiv'"):
        read_lengths("arxv", 64)

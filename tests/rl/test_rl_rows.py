"""Rows and ragged columns: all that goes in comes out, whatever is taken, split, joined or masked."""

import pickle
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from terrace.base.errors import DataError
from terrace.rl.values.ragged import Ragged, joined
from terrace.rl.values.rows import Rows, cat

Plain = list[tuple[float, list[int], object]]  # the same rows without any of this

LENGTHS = st.lists(st.integers(0, 4), min_size=1, max_size=6)


def plain_of(lengths: list[int]) -> Plain:
    return [
        (row / 2, [10 * row + token for token in range(length)], f"row {row}") for row, length in enumerate(lengths)
    ]


def rows_of(plain: Plain) -> Rows:
    ragged = Ragged.of([torch.tensor(tokens, dtype=torch.int64) for _, tokens, _ in plain])
    return Rows(
        {"score": torch.tensor([row[0] for row in plain]), "tokens": ragged, "text": tuple(r[2] for r in plain)}
    )


def read(rows: Rows) -> Plain:
    tokens = [row.tolist() for row in rows.ragged("tokens").rows()]
    return list(zip(rows.tensor("score").tolist(), tokens, rows.objects("text"), strict=True))


@settings(max_examples=30)
@given(LENGTHS, st.data())
def test_taken_split_and_joined_rows_are_the_rows_of_a_list(lengths: list[int], data: st.DataObject) -> None:
    plain = plain_of(lengths)
    rows, num = rows_of(plain), len(plain)
    chosen = data.draw(st.lists(st.integers(0, num - 1), max_size=8))
    assert read(rows.take(chosen)) == [plain[row] for row in chosen]
    assert read(rows.take(torch.tensor([row % 2 == 0 for row in range(num)]))) == plain[::2]
    assert read(rows.repeat(3)) == [row for row in plain for _ in range(3)]

    cut = sorted(data.draw(st.lists(st.integers(0, num), max_size=3)))
    bounds = list(zip([0, *cut], [*cut, num], strict=True))
    shares = rows.split([stop - start for start, stop in bounds])
    assert [read(share) for share in shares] == [plain[start:stop] for start, stop in bounds]
    assert read(cat(shares)) == plain


def test_columns_merge_and_drop() -> None:
    rows = rows_of(plain_of([2, 0, 3]))
    more = rows | Rows({"reward": torch.ones(3)})
    assert set(more.columns) == {"score", "tokens", "text", "reward"}
    assert set(more.drop("text", "score").columns) == {"tokens", "reward"}
    assert set(rows.columns) == {"score", "tokens", "text"}, "a value does not change"


def test_rows_travel_between_processes() -> None:
    plain = plain_of([2, 0, 3])
    assert read(pickle.loads(pickle.dumps(rows_of(plain)))) == plain


def test_the_given_mapping_can_change_afterwards() -> None:
    given_columns: dict[str, Tensor] = {"a": torch.zeros(2)}
    rows = Rows(given_columns)
    given_columns["b"] = torch.zeros(3)
    assert list(rows.columns) == ["a"]


@settings(max_examples=30)
@given(LENGTHS, st.data())
def test_masked_tokens_leave_and_rows_stay(lengths: list[int], data: st.DataObject) -> None:
    tokens = [row[1] for row in plain_of(lengths)]
    kept = [data.draw(st.lists(st.booleans(), min_size=len(row), max_size=len(row))) for row in tokens]
    column = Ragged.of([torch.tensor(row, dtype=torch.int64) for row in tokens])
    mask = Ragged.of([torch.tensor(row, dtype=torch.bool) for row in kept])
    expected = [
        [x for x, keep in zip(row, keeps, strict=True) if keep] for row, keeps in zip(tokens, kept, strict=True)
    ]
    assert [row.tolist() for row in column.kept(mask).rows()] == expected


def test_sums_and_spread_of_rows() -> None:
    column = Ragged(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 2, 2, 3]))
    assert column.sums().tolist() == [3.0, 0.0, 4.0]
    assert column.spread(torch.tensor([5.0, 6.0, 7.0])).values.tolist() == [5.0, 5.0, 7.0]
    assert column.lengths.tolist() == [2, 0, 1]


def test_values_may_have_dims_behind_the_token() -> None:
    column = Ragged(torch.arange(6.0).view(3, 2), torch.tensor([0, 1, 3]))
    assert column.take(torch.tensor([1, 0])).values.tolist() == [[2, 3], [4, 5], [0, 1]]
    assert joined([column, column]).sums().tolist() == [[0, 1], [6, 8], [0, 1], [6, 8]]


ROWS = rows_of(plain_of([2, 0, 3]))
RAGGED = ROWS.ragged("tokens")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Rows({}), "rows without columns"),
        (lambda: Rows({"a": torch.zeros(2), "b": ("x",)}), "a 2, b 1; all need the same"),
        (lambda: Rows({"a": [1, 2]}), "column 'a' is a list: must be a tensor"),  # type: ignore[dict-item]
        (lambda: Rows({"a": torch.tensor(1.0)}), "'a' is a tensor without dims"),
        (lambda: ROWS.tensor("text"), "'text' is a tuple, not a tensor"),
        (lambda: ROWS.ragged("score"), "'score' is a tensor, not a ragged column"),
        (lambda: ROWS.objects("tokens"), "'tokens' is a Ragged, not a tuple"),
        (lambda: ROWS.drop("reward"), "no column 'reward': there are score, tokens, text"),
        (lambda: ROWS | ROWS, "'score' is in both"),
        (lambda: ROWS | Rows({"reward": torch.zeros(2)}), "reward 2; all need the same"),
        (lambda: ROWS.take([0, 3]), "row 3 of 3 rows: numbers go from 0 to 2"),
        (lambda: ROWS.take([-1]), "row -1 of 3 rows"),
        (lambda: ROWS.take(torch.tensor([True, False])), "rows to take of dtype torch.bool"),
        (lambda: ROWS.take(torch.tensor([0.5])), "rows to take of dtype torch.float32"),
        (lambda: ROWS.split([1, 1]), r"sizes \[1, 1\] for 3 rows: must be 0 or more, and add up to 3"),
        (lambda: ROWS.split([4, -1]), "must be 0 or more"),
        (lambda: ROWS.repeat(0), "repeated 0 times"),
        (lambda: cat([]), "no rows to join"),
        (lambda: cat([ROWS, ROWS.drop("text")]), "columns score, tokens beside score, tokens, text"),
        (lambda: cat([Rows({"a": torch.zeros(1)}), Rows({"a": ("x",)})]), "'a' is tensor in one part and tuple in"),
        (lambda: cat([Rows({"a": torch.zeros(1)}), Rows({"a": torch.zeros(1).double()})]), "'a' is torch.float32"),
        (lambda: cat([Rows({"a": torch.zeros(1)}), Rows({"a": torch.zeros(1, 2)})]), r"\(\) by row in one part and"),
        (lambda: Ragged(torch.zeros(2), torch.tensor([0, 1])), "offsets from 0 to 1 over values of shape"),
        (lambda: Ragged(torch.zeros(2), torch.tensor([0, 3, 2])), "must ascend from 0"),
        (lambda: Ragged(torch.zeros(2), torch.tensor([1, 2])), "offsets from 1"),
        (lambda: Ragged(torch.zeros(2), torch.tensor([0.0, 2.0])), "must be int64"),
        (lambda: Ragged.of([]), "no rows to join"),
        (lambda: RAGGED.spread(torch.zeros(2)), "lengths of shape"),
        (lambda: RAGGED.kept(RAGGED), "a mask of dtype torch.int64"),
        (lambda: RAGGED.kept(Ragged(torch.ones(5).bool(), torch.tensor([0, 3, 5]))), "with the same lengths"),
    ],
)
def test_wrong_rows_are_refused_in_one_line(wrong: Callable[[], object], message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        wrong()
    assert "\n" not in str(caught.value)

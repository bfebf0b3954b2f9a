"""Documents kept apart: positions and labels by their plain definition, and whole documents packed tightly."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from terrace.base.errors import DataError
from terrace.data.documents import Documents, Ids
from terrace.data.packing import best_fit, pack, packed
from terrace.data.samples import IGNORED, Packed, Windows


def documents(lengths: list[int], mask: list[int] | None = None) -> Documents:
    """Documents of these lengths; no two tokens are alike."""
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
    ids = np.arange(100, 100 + sum(lengths)).astype(np.uint16)
    return Documents("data", ids, starts, None if mask is None else np.array(mask, dtype=np.uint8))


def trained_parts(positions: list[int], labels: list[int]) -> tuple[tuple[int, int], ...]:
    """The documents of a row that have a label, by their definition."""
    begins = [*(at for at, position in enumerate(positions) if position == 0), len(positions)]
    return tuple((a, b) for a, b in pairwise(begins) if any(label != IGNORED for label in labels[a:b]))


def rows_of(samples: Windows | Packed, sequence: int, numbers: Ids) -> tuple[Ids, Ids, Ids]:
    """Inputs, labels and positions, each (n, sequence), of the rows of samples `numbers`."""
    inputs, labels, positions = np.full((3, len(numbers), sequence), 7)  # what was there before
    for row, sample in enumerate(numbers.tolist()):
        samples.fill(sample, inputs[row], labels[row], positions[row])
    return inputs, labels, positions


@given(st.lists(st.integers(1, 12), min_size=1, max_size=20), st.integers(1, 9), st.randoms())
def test_windows_by_their_definition(lengths: list[int], sequence: int, random: object) -> None:
    total = sum(lengths)
    if total < sequence + 1:
        return
    mask = [int(random.random() < 0.5) for _ in range(total)]  # type: ignore[attr-defined]
    corpus = documents(lengths, mask)
    windows = Windows(corpus, sequence, separate=True)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    inputs, labels, positions = rows_of(windows, sequence, np.arange(windows.num_samples))
    for row in range(windows.num_samples):
        for column in range(sequence):
            at = row * sequence + column
            assert inputs[row, column] == 100 + at
            goes_on = owner[at + 1] == owner[at] and mask[at + 1]
            assert labels[row, column] == (101 + at if goes_on else IGNORED)
            first = max(int(corpus.starts[owner[at]]), row * sequence)
            assert positions[row, column] == at - first
    parts = windows.parts(np.arange(windows.num_samples))
    assert parts == list(map(trained_parts, positions.tolist(), labels.tolist()))
    whole = Windows(corpus, sequence, separate=False)
    joined, joined_labels, counted = rows_of(whole, sequence, np.arange(windows.num_samples))
    assert (counted == np.arange(sequence)).all()
    assert np.array_equal(joined, inputs)
    expected = np.where(np.array(mask)[1 : 1 + joined.size].reshape(joined.shape) == 1, joined + 1, IGNORED)
    assert np.array_equal(joined_labels, expected)
    assert whole.parts(np.arange(windows.num_samples)) == [
        ((0, sequence),) * bool((row != IGNORED).any()) for row in expected
    ]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.sampled_from(["cut", "split", "drop"]))
def test_whole_documents_by_their_definition(lengths: list[int], too_long: str) -> None:
    sequence, corpus = 16, documents(lengths)
    expected: list[tuple[list[int], list[int]]] = []  # (inputs, labels) of every segment
    for start, length in zip(corpus.starts.tolist(), lengths, strict=True):
        tokens = list(range(100 + start, 100 + start + length))
        if length - 1 > sequence:
            parts = {
                "cut": [tokens[: sequence + 1]],
                "split": [tokens[at : at + sequence + 1] for at in range(0, length - 1, sequence)],
                "drop": [],
            }[too_long]
        else:
            parts = [tokens]
        expected += [(part[:-1], part[1:]) for part in parts if len(part) > 1]
    if not expected:
        with pytest.raises(DataError, match="has no token to train on"):
            pack(corpus, sequence, too_long)  # type: ignore[arg-type]
        return
    packing = pack(corpus, sequence, too_long)  # type: ignore[arg-type]
    samples = Packed(corpus, sequence, packing)
    order = np.random.default_rng(0).permutation(samples.num_samples)
    inputs, labels, positions = rows_of(samples, sequence, order)
    assert samples.parts(order) == list(map(trained_parts, positions.tolist(), labels.tolist()))
    found = []
    for row in range(len(order)):
        begins = [*np.flatnonzero(positions[row] == 0).tolist(), sequence]
        for first, last in pairwise(begins):
            assert positions[row, first:last].tolist() == list(range(last - first))
            if labels[row, first] == IGNORED:  # padding: nothing of it has a label, and nothing comes after
                assert (labels[row, first:] == IGNORED).all()
                assert last == sequence
            else:
                found.append((inputs[row, first:last].tolist(), labels[row, first:last].tolist()))
    assert sorted(found) == sorted(expected)
    assert packing.tally.num_positions == sum(len(part) for part, _ in expected)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=200))
def test_best_fit_is_what_one_document_after_the_other_gives(lengths: list[int]) -> None:
    """The same numbers of documents of each length stand together as under the plain rule."""
    capacity = 20
    plain: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        fitting = [one for one in plain if sum(one) + length <= capacity]
        if not fitting:
            plain.append(fitting_one := [])
        else:
            fitting_one = max(fitting, key=sum)
        fitting_one.append(length)
    items, offsets = best_fit(np.array(lengths), capacity)
    assert sorted(items.tolist()) == list(range(len(lengths)))
    rows = [np.array(lengths)[items[a:b]].tolist() for a, b in pairwise(offsets)]
    assert sorted(rows) == sorted(plain)


def test_many_documents_are_packed_at_once() -> None:
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.geometric(1 / 300, size=300_000), 2048)
    items, offsets = best_fit(lengths, 2048)
    sums = np.add.reduceat(lengths[items], offsets[:-1])
    assert sums.max() <= 2048
    assert 1 - sums.sum() / (len(sums) * 2048) < 0.001  # what is padding
    # The last sequences are like the first: none of the order by length is left.
    means = [part.mean() for part in np.array_split(np.diff(offsets).astype(float), 10)]
    assert max(means) < 1.25 * min(means)


def test_a_masked_document_has_nothing_to_train_on() -> None:
    lengths, mask = [4, 3, 5], [1, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1]
    packing = pack(documents(lengths, mask), 8, "refuse")
    assert packing.tally.num_untrained == 1  # the first: its one trained token is never a label
    assert sorted(packing.starts.tolist()) == [4, 7]
    with pytest.raises(DataError, match=r"of 3 documents 0 are longer .* and 3 have no trained token"):
        pack(documents(lengths, [0] * 12), 8, "refuse")
    cut = pack(documents([6, 3], [0, 0, 0, 0, 1, 1, 0, 1, 1]), 3, "cut")
    assert (cut.tally.num_too_long, cut.tally.num_untrained, cut.starts.tolist()) == (1, 1, [6])


def test_too_long_documents_are_refused_by_name() -> None:
    with pytest.raises(DataError, match=r"2 of the 4 documents .* document 2 with 9 tokens, the longest has 12"):
        pack(documents([3, 9, 8, 12]), 7, "refuse")


def test_a_packing_is_made_once_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    beside = tmp_path / "corpus-0123.tokens"
    corpus = documents([5, 9, 2, 7, 7, 3])
    made = packed(corpus, 8, "refuse", beside)
    again = packed(documents([2]), 8, "refuse", beside)  # read from the file: these documents are not looked at
    for one, two in ((made.offsets, again.offsets), (made.starts, again.starts), (made.lengths, again.lengths)):
        assert one.tolist() == two.tolist()
    assert again.tally == made.tally
    assert made.tally.waste(8) == pytest.approx(1 - 27 / (8 * made.tally.num_sequences))
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-16])
    with pytest.raises(DataError, match=r"is damaged .* delete it"):
        packed(corpus, 8, "refuse", beside)

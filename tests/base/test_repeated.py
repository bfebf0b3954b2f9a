"""A repeated sequence is the list that it stands for."""

from typing import NamedTuple

import pytest

from terrace.base.repeated import Repeated, repeated


class Item(NamedTuple):
    name: str
    micro: int = -1

    def later(self, micros: int) -> "Item":
        return self if self.micro < 0 else self._replace(micro=self.micro + micros)


def listed(num_micros: int, ahead: int = 3) -> list[Item]:
    """Forwards run `ahead` micro-batches before their backwards, which come in pairs."""
    found = [Item("begin"), *(Item("forward", micro) for micro in range(ahead))]
    for micro in range(num_micros):
        found += [Item("forward", micro + ahead)] if micro + ahead < num_micros else []
        found += [Item("backward", micro)]
        found += [Item("reduce")] if micro % 2 else []
    return [*found, Item("end")]


def test_a_repeated_sequence_is_its_list() -> None:
    found = repeated([listed(each) for each in (10, 12, 14)], 2)
    assert found is not None
    for repeats in range(7):
        sequence, whole = found.times(repeats), listed(10 + 2 * repeats)
        assert list(sequence) == whole
        assert len(sequence) == len(whole)
        assert [sequence[place] for place in range(-len(whole), len(whole))] == whole + whole
        assert (sequence[3:-2], sequence[::-3], sequence[:99]) == (tuple(whole[3:-2]), tuple(whole[::-3]), tuple(whole))
        for outside in (len(whole), -len(whole) - 1):
            with pytest.raises(IndexError):
                sequence[outside]


def test_equal_sequences_are_equal_and_can_be_keys() -> None:
    first, second = (repeated([listed(each) for each in (10, 12, 14)], 2) for _ in range(2))
    assert first == second
    assert isinstance(first, Repeated)
    assert hash(first) == hash(second)
    assert first != first.times(5)


@pytest.mark.parametrize(
    "steps",
    [
        [listed(10), listed(10), listed(10)],  # nothing is added
        [listed(10), listed(11), listed(12)],  # a body of one has no place for the reduction of every second
        [listed(10), listed(12), listed(12)],
        [listed(10), listed(12), [*listed(14)[:-1], Item("stop")]],
        [listed(2), listed(4), listed(6)],  # too short: the ends meet
        [[], [Item("forward", 0)], [Item("forward", 0)] * 2],
    ],
)
def test_no_body_is_found_where_there_is_none(steps: list[list[Item]]) -> None:
    every = 1 if len(steps[1]) - len(steps[0]) < 3 else 2
    assert repeated(steps, every) is None

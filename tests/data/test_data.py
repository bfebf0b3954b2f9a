"""Order and batches: every sample once an epoch, the same global batch on any number of ranks."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from terrace.base.errors import DataError
from terrace.data.batches import Batches
from terrace.data.order import SampleOrder
from terrace.data.token_file import TokenFile
from terrace.data.tokenizer import ByteTokenizer
from terrace.data.tokens import prepare_tokens
from tests.support.nightly import in_turns, nightly


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> TokenFile:
    """A file of 1009 tokens that all can be told apart by their neighbours."""
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    (folder / "data.txt").write_bytes(rng.integers(32, 127, size=1008, dtype=np.uint8).tobytes())
    return prepare_tokens(folder / "data.txt", ByteTokenizer(), folder / "cache")


def epoch_of(order: SampleOrder, epoch: int) -> list[int]:
    start = epoch * order.num_samples
    return [int(sample) for sample in order.sample(np.arange(start, start + order.num_samples))]


@given(st.integers(1, 300), st.integers(), st.integers(0, 10**6))
def test_every_epoch_is_a_permutation(num_samples: int, seed: int, epoch: int) -> None:
    order = SampleOrder(num_samples, seed)
    assert sorted(epoch_of(order, epoch)) == list(range(num_samples))
    assert epoch_of(order, epoch) == epoch_of(SampleOrder(num_samples, seed), epoch)


@pytest.mark.parametrize("num_samples", [1, 2, 3, 4, 5, 7, 8, 9, 127, 128, 129, 65_535, 65_536, 65_537])
def test_permutation_at_the_edges_of_powers_of_two(num_samples: int) -> None:
    assert sorted(epoch_of(SampleOrder(num_samples, 3), 1)) == list(range(num_samples))


def test_epochs_and_seeds_differ() -> None:
    orders = {tuple(epoch_of(SampleOrder(50, seed), epoch)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25
    assert tuple(range(50)) not in orders


def test_sources_of_one_size_have_orders_of_their_own() -> None:
    """Two sources would else meet document by document in every batch: translations, or a corpus in two forms."""
    first, second = (np.array(epoch_of(SampleOrder(500, 7, source), 0)) for source in (0, 1))
    assert sorted(second) == list(range(500))
    assert (first == second).sum() < 8  # one is expected
    assert epoch_of(SampleOrder(500, 7, 0), 0) == epoch_of(SampleOrder(500, 7), 0)


def test_one_call_may_span_epochs_and_have_any_shape() -> None:
    order = SampleOrder(7, 0)
    flat = order.sample(np.arange(21))
    assert flat.tolist() == epoch_of(order, 0) + epoch_of(order, 1) + epoch_of(order, 2)
    assert order.sample(np.arange(21).reshape(3, 7)).tolist() == flat.reshape(3, 7).tolist()
    assert order.sample(np.array([], dtype=np.int64)).shape == (0,)


@pytest.mark.parametrize("num_samples", [2, 5, *nightly(3, 10)])
def test_order_favours_no_sample(num_samples: int) -> None:
    """Each (position, sample) pair is as frequent as chance has it, over 4000 epochs."""
    order, num_epochs = SampleOrder(num_samples, 1), 4000
    drawn = order.sample(np.arange(num_epochs * num_samples)).reshape(num_epochs, num_samples)
    expected = num_epochs / num_samples
    for position in range(num_samples):
        counts = np.bincount(drawn[:, position], minlength=num_samples)
        # Six standard deviations of a binomial: chance fails this about once in 10^8.
        assert np.abs(counts - expected).max() < 6 * np.sqrt(expected)


def test_neighbours_in_the_order_are_not_neighbours_in_the_data() -> None:
    drawn = np.array(epoch_of(SampleOrder(10_000, 0), 0))
    steps = np.abs(np.diff(drawn))
    assert (steps <= 10).mean() < 0.01  # 0.2% by chance
    assert abs(steps.mean() / 10_000 - 1 / 3) < 0.02
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.05


def test_order_works_far_into_a_large_run() -> None:
    order = SampleOrder(10**12 + 39, 0)
    drawn = order.sample(np.arange(10**15, 10**15 + 1000))
    assert drawn.min() >= 0
    assert drawn.max() < 10**12 + 39
    assert len(set(drawn.tolist())) == 1000


def test_order_is_pinned() -> None:
    """A run that resumes under a newer version must see the same samples: this list may never change."""
    assert SampleOrder(10, 42).sample(np.arange(12)).tolist() == [4, 2, 1, 9, 8, 0, 5, 3, 7, 6, 7, 1]
    far = SampleOrder(10**6, 42).sample(np.arange(10**7, 10**7 + 4))
    assert far.tolist() == [99450, 264005, 381353, 713361]


def test_order_refuses_no_samples() -> None:
    with pytest.raises(DataError, match=r"num_samples = 0 must be at least 1"):
        SampleOrder(0, 0)


def test_windows_are_consecutive_and_labels_are_shifted(tokens: TokenFile) -> None:
    ids = np.array(tokens.open()).astype(np.int64)
    batches = Batches(tokens, sequence=9, batch=112, seed=5)
    assert batches.num_samples == 112  # 1008 / 9: the last token is a label only
    inputs, labels = batches.rows(0, np.arange(batches.batch))
    assert inputs.shape == labels.shape == (112, 9)
    assert inputs.dtype == labels.dtype == np.int64
    assert inputs.flags.c_contiguous
    assert labels.flags.c_contiguous
    order = SampleOrder(112, 5).sample(np.arange(112))
    for row, sample in enumerate(order):
        assert inputs[row].tolist() == ids[sample * 9 : sample * 9 + 9].tolist()
        assert labels[row].tolist() == ids[sample * 9 + 1 : sample * 9 + 10].tolist()
    # One epoch: every token but the first is a label once.
    assert sorted(labels.ravel().tolist()) == sorted(ids[1:].tolist())


@pytest.mark.parametrize(("micro_batch", "num_data_ranks"), in_turns(6, (2, 1), (4, 2, 1, 8, 6, 3)))
def test_micro_batches_make_up_the_global_batch(tokens: TokenFile, num_data_ranks: int, micro_batch: int) -> None:
    batches = Batches(tokens, sequence=16, batch=48, seed=0)
    # Steps 85 and 86 of one rank are placed apart; 1 is gone back to.
    for step in (0, 1, 7, 85, 86, 1):
        of_ranks = [batches.micro_batches(step, rank, num_data_ranks, micro_batch) for rank in range(num_data_ranks)]
        parts = [arrays for micro in zip(*of_ranks, strict=True) for arrays in micro]
        assert all(array.flags.c_contiguous and array.shape == (micro_batch, 16) for part in parts for array in part)
        inputs, labels = batches.rows(step, np.arange(batches.batch))
        assert np.array_equal(np.concatenate([part[0] for part in parts]), inputs)
        assert np.array_equal(np.concatenate([part[1] for part in parts]), labels)


def test_any_step_can_be_had_at_once(tokens: TokenFile, monkeypatch: pytest.MonkeyPatch) -> None:
    walked = Batches(tokens, sequence=16, batch=5, seed=0)
    for step in range(40):
        last = walked.rows(step, np.arange(walked.batch))
    asked: list[list[int]] = []
    original = SampleOrder.sample

    def spy(self: SampleOrder, positions: np.ndarray[tuple[int], np.dtype[np.int64]]) -> object:
        asked.append(positions.tolist())
        return original(self, positions)

    monkeypatch.setattr(SampleOrder, "sample", spy)
    resumed = Batches(tokens, sequence=16, batch=5, seed=0).rows(39, np.arange(5))
    assert np.array_equal(resumed[0], last[0])
    assert np.array_equal(resumed[1], last[1])
    assert asked == [[195, 196, 197, 198, 199]]


def test_a_batch_may_be_larger_than_the_data(tokens: TokenFile) -> None:
    inputs, _ = Batches(tokens, sequence=400, batch=6, seed=0).rows(0, np.arange(6))
    assert len({row.tobytes() for row in inputs}) == 2
    assert {row.tobytes() for row in inputs[:2]} == {row.tobytes() for row in inputs[2:4]}


def test_holdout_is_never_trained_on(tokens: TokenFile) -> None:
    batches = Batches(tokens, sequence=16, batch=10, seed=0, holdout=3)
    assert (batches.num_samples, batches.num_holdout_samples) == (60, 3)
    held, held_labels = batches.holdout(np.arange(3))
    ids = np.array(tokens.open())
    assert held.ravel().tolist() == ids[960:1008].tolist()
    assert held_labels.ravel().tolist() == ids[961:1009].tolist()
    seen = {row.tobytes() for step in range(12) for row in batches.rows(step, np.arange(batches.batch))[0]}
    assert len(seen) == 60
    assert not seen & {row.tobytes() for row in held}
    assert np.array_equal(batches.holdout(1)[0], held[1:2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sequence": 1009}, r"has 1009 tokens, but one sample of sequence 1009 takes 1010; .* at most 1008"),
        ({"sequence": 0}, r"sequence = 0 must be at least 1"),
        ({"batch": 0}, r"batch = 0 must be at least 1"),
        ({"holdout": -1}, r"holdout = -1 must be at least 0"),
        ({"holdout": 63}, r"holdout = 63 leaves nothing .* 63 samples; hold out at most 62"),
        ({"holdout": 0.99}, r"holdout = 0.99 leaves nothing .* 63 samples; hold out at most 62"),
        ({"holdout": 1.5}, r"holdout = 1.5 is neither a share below 1 nor a whole number"),
    ],
)
def test_sizes_that_cannot_be(tokens: TokenFile, change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        Batches(tokens, **{"sequence": 16, "batch": 4, "seed": 0, **change})


def test_the_longest_sequence_makes_one_sample(tokens: TokenFile) -> None:
    assert Batches(tokens, sequence=1008, batch=1, seed=0).num_samples == 1


def test_micro_batches_that_do_not_divide_are_refused(tokens: TokenFile) -> None:
    batches = Batches(tokens, sequence=16, batch=10, seed=0)
    with pytest.raises(DataError, match=r"batch = 10 is not a multiple of num_data_ranks = 3 times micro_"):
        batches.micro_batches(0, 0, 3, 1)
    with pytest.raises(DataError, match=r"micro_batch = 0"):
        batches.micro_batches(0, 0, 1, 0)
    with pytest.raises(AssertionError, match="data_rank 5 of 5"):
        batches.micro_batches(0, 5, 5, 1)
    with pytest.raises(DataError, match="holdout sample 0 does not exist: 0 are held out"):
        batches.holdout([0])

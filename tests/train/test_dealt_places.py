"""Rows of a run that deals its members anew have the places, by which routers are told apart, of the whole batch."""

from pathlib import Path

import pytest

from terrace.data.batches import Batches, Source
from terrace.data.tokenizer import ByteTokenizer
from terrace.data.tokens import prepare_tokens
from terrace.program.lowering import build
from terrace.train.micro_batches import MicroBatches
from tests.support.parity import exact
from tests.support.toys import MODELS, cluster_of


@pytest.mark.parametrize("shares", [(2, 2), (3, 1), (1, 3)])
def test_places_follow_the_shares_of_their_step(shares: tuple[int, ...], tmp_path: Path) -> None:
    """Each row of the batch once: batches are made for steps whose shares the program does not have yet."""
    (tmp_path / "text.txt").write_text("abcdefgh" * 100)
    tokens = prepare_tokens(tmp_path / "text.txt", ByteTokenizer(), tmp_path / "cache")
    cluster = cluster_of(1, 2)
    plan = exact("ddp", cluster, micro_batch=2, shares=(2, 2))
    program = build(cluster, plan, MODELS["mixture tied"].declared, 2, sequence=16)
    batches = Batches([Source(tokens=tokens)], 16, 8, seed=0)
    seen = list[int]()
    for rank in range(2):
        made = MicroBatches(batches, program, rank, False, shares_at=lambda step: shares if step else (2, 2))
        micros = made.step(1).micros
        assert len(micros) == shares[rank]
        for micro in micros:
            assert micro.places is not None
            seen += (micro.places[:, 0] // 16).tolist()
    assert sorted(seen) == list(range(8, 16))

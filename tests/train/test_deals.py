"""The record of shares that a run has dealt: by step, on disk, and what a resume makes of it."""

from pathlib import Path

import pytest

from terrace.base.errors import CheckpointError
from terrace.train.deals import DEALS, Deals, Dealt, deals_to_resume, read_deals

FIRST, LATER = Dealt(step=0, shares=(4, 4)), Dealt(step=7, shares=(6, 2), predicted_s=0.125)


def written(folder: Path) -> None:
    deals = Deals((4, 4))
    deals.add(LATER)
    deals.write(folder)


def test_shares_hold_from_their_step_on(tmp_path: Path) -> None:
    written(tmp_path)
    assert read_deals(tmp_path) == (FIRST, LATER)
    deals = Deals((1, 7), read_deals(tmp_path))  # the file knows the first ones, too
    assert [deals.at(step) for step in (0, 6, 7, 100)] == [(4, 4), (4, 4), (6, 2), (6, 2)]
    assert Deals((1, 7)).at(3) == (1, 7)
    assert read_deals(tmp_path / "none") == ()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"step": 0, "shares": [4, 4]}\n{"step": 0, "shares": [6, 2]}\n', "do not ascend"),
        ('{"step": 3, "shares": []}\n', "names no shares"),
        ('{"step": 3, "sha', "cannot be read"),
        ('{"step": 3, "shares": [1.5]}\n', "shares"),
        ('{"step": 3, "shares": [4, 4], "crc32": "00000000"}\n', "its checksum differs"),
    ],
)
def test_a_damaged_record_is_refused_in_a_line(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / DEALS).write_text(text)
    with pytest.raises(CheckpointError, match=why) as refused:
        read_deals(tmp_path)
    assert "\n" not in str(refused.value)


def test_a_resume_repeats_what_was_dealt_unless_the_user_deals(tmp_path: Path) -> None:
    written(tmp_path)
    before = {"plan": {"shares": [4, 4]}}
    assert deals_to_resume(tmp_path, 5, before, (4, 4)) == (FIRST, LATER)
    own = Dealt(step=5, shares=(7, 1))
    assert deals_to_resume(tmp_path, 5, before, (7, 1)) == (FIRST, own)
    assert deals_to_resume(tmp_path, 9, before, (7, 1)) == (FIRST, LATER, Dealt(step=9, shares=(7, 1)))
    assert deals_to_resume(tmp_path, 9, before, (8, 8)) == ()  # smaller micro-batches
    assert deals_to_resume(tmp_path, 9, before, (4, 2, 2)) == ()  # other members
    assert deals_to_resume(tmp_path, 9, {}, (4, 4)) == ()
    for other in ((8, 8), (4, 2, 2)):  # the file of another run
        with pytest.raises(CheckpointError, match=r"has shares = \[4, 4\], of other members or micro-batches than"):
            deals_to_resume(tmp_path, 9, {"plan": {"shares": list(other)}}, other)
    (tmp_path / DEALS).unlink()
    assert deals_to_resume(tmp_path, 5, before, (4, 4)) == ()
    assert deals_to_resume(tmp_path, 5, before, (7, 1)) == (FIRST, own)

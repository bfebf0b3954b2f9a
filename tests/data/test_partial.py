"""Hidden files of a cache that others may write in: links that they plant there are not followed."""

import fcntl
import os
import stat
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from terrace.base.errors import DataError
from terrace.data.cache import Description, made_once
from terrace.data.originals import Originals
from terrace.data.partial import Noted, Partial
from terrace.data.tokenizer import ByteTokenizer
from terrace.data.tokens import prepare_tokens


def planted(folder: Path, name: str) -> Path:
    """A stranger's link by this name to a file of the user."""
    theirs = folder / f"precious-{name.strip('.')}"
    theirs.write_text("precious")
    (folder / name).symlink_to(theirs)
    return theirs


def test_a_planted_lock_is_refused_and_its_target_is_whole(tmp_path: Path) -> None:
    theirs = planted(tmp_path, ".corpus.lock")

    def refuse(_: object) -> NoReturn:
        raise AssertionError("nothing is made under a stranger's lock")

    with pytest.raises(DataError):
        made_once(tmp_path / "corpus.tokens", [".tokens"], Description, refuse, refuse, Originals("corpus", list))
    assert theirs.read_text() == "precious"


def test_the_lock_of_a_process_that_was_killed_is_cleared_and_one_that_is_held_stays(tmp_path: Path) -> None:
    text, tokenizer = tmp_path / "text.txt", ByteTokenizer()
    text.write_text("a text")
    cache = tmp_path / "cache"
    prepare_tokens(text, tokenizer, cache)
    (tokens,) = cache.glob("*.tokens")
    left = tokens.with_name(f".{tokens.stem}.lock")
    assert not left.exists()
    left.touch()
    prepare_tokens(text, tokenizer, cache)
    assert not left.exists()
    with left.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        prepare_tokens(text, tokenizer, cache)
        assert left.exists()


def test_planted_partial_files_are_replaced_and_their_targets_are_whole(tmp_path: Path) -> None:
    found = [planted(tmp_path, f".corpus.{kind}.partial") for kind in ("tokens", "starts")]
    before = os.umask(0o027)
    try:
        partial = Partial(tmp_path / "corpus.tokens", "stamp")
        partial.finish()
    finally:
        os.umask(before)
    assert [each.read_text() for each in found] == ["precious"] * 2
    for name in ("corpus.tokens", "corpus.starts"):
        assert not (tmp_path / name).is_symlink()
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o640


def _torn(folder: Path) -> list[Path]:
    """Files of a writer that was killed after its second piece."""
    partial = Partial(folder / "corpus.tokens", "stamp")
    for number in (1, 2):
        ids = np.arange(10 * number)
        partial.add(ids, ids.astype("<u2").tobytes(), ends_document=True)
        partial.note(number)
    partial.close()
    return sorted(path for path in folder.iterdir() if path.is_file())


def test_what_a_killed_writer_left_is_used_only_where_it_is_sound(tmp_path: Path) -> None:
    files = _torn(tmp_path)
    going_on = Partial(tmp_path / "corpus.tokens", "stamp")
    going_on.close()
    assert (going_on.noted.num_units, going_on.noted.num_tokens) == (2, 30)
    sound = [path.read_bytes() for path in files]
    for path, raw in zip(files, sound, strict=True):
        for place in range(len(raw)):
            for each, whole in zip(files, sound, strict=True):
                each.write_bytes(whole)
            path.write_bytes(raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :])
            partial = Partial(tmp_path / "corpus.tokens", "stamp")
            partial.close()
            # A bit of the checksum's own key leaves the values as they are.
            assert partial.noted in (Noted(stamp="stamp"), going_on.noted), (path.name, place)

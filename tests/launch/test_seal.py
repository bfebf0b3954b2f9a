"""Values of the store count only if this run wrote them; the secret is its user's alone."""

import os
import stat
from pathlib import Path

import pytest

from terrace.base.errors import ConfigError
from terrace.launch.seal import Seal, user_secret


def test_a_sealed_value_opens_with_its_secret_key_and_scope_alone() -> None:
    seal = Seal.fresh().within("life")
    closed = seal.close("job", "text: of ü")
    assert seal.open("job", closed.encode()) == "text: of ü"
    strangers = [Seal.fresh().within("life"), seal.within("other"), Seal(seal.secret, scope="ife")]
    for stranger in strangers:
        with pytest.raises(ConfigError, match="set TERRACE_SECRET"):
            stranger.open("job", closed.encode())
    for raw in (closed.replace("text", "tixt").encode(), closed[1:].encode(), b"", b":", b"\xff\xfe", b"text: of"):
        with pytest.raises(ConfigError, match="'job' in the store"):
            seal.open("job", raw)
    with pytest.raises(ConfigError):
        seal.open("jo", closed.encode())
    # No other division of scope, key and text has the same hash.
    assert Seal(b"s", scope="a").close("bc", "d")[:64] != Seal(b"s", scope="ab").close("c", "d")[:64]


def test_the_users_secret_is_made_once_and_for_its_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        made = user_secret(tmp_path / "new" / "terrace")
    finally:
        os.umask(before)
    path = tmp_path / "new" / "terrace" / "secret"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert len(made.secret) == 64
    assert user_secret(path.parent) == made
    assert str(path) == made.source


def test_a_secret_that_others_may_read_or_that_is_none_is_refused(tmp_path: Path) -> None:
    user_secret(tmp_path)
    path = tmp_path / "secret"
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="others may read"):
        user_secret(tmp_path)
    path.chmod(0o600)
    path.write_text("short")
    with pytest.raises(ConfigError, match="holds 5 bytes"):
        user_secret(tmp_path)
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="TERRACE_SECRET"):
        user_secret(tmp_path)
    with pytest.raises(ConfigError, match="TERRACE_SECRET"):
        user_secret(path / "below")

"""Checksums of text files: what was written passes, what changed does not, what others wrote passes."""

import json
import tomllib
from pathlib import Path

import pytest

from terrace.base.fitting import parse_table
from terrace.base.schema import read_table
from terrace.base.sealed import ChangedFile, is_intact_json, is_intact_toml, sealed_json, sealed_toml
from terrace.cli.main import main

TABLE = {"a": 1.5, "b": {"c": ["é", "}"]}}


@pytest.mark.parametrize("indent", [None, 1])
def test_a_flipped_bit_of_a_json_text_is_found(indent: int | None) -> None:
    text = sealed_json(json.dumps(TABLE, indent=indent, ensure_ascii=False))
    assert parse_table(text) == TABLE
    raw = text.encode()
    for place in range(len(raw)):
        for bit in range(8):
            changed = raw[:place] + bytes([raw[place] ^ 1 << bit]) + raw[place + 1 :]
            try:
                found = parse_table(changed.decode(errors="replace"))
            except ValueError:
                continue
            assert {key: found.get(key) for key in TABLE} == TABLE
    assert is_intact_json(json.dumps(TABLE)), "others write such files, too"


def test_a_flipped_bit_of_a_toml_text_is_found() -> None:
    text = sealed_toml("# a note\na = 1\n[b]\nc = 'x'\n")
    table = tomllib.loads(text)
    assert is_intact_toml(text)
    assert is_intact_toml(text.removeprefix(text.splitlines()[0]))
    raw = text.encode()
    for place in range(len(raw)):
        changed = (raw[:place] + bytes([raw[place] ^ 2]) + raw[place + 1 :]).decode(errors="replace")
        try:
            assert tomllib.loads(changed) == table or not is_intact_toml(changed)
        except tomllib.TOMLDecodeError:
            continue
    for end in range(text.index("\n") + 1, len(text)):
        assert not is_intact_toml(text[:end])


def test_a_command_says_that_a_file_of_settings_has_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.toml"
    path.write_text(sealed_toml("[train]\nsteps = 3\n"))
    read_table(path)
    words = ["simulate", "--config", str(path)]
    assert main(words) == 0
    assert capsys.readouterr().err == ""
    path.write_text(path.read_text().replace("steps = 3", "steps = 7"))
    with pytest.warns(ChangedFile, match="is not as it was written"):
        read_table(path)
    assert main(words) == 0
    fix = "if you edited it, delete its first line"
    assert capsys.readouterr().err == f"terrace: {path} is not as it was written: edited, or damaged; {fix}\n"
    path.write_text(path.read_text().partition("\n")[2])
    assert main(words) == 0
    assert capsys.readouterr().err == ""

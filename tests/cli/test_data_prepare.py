"""`terrace data prepare`: the files that it makes are those of a run."""

import json
from pathlib import Path

import pytest

from terrace.cli.main import main, parser_of
from terrace.cli.options import resolve_run
from terrace.data.prepared import prepare_sources
from terrace.data.tokenizer import ByteTokenizer
from terrace.train.config import RunConfig


def test_a_run_finds_what_was_prepared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text("".join(json.dumps({"text": "abc" * n}) + "\n" for n in range(1, 9)))
    words = ["data", "prepare", "--data", "a.jsonl", "--data.documents", "whole", "--train.sequence", "64"]
    assert main(words) == 0
    said = capsys.readouterr().out
    files = {path: path.stat().st_mtime_ns for path in Path(".terrace-cache").iterdir()}
    (tokens,) = (path for path in files if path.suffix == ".tokens")
    # Each document has 3 n bytes and an end of text.
    assert said.splitlines()[-2:] == [f"{tmp_path / 'a.jsonl'}: 116 tokens in 8 documents", f"  {tokens.absolute()}"]
    # A run names its data by their absolute path.
    asked = _config(words[2:]).data.absolute()
    (source,) = prepare_sources(asked, ByteTokenizer(), 64)
    assert source.tokens.path == tokens.absolute()
    assert {path: path.stat().st_mtime_ns for path in Path(".terrace-cache").iterdir()} == files
    assert main([*words, "--train.stepz", "3"]) == 2
    assert "stepz" in capsys.readouterr().err
    assert main(["data", "prepare", "--data", "b.jsonl"]) == 2
    assert "b.jsonl does not exist" in capsys.readouterr().err


def _config(words: list[str]) -> RunConfig:
    options, rest = parser_of().parse_known_args(["train", *words])
    return resolve_run(options, rest)

"""Data whose format nobody names: conversations are taken as such, and said; a text stays a text."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from terrace.base.errors import DataError
from terrace.cli import eval as evaluation
from terrace.data.found_format import first_record, found_format, with_formats
from terrace.data.prepared import prepare_sources
from terrace.data.tokenizer import ByteTokenizer
from terrace.train.resolve import resolve
from tests.support.chats import CHATML, write_lines

TALK = [{"role": "user", "content": "sky"}, {"role": "assistant", "content": "blue"}]
SHARED = {"conversations": [{"from": "human", "value": "sky"}, {"from": "gpt", "value": "blue"}]}
ALPACA = {"instruction": "sky", "input": "", "output": "blue"}
PAIR = {"prompt": "sky", "chosen": "blue", "rejected": "red"}
FOUND: list[tuple[dict[str, Any], str]] = [
    ({"messages": TALK}, "'messages'"),
    (SHARED, "'conversations' (ShareGPT)"),
    (ALPACA, "'instruction' and 'output' (Alpaca)"),
    ({"question": "1 + 1", "answer": "2"}, "'question' and 'answer'"),
]


@pytest.mark.parametrize(("row", "words"), FOUND, ids=[next(iter(row)) for row, _ in FOUND])
def test_conversations_are_taken_as_such_and_said(tmp_path: Path, row: dict[str, Any], words: str) -> None:
    pytest.importorskip("jinja2")
    path = write_lines(tmp_path / "chats.jsonl", [row])
    (tmp_path / "chat.jinja").write_text(CHATML)
    overrides = {"data": {"chat_template": str(tmp_path / "chat.jinja"), "cache": str(tmp_path / "cache")}}
    run = resolve(None, {"data": str(path)}, overrides)
    (spec,) = run.data.sources()
    assert (spec.format, spec.documents) == ("chat", "whole")
    lines = list[str]()
    (source,) = prepare_sources(run.data, ByteTokenizer(), 128, lines.append)
    assert lines == [f"{path} is taken as conversations: {words}"]
    said = source.tokens.open()[source.tokens.open_mask() == 1]
    assert bytes(said.tolist()).decode() in ("blue<|im_end|>\n", "2<|im_end|>\n")


def test_a_text_that_is_a_conversation_as_well_is_said(tmp_path: Path) -> None:
    lines = list[str]()
    for name, more in (("a", {"messages": TALK}), ("b", ALPACA), ("c", {"id": 3}), ("d", {"text": "### Human: sky"})):
        path = str(write_lines(tmp_path / f"{name}.jsonl", [{"text": "a long text of ours"} | more]))
        run = resolve(None, {"data": path}, {"data": {"cache": str(tmp_path / "cache")}})
        assert [spec.format for spec in run.data.sources()] == ["text"]
        prepare_sources(run.data, ByteTokenizer(), 4, lines.append)
    assert [line.partition(" is taken as ")[2] for line in lines] == [
        "text, by its key 'text'; with data.format = \"chat\" as conversations: 'messages'",
        "text, by its key 'text'; with data.format = \"chat\" as conversations: 'instruction' and 'output' (Alpaca)",
    ]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"messages": TALK}, {"text": "a"}], r"a.jsonl:2 has no form of a conversation \(keys: 'text'\)"),
        ([ALPACA, {"body": "a"}], r"a.jsonl:2 has no form of a conversation \(keys: 'body'\)"),
        ([{"text": "a"}, {"messages": TALK}], r"a.jsonl:2 is a conversation by its key 'messages', and texts are read"),
        ([{"text": "a"}, SHARED], r"a.jsonl:2 is a conversation by its key 'conversations', .*keep one kind"),
    ],
)
def test_a_file_of_two_kinds_is_refused_by_its_row(tmp_path: Path, rows: list[dict[str, Any]], said: str) -> None:
    pytest.importorskip("jinja2")
    path = write_lines(tmp_path / "a.jsonl", rows)
    (tmp_path / "chat.jinja").write_text(CHATML)
    template = {"chat_template": str(tmp_path / "chat.jinja")} if "text" not in rows[0] else {}
    run = resolve(None, {"data": str(path)}, {"data": {"cache": str(tmp_path / "cache"), **template}})
    with pytest.raises(DataError, match=said):
        prepare_sources(run.data, ByteTokenizer(), 128)


@pytest.mark.parametrize(
    ("row", "on_pairs", "found"),
    [
        ({"text": "a", "messages": TALK}, False, "text"),
        ({"text": None, "messages": TALK}, False, "chat"),
        ({"body": "a"}, False, "text"),
        (PAIR, False, "pairs"),
        ({**PAIR, "messages": TALK}, False, "chat"),  # of ultrafeedback, which has both
        ({**PAIR, "messages": TALK}, True, "pairs"),
        ({"prompt": "a", "completion": "b"}, False, "chat"),
    ],
)
def test_the_first_record_tells(tmp_path: Path, row: dict[str, Any], on_pairs: bool, found: str) -> None:
    assert found_format(write_lines(tmp_path / "a.jsonl", [row]), on_pairs=on_pairs) == found
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "a.parquet")
    assert found_format(tmp_path / "a.parquet", on_pairs=on_pairs) == found


def test_a_file_that_cannot_be_told_is_left_to_its_reader(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"messages": \n')
    (tmp_path / "a.txt").write_text('{"messages": []}\n')
    (tmp_path / "marked.jsonl").write_text("\ufeff" + json.dumps(SHARED), encoding="utf-8")
    assert [found_format(tmp_path / name) for name in ("a.jsonl", "a.txt", "none.jsonl")] == ["text"] * 3
    assert found_format(tmp_path / "marked.jsonl") == "chat"
    assert first_record("stdlib") == {}


def test_what_a_user_says_stays(tmp_path: Path) -> None:
    talks = str(write_lines(tmp_path / "a.jsonl", [{"messages": TALK}]))
    text = str(write_lines(tmp_path / "b.jsonl", [{"text": "a"}]))
    for data in ({"path": talks, "format": "text"}, {"path": talks, "column": "id"}, {"path": text}, 3):
        assert with_formats(data) == data
    assert with_formats({"mixture": [{"path": talks}, {"path": text}, {"path": talks, "column": "id"}]})["mixture"] == [
        {"path": talks, "format": "chat"},
        {"path": text},
        {"path": talks, "column": "id"},
    ]
    # A source that is only evaluated has the format of the section unless it names one.
    evaluated = with_formats({"path": talks, "eval": {"one": text, "two": {"path": talks}}})
    assert evaluated["format"] == "chat"
    assert evaluated["eval"] == {"one": {"path": text, "format": "text"}, "two": {"path": talks}}
    assert with_formats({"path": text, "eval": {"one": talks}})["eval"] == {"one": {"path": talks, "format": "chat"}}


def test_an_evaluation_takes_conversations_as_such_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    talks = str(write_lines(tmp_path / "a.jsonl", [SHARED]))
    assert evaluation._found_format(talks, "") == "chat"
    assert capsys.readouterr().err == f"{talks} is taken as conversations: 'conversations' (ShareGPT)\n"
    assert evaluation._found_format(str(write_lines(tmp_path / "b.jsonl", [{"text": "a"}])), "") == "text"
    assert capsys.readouterr().err == ""

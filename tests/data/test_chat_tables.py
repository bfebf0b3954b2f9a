"""Chats and pairs in Parquet files and folders of the `datasets` library."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from terrace.base.errors import DataError
from terrace.data.chat_tokens import holds_conversations, prepare_chat
from terrace.data.pair_tokens import prepare_pairs
from terrace.data.tokenizer import ByteTokenizer
from tests.support.chats import CHATML, TALK, write_lines

LOOK = [{"type": "function", "function": {"name": "look"}}]
RECORDS: list[dict[str, Any]] = [
    {"messages": TALK, "id": 1},
    {"messages": [TALK[1], {"role": "assistant", "tool_calls": LOOK}, TALK[4]], "id": 2},
]
# A template that treats a key with null unlike an absent one.
CALLS = CHATML.replace("{{ message.content }}", "{{ 'CALL' if 'tool_calls' in message else message.content }}")


def saved(folder: Path, records: list[dict[str, Any]]) -> Path:
    """A folder as `save_to_disk` writes it."""
    folder.mkdir(parents=True)
    table = pyarrow.Table.from_pylist(records)
    with pyarrow.OSFile(str(folder / "data.arrow"), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table, max_chunksize=1)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_every_form_of_a_chat_makes_the_same_tokens(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(CALLS)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(RECORDS), tmp_path / "a.parquet")
    saved(tmp_path / "saved" / "train", RECORDS)
    saved(tmp_path / "saved" / "test", RECORDS[:1])
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    write_lines(tmp_path / "a.jsonl", RECORDS)

    def digest(name: str, split: str = "") -> str:
        assert holds_conversations(tmp_path / name, split)
        template = tmp_path / "chat.jinja"
        return prepare_chat(tmp_path / name, ByteTokenizer(), "bytes", template, tmp_path / "cache", split).digest

    assert digest("a.jsonl") == digest("a.parquet") == digest("saved") == digest("saved", "train")
    assert digest("saved", "test") == digest("saved/test") != digest("saved")


def test_prompts_and_completions_of_a_table_need_no_template(tmp_path: Path) -> None:
    pairs = [{"prompt": "a", "completion": "b", "rank": 1}]
    made = prepare_chat(saved(tmp_path / "saved", pairs), ByteTokenizer(), "bytes", "", tmp_path / "cache")
    assert made.num_documents == 1
    assert not holds_conversations(tmp_path / "saved")


def test_pairs_of_an_arrow_file(tmp_path: Path) -> None:
    record = {"prompt": "a", "chosen": "b", "rejected": "c"}
    write_lines(tmp_path / "a.jsonl", [record])
    digests = {
        prepare_pairs(path, ByteTokenizer(), "bytes", "", tmp_path / "cache").digest
        for path in (saved(tmp_path / "saved", [record]), tmp_path / "a.jsonl")
    }
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([{"words": "a"}], r"has none of the columns messages, .* \(its columns: 'words'\)"),
        ([{"text": "a"}], r"a.parquet: row 1 has no form of a conversation \(keys: 'text'\)"),
        ([{"messages": TALK}, {"messages": TALK[:2]}], "a.parquet: row 2: the assistant says nothing"),
        ([{"messages": {"role": ["user"], "content": ["a"]}}], "row 1: 'messages' must be a list, not an object"),
        ([{"messages": [TALK[1] | {"content": b"a"}, TALK[4]]}], "row 1: .*bytes.*; write the value as a string"),
    ],
)
def test_what_is_wrong_with_a_row_is_named(records: list[Any], said: str, tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "a.parquet")
    (tmp_path / "chat.jinja").write_text(CHATML)
    with pytest.raises(DataError, match=said):
        prepare_chat(tmp_path / "a.parquet", ByteTokenizer(), "bytes", tmp_path / "chat.jinja", tmp_path / "cache")

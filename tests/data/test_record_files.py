"""Lists of JSON, csv, long numbers, long lines and separated texts: what is read of a file of records or of text."""

import json
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from terrace.base.errors import DataError
from terrace.base.schema import read_table
from terrace.data import pieces as pieces_module
from terrace.data import text as text_module
from terrace.data.chat_tokens import prepare_chat
from terrace.data.config import DataConfig
from terrace.data.corpus import read_documents, read_pieces
from terrace.data.pair_tokens import prepare_pairs
from terrace.data.prepared import prepare_sources
from terrace.data.tokenizer import ByteTokenizer
from terrace.data.tokens import encode_whole, prepare_tokens

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
RECORDS = st.lists(
    st.fixed_dictionaries({"id": VALUES, "text": st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)}),
    min_size=1,
    max_size=6,
)


@given(RECORDS, st.sampled_from([None, 0, 3]), st.integers(1, 30))
def test_a_list_of_json_has_the_records_of_its_lines(
    tmp_path_factory: pytest.TempPathFactory, records: list[dict[str, object]], indent: int | None, block: int
) -> None:
    folder = tmp_path_factory.mktemp("list")
    (folder / "a.json").write_text("\ufeff \n" + json.dumps(records, indent=indent) + "\n", encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_module, "_BLOCK_BYTES", block)
        assert list(read_documents(folder / "a.json")) == [record["text"] for record in records]


BAD_FILES = [
    ("a.json", '{\n "text": "a"\n}', "a.json holds no records: .* or rename it to .txt"),
    ("a.json", "text of a story", "a.json holds no records"),
    ("a.json", '"a"', "a.json holds no records"),
    ("a.json", '{"text": "a"}\n{"text": ', "a.json:2 is not valid JSON"),
    ("a.json", '[{"text": "a"}, {"text": ', r"a.json: record 2 is not valid JSON \(.*\), or the file is cut off"),
    ("a.json", '[{"text": "a"}', r"a.json is not one list of JSON: 'the end of the file' stands where ',' should"),
    ("a.json", '[{"text": "a"} {"text": "b"}]', r"""a.json is not one list of JSON: '{' stands where ',' should"""),
    ("a.json", '[{"text": "a"}] x', "a.json goes on with 'x' behind its list of JSON"),
    ("a.json", '[{"text": "a"}, 3]', "a.json: record 2 is of type int; each must be an object"),
    ("a.json", '[{"body": "a"}]', "a.json: record 1 has no key 'text'.*--data.column"),
    ("a.json", '[{"text": null}]', "a.json: record 1: 'text' must be a string, not null"),
    ("a.json", "[]", "a.json holds no text"),
    ("a.csv", "text,id\na,1\nb\n", "a.csv:3 has 1 fields, and the header has 2: put fields with ',' or line ends"),
    ("a.csv", "text,id\na,b,c\n", "a.csv:2 has 3 fields, and the header has 2"),
    ("a.csv", 'text\n"a\n', "a.csv:2 is not valid csv"),
    ("a.csv", "text,text\na,b\n", "a.csv has the column 'text' 2 times"),
    ("a.csv", "body\na\n", "a.csv:2 has no key 'text'"),
    ("a.csv", "text\n", "a.csv holds no text"),
]


@pytest.mark.parametrize(("name", "content", "message"), BAD_FILES)
def test_files_that_are_no_records_are_refused(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message) as error:
        prepare_tokens(tmp_path / name, ByteTokenizer(), tmp_path / "cache")
    assert "\n" not in str(error.value)


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    for name, content in (("a.csv", b"text\ncaf\xe9\n"), ("a.json", b'[{"text": "caf\xe9"}]')):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=f"{name} is not UTF-8: byte 0xe9 at offset {content.index(0xE9)}"):
            list(read_documents(tmp_path / name))


HUGE = "9" * 5_000


def test_whole_numbers_have_any_length(tmp_path: Path) -> None:
    def written(name: str, text: str) -> Path:
        (tmp_path / name).write_text(text)
        return tmp_path / name

    cache = tmp_path / "cache"
    line = f'{{"id": {HUGE}, "n": -{HUGE}, "text": "a"}}'
    for name, text in (("a.jsonl", line), ("a.json", line), ("b.json", f"[{line}]")):
        assert list(read_documents(written(name, text))) == ["a"], name
    chat = written("chat.jsonl", f'{{"id": {HUGE}, "prompt": "a", "completion": "b"}}')
    assert prepare_chat(chat, ByteTokenizer(), "bytes", "", cache).num_documents == 1
    pair = written("pairs.jsonl", f'{{"id": {HUGE}, "prompt": "a", "chosen": "b", "rejected": "c"}}')
    assert prepare_pairs(pair, ByteTokenizer(), "bytes", "", cache).num_documents == 2
    assert read_table(written("config.json", f'{{"id": {HUGE}, "layers": 2}}'))["layers"] == 2


STORIES = ["one\n\nstory", "  two ", "three"]


@given(
    st.lists(st.text(st.characters(codec="utf-8"), max_size=30), min_size=1, max_size=8),
    st.sampled_from([("<|end|>", ""), ("<|end|>", "\n"), ("#", "\r\n"), ("#", ""), ("aba", "\n"), ("\n\n\n", "")]),
    st.integers(1, 40),
    st.integers(1, 12),
)
def test_a_separator_ends_documents_wherever_the_file_is_cut(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], border: tuple[str, str], unit: int, block: int
) -> None:
    mark, line_end = border
    texts = [text.replace(mark[0], "").strip("\r\n\ufeff") for text in texts]
    file = tmp_path_factory.mktemp("separated") / "a.txt"
    file.write_bytes("".join(f"{text}{line_end}{mark}{line_end}" for text in [*texts, "end"]).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("terrace.data.corpus.UNIT_BYTES", unit)
        patch.setattr(text_module, "_BLOCK_BYTES", block)
        found = list(read_documents(file, separator=mark))
    assert found == [text for text in [*texts, "end"] if text]


def test_a_token_that_is_spelled_out_is_said_and_can_end_documents(tmp_path: Path) -> None:
    file = tmp_path / "stories.txt"
    file.write_text("\n<|endoftext|>\n".join(STORIES))
    said: list[str] = []
    for _ in range(2):  # made, and found in the cache
        prepare_tokens(file, ByteTokenizer(), tmp_path / "cache", progress=said.append)
    assert said == 2 * [
        f"{file} spells out <|endoftext|> 2 times, read as characters: if it stands between documents, give "
        "--data.separator '<|endoftext|>'"
    ]
    data = DataConfig(path=str(file), separator="<|endoftext|>", cache=str(tmp_path / "cache"))
    (source,) = prepare_sources(data, ByteTokenizer(), 4, said.append)
    assert (source.tokens.num_documents, len(said)) == (3, 2)
    assert list(read_documents(file, separator="<|endoftext|>")) == STORIES


def test_a_token_that_records_spell_out_is_said(tmp_path: Path) -> None:
    file = tmp_path / "stories.jsonl"
    file.write_text("".join(json.dumps({"text": f"{story}<|endoftext|>"}) + "\n" for story in STORIES))
    said: list[str] = []
    made = prepare_tokens(file, ByteTokenizer(), tmp_path / "cache", progress=said.append)
    assert made.num_documents == len(STORIES)
    assert said == [
        f"{file} spells out <|endoftext|> 3 times, read as characters: if it ends the records, remove it, since each "
        "is a document with its end, and if it parts them, split them"
    ]


def test_a_separator_without_effect_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(DataError, match=r"data.separator = '#' has no effect: .* holds records and no text"):
        list(read_documents(tmp_path / "a.jsonl", separator="#"))
    with pytest.raises(Exception, match=r"data.separator has no effect on 'chats'"):
        DataConfig(path="chats", format="chat", separator="#")


def test_a_long_text_is_encoded_in_the_pieces_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(ByteTokenizer):
        sizes: ClassVar[list[int]] = []

        def encode(self, text: str) -> npt.NDArray[np.int64]:
            self.sizes.append(len(text))
            return super().encode(text)

    monkeypatch.setattr(pieces_module, "PIECE_CHARACTERS", 10)
    assert encode_whole(Counting(), "a b " * 20) == list(b"a b " * 20)
    assert max(Counting.sizes) <= 10


def test_a_line_that_is_longer_than_a_piece_is_cut_into_short_ones(tmp_path: Path) -> None:
    lines = "a line\n" * 200_000
    (tmp_path / "a.txt").write_text(lines + "x" * 3_000_000 + "\n" + lines)
    sizes = [len(piece.text) for piece in read_pieces(tmp_path / "a.txt")]
    # Whole lines fill pieces of a million characters; of the long line, pieces keep all cores busy.
    assert max(sizes) <= pieces_module.PIECE_CHARACTERS
    assert sizes.count(pieces_module.LINE_PIECE_CHARACTERS) >= 3_000_000 // pieces_module.LINE_PIECE_CHARACTERS - 17
    assert sum(sizes) == 2 * len(lines) + 3_000_001

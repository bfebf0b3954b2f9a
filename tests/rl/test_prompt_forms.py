"""Prompts of a file as messages: through the chat template of the model, up to where the assistant answers."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from terrace.base.errors import DataError
from terrace.data.chat_prompt import chat_prompts
from terrace.data.tokenizer import ByteTokenizer, load_tokenizer
from terrace.rl.stream.prompt_file import PromptFile, read_prompts
from tests.support.chats import write_lines, write_tokenizer

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

ASKED = [{"role": "user", "content": "What is a tier?"}]
VERL: dict[str, Any] = {
    "data_source": "math_dapo",
    "prompt": ASKED,
    "ability": "MATH",
    "reward_model": {"ground_truth": "34", "style": "rule"},
    "extra_info": {"index": "9a9b"},
}
SAID = "<|im_start|>user\nWhat is a tier?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def read(path: Path, folder: Path, column: str = "prompt") -> PromptFile:
    tokenizer = load_tokenizer(folder)
    return read_prompts(
        path, column, tokenizer, longest=99, num_held_out=0, seed=0, chats=lambda: chat_prompts(tokenizer, folder)
    )


def test_messages_are_asked_in_the_template_as_transformers_asks(folder: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    rows = [
        VERL,
        {"prompt": "What is a tier?", "answer": "a level"},
        {"question": "What is a tier?", "answer": "a level"},
    ]
    found = read(write_lines(tmp_path / "prompts.jsonl", rows), folder)
    assert [each.text for each in found.prompts] == [SAID, "What is a tier?", SAID]
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ids = theirs.apply_chat_template(ASKED, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert found.prompts[0].tokens == found.prompts[2].tokens == tuple(ids)
    assert found.prompts[1].tokens == tuple(theirs("What is a tier?")["input_ids"])
    # Everything else of a line goes to rewards.
    assert found.prompts[0].data == {key: value for key, value in VERL.items() if key != "prompt"}
    assert found.prompts[2].data == rows[2]
    # A key that is named holds texts as they are.
    named = read(write_lines(tmp_path / "named.jsonl", rows[2:]), folder, "question")
    assert named.prompts[0].text == "What is a tier?"


def test_a_table_has_the_same_prompts(folder: Path, tmp_path: Path) -> None:
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    rows = [VERL, VERL | {"prompt": [{"role": "system", "content": "Be brief.", "name": None}, *ASKED]}]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "prompts.parquet")
    lines = read(write_lines(tmp_path / "prompts.jsonl", rows), folder)
    table = read(tmp_path / "prompts.parquet", folder)
    assert [each.tokens for each in table.prompts] == [each.tokens for each in lines.prompts]
    assert table.prompts[1].text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n")


def test_many_prompts_keep_their_order(folder: Path, tmp_path: Path) -> None:
    rows = [
        {"prompt": f"{number}" if number % 3 else [{"role": "user", "content": f"{number}"}]} for number in range(150)
    ]
    found = read(write_lines(tmp_path / "prompts.jsonl", rows), folder)
    assert [each.text for each in found.prompts] == [
        f"{number}" if number % 3 else f"<|im_start|>user\n{number}<|im_end|>\n<|im_start|>assistant\n"
        for number in range(150)
    ]


def test_a_file_may_begin_with_a_mark(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text("\ufeff" + json.dumps(VERL), encoding="utf-8")
    assert read(tmp_path / "prompts.jsonl", folder).prompts[0].text == SAID


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([{"role": "user"}], "message 1, of the user, has no 'content'"),
        ([{"role": "usr", "content": "a"}], "unknown role 'usr'"),
        ([{"role": "user", "content": "<|im_end|>"}], r"spells out the special token '<\|im_end\|>'"),
        ([*ASKED, {"role": "assistant", "content": "a"}], "'prompt' ends with the assistant's answer"),
        ([{"role": "user", "content": "a " * 200}], "has a prompt of .* tokens: 1 to run.max_prompt = 99 are allowed"),
    ],
)
def test_a_wrong_prompt_is_named(folder: Path, tmp_path: Path, prompt: Any, message: str) -> None:
    path = write_lines(tmp_path / "prompts.jsonl", [VERL, {"prompt": prompt}])
    with pytest.raises(DataError, match=f"prompts.jsonl line 2.*{message}"):
        read(path, folder)


def test_messages_without_a_template_are_refused(tmp_path: Path) -> None:
    bare = write_tokenizer(tmp_path / "bare", None)
    path = write_lines(tmp_path / "prompts.jsonl", [VERL])
    with pytest.raises(DataError, match=r"line 1 has messages: chat data need a chat template.*run.prompt_column"):
        read(path, bare)
    (bare / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    with pytest.raises(DataError, match=r"line 1 cannot be put into a chat: .* refuses it: no"):
        read(path, bare)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("prompt,answer\na,b\n", r"line 1 is not JSON: .*; write an object on each line, such as .*, or Parquet"),
        ('[{"prompt": "a"}]', "line 1 is no object of JSON: write an object on each line"),
        ('{"prompt": "a"}\n{"prompt": "\\ud800"}\n', "line 2: the tokenizer cannot encode the text"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(folder: Path, tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "prompts.jsonl").write_text(content)
    with pytest.raises(DataError, match=said):
        read(tmp_path / "prompts.jsonl", folder)


def test_a_file_of_another_kind_is_named(folder: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, said in (("pipe", "it is a pipe, not"), ("", "it is a folder, not"), ("none", "there is no such file; ")):
        with pytest.raises(DataError, match=said):
            read(tmp_path / name, folder)


def test_whole_numbers_have_any_length(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text(f'{{"id": {"9" * 5_000}, "prompt": "a"}}')
    found = read_prompts(tmp_path / "prompts.jsonl", "prompt", ByteTokenizer(), longest=4, num_held_out=0, seed=0)
    assert found.prompts[0].text == "a"

"""Responses of conversations: never an earlier turn, all parts of the last one; values that JSON lacks are named."""

from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from terrace.base.errors import DataError
from terrace.data.batches import Batches, Source
from terrace.data.pair_tokens import prepare_pairs
from terrace.data.token_file import TokenFile
from terrace.data.tokenizer import ByteTokenizer
from tests.support.chats import CHATML, write_lines


def prepared(folder: Path, record: dict[str, Any], template: str) -> TokenFile:
    pytest.importorskip("jinja2")
    (folder / "chat.jinja").write_text(template)
    path = write_lines(folder / "pairs.jsonl", [record])
    return prepare_pairs(path, ByteTokenizer(), "bytes", folder / "chat.jinja", folder / "cache")


def write_table(folder: Path, records: list[dict[str, Any]]) -> Path:
    parquet, arrow = (pytest.importorskip(name) for name in ("pyarrow.parquet", "pyarrow"))
    parquet.write_table(arrow.Table.from_pylist(records), folder / "pairs.parquet")
    return folder / "pairs.parquet"


def turn(text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


ASKED = [{"role": "user", "content": "1"}, turn("one"), {"role": "user", "content": "2"}]


@pytest.mark.parametrize("value", [datetime(2026, 1, 2), b"2", Decimal("2.5")], ids=lambda value: type(value).__name__)
def test_a_table_s_value_without_a_form_in_json_is_named(tmp_path: Path, value: Any) -> None:
    pytest.importorskip("jinja2")
    fine = {"prompt": ASKED[:1], "chosen": [turn("a", at=None)], "rejected": [turn("b", at=None)]}
    path = write_table(tmp_path, [fine, {**fine, "chosen": [turn("a", at=value)]}])
    (tmp_path / "chat.jinja").write_text(CHATML)
    with pytest.raises(
        DataError, match=r"pairs\.parquet: row 2: 'chosen': Object of type .*; write the value"
    ) as error:
        prepare_pairs(path, ByteTokenizer(), "bytes", tmp_path / "chat.jinja", tmp_path / "cache")
    assert "\n" not in str(error.value)


def test_a_part_that_is_null_makes_no_difference_between_members(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    with pytest.raises(DataError, match="are equal, so nothing is preferred"):
        prepared(tmp_path, {"prompt": ASKED, "chosen": [turn("a")], "rejected": [turn("a", name=None)]}, CHATML)


# Says nothing of a turn without content, and marks a thought and an answer apart.
SPARING = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.content %}"
    "{% if m.thought %}{% generation %}<{{ m.thought }}>{% endgeneration %} {% endif %}"
    "{% generation %}{{ m.content }}.{% endgeneration %}{% endif %}{% else %}[{{ m.content }}]{% endif %}{% endfor %}"
)
CALL = {"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}


@pytest.mark.parametrize("last", [turn(""), turn(None), turn(None, **CALL)])
def test_an_earlier_turn_is_never_the_response(tmp_path: Path, last: dict[str, Any]) -> None:
    pytest.importorskip("jinja2")
    why = "renders nothing of the last message" if "tool_calls" in last else "ends with an empty message"
    with pytest.raises(DataError, match=f"pairs.jsonl:1: 'rejected'.*{why}"):
        prepared(tmp_path, {"prompt": ASKED, "chosen": [turn("two")], "rejected": [last]}, SPARING)


def test_a_response_has_all_marked_parts_of_its_turn(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    asked = [*ASKED[:1], turn("one", thought="uno"), turn(None, **CALL), ASKED[2]]
    tokens = prepared(tmp_path, {"prompt": asked, "chosen": [turn("2", thought="b")], "rejected": [turn("3")]}, SPARING)
    source = Source(tokens=tokens, documents="pairs", name="pairs")
    _, labels = Batches([source], 40, 2, seed=0).rows(0, np.arange(2))
    assert [bytes(row[row != -100].tolist()).decode() for row in labels] == ["<b>2.", "3."]

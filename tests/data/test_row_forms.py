"""Rows in the forms of the data sets that are used most, each with contents made up, as Terrace takes them."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from terrace.base.errors import DataError
from terrace.data.chat import ChatReader
from terrace.data.chat_encoder import ByteEncoder
from terrace.data.pair_tokens import prepare_pairs
from terrace.data.row_forms import NUM_ASKED, chat_row, pair_row, prompt_row
from terrace.data.template import ChatTemplate
from terrace.data.tokenizer import ByteTokenizer
from tests.support.chats import CHATML, TAGGED, write_lines


def said(*turns: str, first: str = "user") -> list[dict[str, Any]]:
    """Messages of texts, in which user and assistant alternate."""
    roles = ("user", "assistant") if first == "user" else ("assistant", "user")
    return [{"role": roles[number % 2], "content": text} for number, text in enumerate(turns)]


BRIEF = [{"role": "system", "content": "Be brief."}]
LOOK = {"type": "function", "function": {"name": "look", "arguments": {"q": "sun"}}}
CHATS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "ultrachat_200k": ({"prompt": "sky", "prompt_id": "0", "messages": said("sky", "blue")}, said("sky", "blue")),
    "no_robots": (
        {"prompt": "sky", "prompt_id": "0", "category": "Chat", "messages": BRIEF + said("sky", "blue")},
        BRIEF + said("sky", "blue"),
    ),
    "tulu-3": ({"id": "a_1", "messages": said("sky", "blue"), "source": "a"}, said("sky", "blue")),
    "OpenHermes": (
        {"conversations": [{"from": "human", "value": "sky", "weight": None}, {"from": "gpt", "value": "blue"}],
         "system_prompt": None, "source": "a", "idx": 1},
        said("sky", "blue"),
    ),
    "SlimOrca": (
        {"conversations": [{"from": "system", "value": "Be brief.", "weight": None},
                           {"from": "human", "value": "sky", "weight": 0.0},
                           {"from": "gpt", "value": "blue", "weight": 1.0}]},
        BRIEF + said("sky", "blue"),
    ),
    "ShareGPT with tools": (
        {"system": "Be brief.", "tools": [LOOK],
         "conversations": [{"from": "human", "value": "sun?"},
                           {"from": "function_call", "value": '{"name": "look", "arguments": {"q": "sun"}}'},
                           {"from": "observation", "value": "up"}, {"from": "gpt", "value": "It is up."}]},
        [*BRIEF, said("sun?")[0], {"role": "assistant", "tool_calls": [LOOK]}, {"role": "tool", "content": "up"},
         said("It is up.", first="assistant")[0]],
    ),
    "lmsys-chat": ({"conversation_id": "a", "model": "b", "conversation": said("sky", "blue"), "turn": 1},
                   said("sky", "blue")),
    "capybara": (
        {"source": "a", "conversation": [{"input": "sky", "output": "blue"}, {"input": "sea", "output": "blue, too"}]},
        said("sky", "blue", "sea", "blue, too"),
    ),
    "lima": ({"conversations": ["sky", "blue"], "source": "a"}, said("sky", "blue")),
    "alpaca": (
        {"instruction": "Name the colour.", "input": "sky", "output": "blue", "text": "Below is ..."},
        said("Name the colour.\n\nsky", "blue"),
    ),
    "alpaca without input": ({"instruction": "sky", "input": "", "output": "blue"}, said("sky", "blue")),
    "alpaca with history": (
        {"instruction": "sea", "input": "", "output": "blue, too", "system": "Be brief.", "history": [["sky", "blue"]]},
        BRIEF + said("sky", "blue", "sea", "blue, too"),
    ),
    "dolly": (
        {"instruction": "Which colour?", "context": "The sky is blue.", "response": "blue", "category": "closed_qa"},
        said("Which colour?\n\nThe sky is blue.", "blue"),
    ),
    "UltraInteract_sft": (
        {"task": "Math", "dataset": "a", "instruction": "1 + 1", "response": "2", "id": "0", "parent_id": None},
        said("1 + 1", "2"),
    ),
    "gsm8k": ({"question": "1 + 1", "answer": "It is <<1+1=2>>2.\n#### 2"}, said("1 + 1", "It is <<1+1=2>>2.\n#### 2")),
    "OpenOrca": (
        {"id": "flan.1", "system_prompt": "Be brief.", "question": "sky", "response": "blue"},
        BRIEF + said("sky", "blue"),
    ),
    "MetaMathQA": ({"type": "a", "query": "1 + 1", "original_question": "b", "response": "2"}, said("1 + 1", "2")),
    "NuminaMath": ({"source": "a", "problem": "1 + 1", "solution": "2"}, said("1 + 1", "2")),
    "OpenMathInstruct": (
        {"problem": "1 + 1", "generated_solution": "It is 2.", "expected_answer": "2"}, said("1 + 1", "It is 2.")
    ),
    "openassistant-guanaco": (
        {"text": "### Human: sky### Assistant: blue### Human: sea### Assistant: blue, too"},
        said("sky", "blue", "sea", "blue, too"),
    ),
    "a prompt and its completion as messages": (
        {"prompt": said("sky"), "completion": said("blue", first="assistant")}, said("sky", "blue")
    ),
    "with a text for the system": (
        {"system": "Be brief.", "prompt": "sky", "completion": "blue"}, BRIEF + said("sky", "blue")
    ),
    "Dolly with another name of the answer": (
        {"instruction": "Which colour?", "context": "The sky is blue.", "output": "blue"},
        said("Which colour?\n\nThe sky is blue.", "blue"),
    ),
    "messages in JSON text": ({"messages": json.dumps(said("sky", "blue"))}, said("sky", "blue")),
    "ShareGPT in JSON text": (
        {"conversations": json.dumps([{"from": "human", "value": "sky"}, {"from": "gpt", "value": "blue"}])},
        said("sky", "blue"),
    ),
    "prompt and completion in JSON text": (
        {"prompt": json.dumps(said("sky")), "completion": json.dumps(said("blue", first="assistant"))},
        said("sky", "blue"),
    ),
    "nulls count as absent": ({"messages": None, "prompt": "sky", "response": "blue"}, said("sky", "blue")),
}  # fmt: skip


@pytest.mark.parametrize("name", CHATS)
def test_a_conversation_of_a_published_form(name: str) -> None:
    row, messages = CHATS[name]
    made = chat_row(row, "here")
    assert made["messages"] == messages
    assert made.get("tools") == row.get("tools")
    # What is made is a row of the first form.
    assert chat_row(made, "here")["messages"] == messages


def test_texts_of_a_prompt_and_its_completion_stay_plain() -> None:
    row = {"prompt": "a", "completion": "b", "system": "", "id": 3, "label": True}
    assert chat_row(row, "here") == {"prompt": "a", "completion": "b"}
    spelled = {"prompt": "Ask for the sky in JSON.", "completion": json.dumps(said("sky"))}
    assert chat_row(spelled, "here") == spelled


@pytest.mark.parametrize("template", [CHATML, TAGGED])
def test_of_a_completion_in_messages_earlier_answers_are_not_trained(template: str) -> None:
    pytest.importorskip("jinja2")
    row = {"prompt": said("sky", "blue", "sea"), "completion": said("wet", first="assistant")}
    ids, mask = ChatReader(ChatTemplate(template), ByteEncoder()).tokens(json.dumps(row), "here")
    assert bytes(ids[mask == 1].tolist()).decode() == "wet<|im_end|>\n"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"title": "a", "body": "b"}, r"no form of a conversation \(keys: 'title', 'body'\); the forms are .*ShareGPT"),
        ({"chosen": "a", "rejected": "b"}, 'holds a preference, not a conversation: set data.format = "pairs"'),
        ({"prompt": "a", "completion": "b", "label": False}, "has the label false, so its completion is one to avoid"),
        ({"conversations": "sky"}, "'conversations' must be a list of messages, not a string; write it so"),
        ({"conversations": str(said("sky", "blue"))}, "'conversations' is a list as Python prints it, not JSON"),
        ({"question": "a", "answer": {"text": []}}, "'answer' must be a string, not an object"),
        ({"question": ["a", "b"], "answer": ["a"]}, "'answer' must be a string, not a list"),
        ({"instruction": "a", "input": {"b": 1}, "output": "c"}, "'input' must be a string, not an object"),
        ({"instruction": "a", "output": "c", "history": [["a"]]}, "'history' must be a list of"),
        (
            {"conversations": [{"from": "function_call", "value": "look(sun)"}]},
            "is a function call, which must be JSON",
        ),
        (
            {"conversations": [{"from": "function_call", "value": "[" * 100_000}]},
            "is a function call, which must be JSON",
        ),
    ],
)
def test_a_row_that_is_no_conversation_is_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=f"^here.*{message}"):
        chat_row(row, "here")


HH = "\n\nHuman: sky\n\nAssistant: which?\n\nHuman: ours\n\nAssistant: "
BLUE, RED = said("blue", first="assistant"), said("red", first="assistant")
PAIRS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "ultrafeedback_binarized": (
        {"prompt": "sky", "prompt_id": "0", "chosen": said("sky", "blue"), "rejected": said("sky", "red"),
         "messages": said("sky", "blue"), "score_chosen": 8.0, "score_rejected": 2.0},
        said("sky"),
    ),
    "answers alone behind a text": ({"prompt": "sky", "chosen": BLUE, "rejected": RED}, said("sky")),
    "hh-rlhf": ({"chosen": HH + "blue", "rejected": HH + "red"}, said("sky", "which?", "ours")),
    "orca_dpo_pairs": (
        {"system": "Be brief.", "question": "sky", "chosen": "blue", "rejected": "red"}, BRIEF + said("sky")
    ),
    "distilabel": ({"system": "", "input": "sky", "chosen": "blue", "rejected": "red"}, said("sky")),
    "UltraInteract_pair": (
        {"task": "Math", "dataset": "a", "trajectory": [{"from": "user", "value": "sky"}], "chosen": "blue",
         "rejected": "red", "id": "0", "parent_id": "1"},
        said("sky"),
    ),
    "Alpaca": ({"instruction": "Name it.", "input": "sky", "chosen": "blue", "rejected": "red"},
               said("Name it.\n\nsky")),
    "ShareGPT": (
        {"conversations": [{"from": "human", "value": "sky"}], "chosen": {"from": "gpt", "value": "blue"},
         "rejected": {"from": "gpt", "value": "red"}},
        said("sky"),
    ),
    "conversations alone": ({"chosen": said("a", "b", "sky", "blue"), "rejected": said("a", "b", "sky", "red")},
                            said("a", "b", "sky")),
    "texts behind messages": ({"prompt": said("sky"), "chosen": "blue", "rejected": "red"}, said("sky")),
    "a conversation behind the system's message": (
        {"prompt": BRIEF, "chosen": said("sky", "blue"), "rejected": said("sky", "red")}, BRIEF + said("sky")
    ),
    "members in JSON text": (
        {"prompt": "sky", "chosen": json.dumps(said("sky", "blue")), "rejected": json.dumps(said("sky", "red"))},
        said("sky"),
    ),
    "all in JSON text": (
        {"prompt": json.dumps(said("sky")), "chosen": json.dumps(BLUE), "rejected": json.dumps(RED)}, said("sky")
    ),
    "Dolly": ({"instruction": "Name it.", "context": "sky", "chosen": "blue", "rejected": "red"},
              said("Name it.\n\nsky")),
    "a prompt that the members repeat": (
        {"prompt": said("sky"), "chosen": said("sky", "blue"), "rejected": said("sky", "red")}, said("sky")
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_a_preference_of_a_published_form(name: str) -> None:
    row, prompt = PAIRS[name]
    assert pair_row(row, "here") == {"prompt": prompt, "chosen": BLUE, "rejected": RED}


def test_answers_that_part_early_are_whole_responses(tmp_path: Path) -> None:
    """Two conversations of which each turn after the first question differs."""
    pytest.importorskip("jinja2")
    (tmp_path / "chat.jinja").write_text(CHATML)
    row = {"chosen": said("sky", "blue", "sea", "blue"), "rejected": said("sky", "red", "why?", "dusk")}
    path = write_lines(tmp_path / "pairs.jsonl", [row])
    tokens = prepare_pairs(path, ByteTokenizer(), "bytes", tmp_path / "chat.jinja", tmp_path / "cache")
    starts, mask = [*tokens.open_starts().tolist(), tokens.num_tokens], tokens.open_mask()
    ids = tokens.open()
    assert mask is not None
    texts = [ids[first:end][mask[first:end] == 1] for first, end in pairwise(starts)]
    assert [bytes(text.tolist()).decode() for text in texts] == [
        "blue<|im_end|>\nblue<|im_end|>\n",
        "red<|im_end|>\ndusk<|im_end|>\n",
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": said("sky", "blue"), "rejected": said("sea", "blue")}, "begin with different messages"),
        (
            {"prompt": "sky", "chosen": said("sky", "blue"), "rejected": "red"},
            "'chosen' is a whole conversation",
        ),
        ({"prompt": "sky", "chosen": said("sky"), "rejected": RED}, "'chosen' does not end with a message of the"),
        (
            {"prompt": "sky", "chosen": str(said("sky", "blue")), "rejected": str(said("sky", "red"))},
            "'chosen' is a list as Python prints it, not JSON",
        ),
        ({"chosen": "blue", "rejected": "red"}, "'chosen' is a string without a 'prompt'"),
        ({"prompt": "sky", "chosen": "blue"}, r"no key 'rejected' \(keys: 'prompt', 'chosen'\)"),
    ],
)
def test_a_row_that_is_no_preference_is_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=f"^here.*{message}"):
        pair_row(row, "here")


PROMPTS: dict[str, tuple[dict[str, Any], str, Any]] = {
    "text": ({"prompt": "sky", "answer": "blue"}, "prompt", "sky"),
    "a named column": ({"question": "sky", "answer": "blue"}, "question", "sky"),
    "verl": (
        {"data_source": "gsm8k", "prompt": said("sky"), "ability": "math",
         "reward_model": {"style": "rule", "ground_truth": "blue"}, "extra_info": {"index": 0}},
        "prompt", said("sky"),
    ),
    "DAPO-math": (
        {"data_source": "math_dapo", "prompt": [{"content": "sky", "role": "user", "name": None}], "ability": "MATH",
         "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"}, "extra_info": {"index": "9a9b"}},
        "prompt", said("sky"),
    ),
    "gsm8k": ({"question": "sky", "answer": "#### blue"}, "prompt", said("sky")),
    "dolly": ({"instruction": "Which?", "context": "blue", "response": "b"}, "prompt", said("Which?\n\nblue")),
    "JSON text": ({"prompt": json.dumps(said("sky"))}, "prompt", said("sky")),
    "tulu-3": ({"id": "a", "messages": said("sky", "blue", "sea", "blue")}, "prompt", said("sky", "blue", "sea")),
    "ShareGPT": ({"conversations": [{"from": "human", "value": "sky"}, {"from": "gpt", "value": "blue"}]}, "prompt",
                 said("sky")),
    "OpenOrca": ({"system_prompt": "Be brief.", "question": "sky", "response": "blue"}, "prompt", BRIEF + said("sky")),
}  # fmt: skip


@pytest.mark.parametrize("name", PROMPTS)
def test_a_prompt_of_a_published_form(name: str) -> None:
    row, column, asked = PROMPTS[name]
    assert prompt_row(row, column, "here") == (asked if isinstance(asked, str) else {"messages": asked})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": said("sky", "blue")}, "'prompt' ends with the assistant's answer, so nothing is asked"),
        ({"text": "sky"}, "no text in 'prompt': it has text; name the key .* with run.prompt_column"),
        ({"prompt": {"role": "user"}}, "no text in 'prompt': it has prompt"),
        ({"messages": BLUE}, "'messages' ends with the assistant's answer"),
    ],
)
def test_a_row_that_asks_nothing_is_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=f"^here.*{message}"):
        prompt_row(row, "prompt", "here")


def test_a_file_may_begin_with_a_mark(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text("\ufeff" + json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}), encoding="utf-8")
    assert prepare_pairs(path, ByteTokenizer(), "bytes", "", tmp_path / "cache").num_documents == 2


def test_the_messages_that_ask_are_counted() -> None:
    made = chat_row({"prompt": said("sky", "blue", "sea"), "completion": BLUE}, "here")
    assert made[NUM_ASKED] == 3

"""What a template or a tokenizer leaves out of the assistant's words is said in one line; white space is not."""

import json
from pathlib import Path
from typing import Any

import pytest

from terrace.base.errors import DataError
from terrace.data.chat import ChatReader
from terrace.data.config import DataConfig
from terrace.data.prepared import prepare_sources
from terrace.data.template import ChatTemplate
from terrace.data.text_tokens import TextTokens
from terrace.data.tokenizer import load_tokenizer
from tests.support.chats import CHATML, FORGETFUL, PROMPT, TAGGED, TALK, write_lines, write_tokenizer

pytest.importorskip("jinja2")

from terrace.data.chat_encoder import ByteEncoder, ChatEncoder
from terrace.data.chat_tokens import read_chats

THOUGHT = "<think>two and two is four</think>four"
ASKED = {"role": "user", "content": "2 + 2?"}
CALL = {"type": "function", "function": {"name": "look", "arguments": {"query": "sun", "deep": {"days": [17]}}}}


def answer(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def said(template: str, *messages: dict[str, Any], encoder: ChatEncoder | None = None, **more: Any) -> str:
    reader = ChatReader(ChatTemplate(template), encoder or ByteEncoder())
    reader.tokens(json.dumps({"messages": messages, **more}), "f:3")
    return reader.left_out.line("data")


def printing(expression: str, template: str = CHATML) -> str:
    assert "message.content" in template
    return template.replace("message.content", expression)


def called(arguments: str) -> str:
    calls = "{% for c in message.tool_calls or [] %}[{{ c.function.name }}" + arguments + "]{% endfor %}"
    return CHATML.replace("{{ message.content }}", "{{ message.content or '' }}" + calls)


SPLIT = printing("message.content.split('</think>')[-1]")
LAST = (  # without the reasoning of earlier turns, and with tags
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
    "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}.\n"
    "{% endgeneration %}{% else %}{{ m.content }}\n{% endif %}{% endfor %}"
)
QUIET = (
    "{% for message in messages if message.role != 'system' %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "messages", "words"),
    [
        (SPLIT, [ASKED, answer(THOUGHT)], "text of the assistant in 1 of 1 conversations (f:3: '<think>two and two is"),
        (printing("message.content.split('</think>')[-1].lstrip()", TAGGED), [ASKED, answer(THOUGHT)], "'<think>two"),
        (printing("message.content[:9]"), [ASKED, answer("four, as the numbers say")], "(f:3: 'the numbers say')"),
        (printing("message.content | replace('four', '4')"), [ASKED, answer("It is four, surely")], "'four'"),
        (printing("message.content | upper"), [ASKED, answer("It is 1234567, you know")], "'It is 1234567, you know'"),
        (CHATML, [ASKED, answer("four", reasoning_content="I add")], "reasoning of the assistant in 1 of 1"),
        (CHATML, [ASKED, answer("four", thinking="I add")], "(f:3: 'I add')"),
        (LAST, [ASKED, answer("4", reasoning="I add"), ASKED, answer("5", reasoning="I guess")], "(f:3: 'I add')"),
        (CHATML, [ASKED, answer("four", tool_calls=[CALL])], "calls of the assistant in 1 of 1"),
        (called(""), [ASKED, answer("four", tool_calls=[CALL])], "(f:3: 'query')"),
        (called("{{ c.function.arguments.query }} query deep days"), [ASKED, answer("", tool_calls=[CALL])], "'17'"),
        (QUIET, [{"role": "system", "content": "Be brief."}, ASKED, answer("four")], "text of the system in 1 of 1"),
        (printing("message.content[:40]"), [{**ASKED, "content": "So " * 30}, answer("four")], "text of the user in 1"),
        (SPLIT, [ASKED, answer("<think>two and two is four</think>4")], "'<think>two and two is four</think>4'"),
    ],
)  # fmt: skip
def test_what_is_left_out_is_said(template: str, messages: list[dict[str, Any]], words: str) -> None:
    line = said(template, *messages)
    assert line.startswith("warning: data holds what is not in the text that a model sees: ")
    assert words in line
    assert "\n" not in line


def test_tools_that_a_template_does_not_know_are_said() -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    assert "tools in 1 of 1 conversations (f:3: 'look')" in said(CHATML, ASKED, answer("four"), tools=tools)
    assert not said("{{ tools | tojson }}" + CHATML, ASKED, answer("four"), tools=tools)


PARTED = (  # reasoning told from the answer, and moved
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% set parts = m.content.split('</think>') %}"
    "{% if parts | length > 1 %}<think>\n{{ parts[0].removeprefix('<think>') | trim }}\n</think><|im_mid|>\n\n"
    "{% endif %}"
    "{{ parts[-1].strip() }}<|im_end|>\n{% endfor %}" + PROMPT
)
OPENED = (  # the prompt ends with the beginning of the answer
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "messages"),
    [
        (CHATML, TALK),
        (TAGGED, TALK),
        (printing("message.content | trim"), TALK),
        (printing("message.content.split() | join(' ')"), TALK),
        (printing("message.content | tojson"), [*TALK, answer('"né"\n\t\\')]),
        (printing("message.content | tojson(ensure_ascii=true)"), [*TALK, answer('"né"\n\t\\')]),
        (FORGETFUL, [ASKED, answer("four", reasoning="I add\n\n")]),
        (PARTED, [ASKED, answer("<think>two and two is four</think>\n4")]),
        (PARTED, [ASKED, answer("<think>\n\ntwo and two\n</think>four")]),
        (OPENED, [ASKED, answer("<think>\nI add</think>four")]),
        (called("{{ c.function.arguments | tojson }}"), [ASKED, answer(None, tool_calls=[CALL])]),
        (called("{{ c.function.arguments }}"), [ASKED, answer(None, tool_calls=[CALL])]),
        ("{{ messages[0].content }}\n" + QUIET, [{**ASKED, "role": "system"}, ASKED, answer("four")]),
    ],
)  # fmt: skip
def test_white_space_and_other_places_are_nothing_left_out(template: str, messages: list[dict[str, Any]]) -> None:
    assert said(template, *messages) == ""


@pytest.mark.parametrize(
    "lost", [answer(None, tool_calls=[CALL]), answer("Yes, it is."), answer("", reasoning="I add", tool_calls=[CALL])]
)
def test_a_turn_that_would_be_trained_on_as_an_empty_one_is_refused(lost: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"^f:3: the chat template renders nothing of message 2, so an empty turn"):
        said(
            printing("'' if message.role == 'assistant' else message.content"),
            ASKED,
            lost,
            ASKED,
            answer("Yes, it is."),
        )


def test_characters_without_a_token_are_said(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    from terrace.data.chat_encoder import SpecialEncoder

    letters = {letter: number for number, letter in enumerate(["<unk>", *"abcdefghijklmnopqrstuvwxyz▁\n"])}
    for unknown in (None, "<unk>"):
        made = tokenizers.Tokenizer(tokenizers.models.BPE(letters, [], unk_token=unknown, fuse_unk=True))
        made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
        made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
        encoder = SpecialEncoder(made, TextTokens())
        line = said(CHATML, ASKED, answer("yes 山川 x☀"), encoder=encoder)
        assert (
            "characters of the assistant that the tokenizer has no token for in 1 of 1 conversations (f:3: '山川☀')"
            in line
        )
        assert said(CHATML, ASKED, answer("yes it is"), encoder=encoder) == ""
    made.normalizer = tokenizers.normalizers.StripAccents()
    assert said(CHATML, ASKED, answer("a\u0301 yes"), encoder=encoder) == ""


def test_the_line_is_said_of_data_and_of_their_cache(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    folder = write_tokenizer(tmp_path / "tokenizer", SPLIT)
    talks = [{"messages": [ASKED, answer(text)]} for text in ("four", THOUGHT, "five", "<think>hm, hm</think>6")]
    write_lines(tmp_path / "talks.jsonl", talks)
    config = DataConfig(
        path=str(tmp_path / "talks.jsonl"),
        format="chat",
        tokenizer=str(folder),
        cache=str(tmp_path / "cache"),
        documents="whole",
    )
    for _ in range(2):
        heard = list[str]()
        prepare_sources(config, load_tokenizer(folder), 256, heard.append)
        (line,) = [each for each in heard if "warning" in each]
        assert "text of the assistant in 2 of 4 conversations" in line
        assert "talks.jsonl:2: '<think>two and two is four</think>')" in line
    heard = []
    path = tmp_path / "talks.jsonl"
    next(iter(read_chats(path, load_tokenizer(folder), folder, "", progress=heard.append)))
    assert heard == []
    assert len(list(read_chats(path, load_tokenizer(folder), folder, "", progress=heard.append))) == 4
    assert heard == [line]
    pairs = [{"prompt": [ASKED], "chosen": [answer(THOUGHT)], "rejected": [answer("five")]}]
    write_lines(tmp_path / "pairs.jsonl", pairs)
    heard = []
    config = DataConfig(
        path=str(tmp_path / "pairs.jsonl"), format="pairs", tokenizer=str(folder), cache=str(tmp_path / "cache")
    )
    prepare_sources(config, load_tokenizer(folder), 256, heard.append)
    assert any("text of the assistant in 1 of 2 conversations" in each for each in heard)

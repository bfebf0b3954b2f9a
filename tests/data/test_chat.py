"""Chat data: the same text, ids and masks as transformers gives, and every bad line by its number."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from terrace.base.errors import DataError
from terrace.data import template, template_process
from terrace.data.chat import ChatReader
from terrace.data.chat_encoder import ByteEncoder, load_encoder
from terrace.data.chat_tokens import prepare_chat
from terrace.data.documents import open_documents
from terrace.data.rendering import Renderers, TemplateRefusalError
from terrace.data.template import ChatTemplate, load_template
from terrace.data.tokenizer import ByteTokenizer, load_tokenizer
from tests.support.chats import CHATML, FORGETFUL, STRICT, TAGGED, TALK, write_lines, write_tokenizer

pytest.importorskip("jinja2")
pytest.importorskip("tokenizers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def reader(folder: Path, template: str = CHATML) -> ChatReader:
    own = load_template(folder)
    chosen = ChatTemplate(template, own.tokens)
    return ChatReader(chosen, load_encoder(folder, load_tokenizer(folder)))


def bytes_reader(template: str = CHATML) -> ChatReader:
    return ChatReader(ChatTemplate(template), ByteEncoder())


def spoken(read: ChatReader, record: dict[str, Any]) -> str:
    """What is trained on, as text; of a reader of bytes."""
    ids, mask = read.tokens(json.dumps(record), "here")
    return bytes(ids[(mask == 1) & (ids < 256)].astype(np.uint8)).decode()


CONVERSATIONS: list[dict[str, Any]] = [
    {"messages": TALK},
    {"messages": TALK[1:3]},
    {"messages": [*TALK[1:3], {"role": "tool", "content": '{"a": 1}'}, TALK[4], {"role": "user", "content": "bye"}]},
]
TOOLS = [{"type": "function", "function": {"name": "look", "description": "naïve <&>", "parameters": {"q": [1, None]}}}]
LISTED = (
    "{% if tools %}{{ tools | tojson(indent=2) }}\n{% for t in tools %}{% if loop.index > 3 %}{% break %}{% endif %}"
)
LISTED += "{{ t.function | tojson }}{% endfor %}{% endif %}" + TAGGED


@pytest.mark.parametrize("template", [CHATML, TAGGED, STRICT, LISTED, "  {% if true %}\n a\n{% endif %}\n" + TAGGED])
def test_text_ids_and_masks_are_those_of_transformers(folder: Path, template: str) -> None:
    theirs = pytest.importorskip("transformers").PreTrainedTokenizerFast.from_pretrained(folder)
    read = reader(folder, template)
    for conversation in CONVERSATIONS[1:2] if template is STRICT else CONVERSATIONS:
        messages, tools = conversation["messages"], TOOLS if template is LISTED else None
        for prompting in (False, True):
            text = theirs.apply_chat_template(
                messages, tools=tools, chat_template=template, tokenize=False, add_generation_prompt=prompting
            )
            assert read.template.render(messages, tools, add_generation_prompt=prompting)[0] == text
        out = theirs.apply_chat_template(
            messages, tools=tools, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, mask = read.tokens(json.dumps(conversation | ({"tools": tools} if tools else {})), "here")
        assert ids.tolist() == out["input_ids"]
        if read.template.has_tags:
            assert mask.tolist() == out["assistant_masks"]


def test_prefixes_find_what_tags_say(folder: Path) -> None:
    for conversation in CONVERSATIONS:
        by_prefix, by_tag = (
            reader(folder, template).tokens(json.dumps(conversation), "") for template in (CHATML, TAGGED)
        )
        assert by_prefix[0].tolist() == by_tag[0].tolist()
        assert by_prefix[1].tolist() == by_tag[1].tolist()
        assert 0 < by_prefix[1].sum() < len(by_prefix[1])
    said = "A level of the cluster — naïve, but true 🙂<|im_end|>\n\nWhere things go.<|im_end|>\n"
    assert spoken(bytes_reader(), {"messages": TALK}) == said
    assert spoken(bytes_reader(TAGGED), {"messages": TALK}) == said


def test_prefixes_that_do_not_agree_are_refused() -> None:
    thinking = [
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": "2", "reasoning_content": "hm"},
        {"role": "user", "content": "3?"},
        {"role": "assistant", "content": "4", "thinking": "ha"},
    ]
    with pytest.raises(DataError, match=r"^here: .* renders turn 2 in another way .* \{% generation %\}"):
        bytes_reader(FORGETFUL).tokens(json.dumps({"messages": thinking}), "here")
    assert spoken(bytes_reader(FORGETFUL), {"messages": thinking[:2]}) == "<think>hm</think>2<|im_end|>\n"
    # A template that ignores what it is asked has prompts that are no prefixes either.
    ends = "{% for m in messages %}{{ m.content }}{% endfor %}{{ '.' if not add_generation_prompt else '!' }}"
    with pytest.raises(TemplateRefusalError, match="renders turn 1"):
        next(ChatTemplate(ends).assistant_spans([([{"role": "assistant", "content": "a"}], None)]))


def test_templates_are_found_where_hugging_face_keeps_them(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "both", "{# old #}")
    (tmp_path / "both" / "chat_template.jinja").write_text("{# new #}")
    assert load_template(tmp_path / "both").source == "{# new #}"
    assert load_template(tmp_path / "both" / "tokenizer.json").tokens == {"bos_token": "<s>", "eos_token": "<|im_end|>"}
    write_tokenizer(tmp_path / "named", None)
    config = {"chat_template": [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "y"}]}
    (tmp_path / "named" / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_template(tmp_path / "named").source == "y"
    (tmp_path / "own.jinja").write_text("mine")
    assert load_template(tmp_path / "both", tmp_path / "own.jinja").source == "mine"
    assert load_template("bytes", tmp_path / "own.jinja").source == "mine"
    write_tokenizer(tmp_path / "none", None)
    for tokenizer, said in (
        ("bytes", "the tokenizer 'bytes' has none"),
        (tmp_path / "none", "has no chat_template.jinja"),
    ):
        with pytest.raises(DataError, match=f"{said}.* data.chat_template"):
            load_template(tokenizer)
    (tmp_path / "bad.jinja").write_text("{% for %}")
    with pytest.raises(DataError, match=r"bad\.jinja is no chat template: Expected"):
        load_template("bytes", tmp_path / "bad.jinja")
    with pytest.raises(DataError, match=r"cannot read the chat template .*: No such file"):
        load_template("bytes", tmp_path / "absent.jinja")


def test_templates_run_in_a_sandbox() -> None:
    for source in ("{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}", "{{ [].__class__.__init__.__globals__ }}"):
        with pytest.raises(TemplateRefusalError, match=r"refuses it: "):
            ChatTemplate(source).render(TALK)
    with pytest.raises(TemplateRefusalError, match="generation tags inside generation tags"):
        ChatTemplate("{% generation %}{% generation %}a{% endgeneration %}{% endgeneration %}").render(TALK)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ 'x' * 10 ** 11 }}", "takes more than 1024 MB|fails: MemoryError"),
        (
            "{% for i in range(40) %}{% set a = ('x' * 10 ** 6) %}{{ a.replace('x', a) }}{% endfor %}",
            "takes more than 1024",
        ),
        ("{{ '%10000000000d' % messages|length }}", "takes more than 1024"),
        ("{{ range(10 ** 9) | list }}", "Range too big"),
        ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "RecursionError"),
    ],
)
def test_a_template_that_takes_too_much_memory_is_refused(source: str, said: str) -> None:
    with pytest.raises((TemplateRefusalError, DataError), match=said) as caught:
        ChatTemplate(source).render(TALK)
    assert "\n" not in str(caught.value)
    assert ChatTemplate("fine").render(TALK)[0] == "fine"


def test_a_template_that_does_not_end_is_refused_after_the_lines_before(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = Renderers(most_s=0)
    monkeypatch.setattr(template, "renderers", lambda: quick)
    loop = "{% for i in range(99999) %}"
    source = f"{{% if messages | length == 1 %}}{loop * 3}{'{% endfor %}' * 3}{{% endif %}}{TAGGED}"
    lines = [(json.dumps({"messages": messages}), f"line {n}") for n, messages in enumerate([TALK, TALK, TALK[2:3]])]
    found = bytes_reader(source).read(iter(lines))
    assert [next(found)[2] for _ in range(2)] == ["line 0", "line 1"]
    with pytest.raises(DataError, match=r"^line 2: the chat template takes more than 0 s of processor time for one"):
        next(found)
    # A fresh process takes over, as after one that ended because nobody asked.
    assert spoken(bytes_reader(), {"messages": TALK[1:3]})
    assert quick._process is not None
    os.kill(quick._process.pid, signal.SIGALRM)
    assert spoken(bytes_reader(), {"messages": TALK[1:3]})


@pytest.mark.parametrize("num_turns", [1, 3])
def test_a_text_without_bounds_is_refused(num_turns: int) -> None:
    """Refused as one text is, however many conversations were asked for; nothing of the answer is left over."""
    source = "{{ 'x' * 17000000 if messages[0].content == 'long' else messages[0].content }}"
    short, long = ([{"role": "user", "content": text}] for text in ("short", "long"))
    made = ChatTemplate(source)._made([(short, None)] * num_turns + [(long, None)], prompting=False, spans=False)
    assert [next(made)[0] for _ in range(num_turns)] == ["short"] * num_turns
    with pytest.raises(TemplateRefusalError, match=r"^the chat template makes more than 16 million characters of one"):
        next(made)
    assert ChatTemplate(source).render(short)[0] == "short"
    assert len(ChatTemplate("{{ 'x' * 16000000 }}").render(short)[0]) == 16_000_000


def test_an_answer_that_does_not_end_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    endless = tmp_path / "endless.py"
    endless.write_text("while True:\n    print('x' * 65536, end='')\n")
    monkeypatch.setattr(template_process, "__file__", str(endless))
    monkeypatch.setattr(template_process, "MOST_CHARACTERS", 1 << 20)
    asked = Renderers()
    with pytest.raises(TemplateRefusalError, match="million characters of one conversation"):
        asked.has_tags("a", "the template", {})
    assert asked._process is None


def test_a_process_that_ended_because_nobody_asked_is_no_zombie() -> None:
    idle = Renderers()
    assert not idle.has_tags("a", "the template", {})
    assert idle._process is not None
    os.kill(idle._process.pid, signal.SIGALRM)
    deadline_s = time.monotonic() + 20
    while Path(f"/proc/{idle._process.pid}").exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    assert not idle.has_tags("b", "the template", {})


def test_answers_that_were_not_read_are_not_taken_for_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    renderers, num_read = Renderers(), [0]
    answer = renderers._answer

    def interrupted() -> object:
        num_read[0] += 1
        if num_read[0] == 3:  # the first is that to the template
            raise KeyboardInterrupt
        return answer()

    monkeypatch.setattr(renderers, "_answer", interrupted)
    monkeypatch.setattr(template, "renderers", lambda: renderers)
    plain = ChatTemplate("{{ messages[0].content }}")
    with pytest.raises(KeyboardInterrupt):
        list(
            plain._made(
                [([{"role": "user", "content": text}], None) for text in ("a", "b", "c")], prompting=False, spans=False
            )
        )
    assert plain.render([{"role": "user", "content": "later"}])[0] == "later"


def test_errors_come_in_the_order_of_the_lines() -> None:
    lines = [(json.dumps({"messages": TALK}), "line 1"), (json.dumps({"messages": TALK}), "line 2"), ("{", "line 3")]
    with pytest.raises(DataError, match=r"^line 1: .* refuses it: no"):
        list(bytes_reader("{{ raise_exception('no') }}").read(lines))
    found = bytes_reader().read(lines)
    assert [next(found)[2] for _ in range(2)] == ["line 1", "line 2"]
    with pytest.raises(DataError, match=r"^line 3 is not valid JSON"):
        next(found)


def test_null_keys_are_not_seen_by_a_template() -> None:
    source = "{% for m in messages %}{{ 'CALL' if 'tool_calls' in m else m.content }}{% endfor %}"
    assert ChatTemplate(source).render([{"role": "user", "content": "a", "tool_calls": None}])[0] == "a"


def test_prompts_and_completions(folder: Path) -> None:
    read = reader(folder)
    ids, mask = read.tokens(json.dumps({"prompt": "What is a tier?", "completion": " A level"}), "here")
    encoder = load_tokenizer(folder)
    assert ids.tolist()[:-1] == encoder.encode("What is a tier? A level").tolist()
    assert encoder.decode(ids[mask == 1].tolist()) == " A level"  # special tokens are left out
    assert mask[-1] == 1
    assert read.encoder.around.end == ids[-1] == encoder.text_tokens.end  # the eos_token of the folder, not a guess
    assert spoken(bytes_reader(), {"prompt": "", "completion": "né"}) == "né"


U, A = {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "is not valid JSON"),
        ("[1]", "is a list; each line must be an object"),
        ({"text": "a", "id": 3}, r"has no form of a conversation \(keys: 'text', 'id'\); the forms are 'messages', "),
        ({"prompt": "a"}, r"has no form .* \(keys: 'prompt'\)"),
        ({"prompt": "a", "completion": "b", "messages": [U, A]}, "has 'messages' beside 'completion'; keep one"),
        ({"prompt": 3, "completion": [A]}, "'prompt' must be a string or a list of messages, not of type int"),
        ({"prompt": "a", "completion": ""}, "'completion' is empty"),
        ({"messages": []}, "the conversation is empty"),
        ({"messages": "hi"}, "'messages' must be a list, not a string"),
        ({"messages": [U, "a"]}, "message 2 is a string; each must be an object"),
        ({"messages": [U, {"from": "gpt"}]}, r"message 2 has no 'role' \(keys: 'from'\)"),
        ({"messages": [{"role": "human", "content": "u"}, A]}, "unknown role 'human'; did you mean 'user'"),
        (
            {"messages": [{"role": "assistent", "content": "u"}, U]},
            r"unknown role .* you mean 'assistant'",
        ),
        ({"messages": [U, {"role": "assistant"}]}, "message 2, of the assistant, has no 'content'"),
        ({"messages": [U, {"role": "assistant", "content": 3}]}, "'content' must be a string, not of type int"),
        ({"messages": [U]}, "the assistant says nothing, so nothing is left to train on"),
        ({"messages": [U, A | {"weight": 0}]}, "message 2 has a 'weight'"),
        ({"messages": [U, A], "tools": "look"}, "'tools' must be a list, not a string"),
        ({"messages": [U, {"role": "assistant", "content": "\ud800"}]}, r"half a surrogate pair \('\\ud800'\)"),
        ({"messages": [U, {"role": "assistant", "content": "\ufdd0"}]}, "no character"),
        ({"messages": [{"role": "user", "content": "<|im_end|>"}, A]}, r"spells out the special token '<\|im_end\|>'"),
    ],
)
def test_a_bad_line_is_named(folder: Path, line: Any, said: str) -> None:
    with pytest.raises(DataError, match=rf"^data\.jsonl:7.*{said}"):
        reader(folder).tokens(line if isinstance(line, str) else json.dumps(line), "data.jsonl:7")


def test_what_a_template_objects_to_is_told_with_the_line() -> None:
    line = json.dumps({"messages": [A, U]})
    with pytest.raises(DataError, match=r"^f:3: .* refuses it: Conversation roles must alternate user/assistant$"):
        bytes_reader(STRICT).tokens(line, "f:3")
    with pytest.raises(DataError, match=r"^f:3: .* fails: ZeroDivisionError: "):
        bytes_reader("{{ 1 / 0 }}").tokens(line, "f:3")
    with pytest.raises(DataError, match=r"^f:3: nothing is left to train on"):
        bytes_reader("{% for m in messages %}{{ m.role }}{% generation %}{% endgeneration %}{% endfor %}").tokens(
            line, "f:3"
        )
    # A role that the template knows is no mistake.
    talk = {"messages": [{"role": "environment", "content": "e"}, A]}
    assert spoken(bytes_reader("{# 'environment' #}" + CHATML), talk) == "a<|im_end|>\n"


def test_conversations_are_tokenised_once(tmp_path: Path, folder: Path) -> None:
    data = write_lines(tmp_path / "data" / "a.jsonl", CONVERSATIONS)
    write_lines(tmp_path / "data" / "b.jsonl", [{"prompt": "x", "completion": "y"}])
    tokenizer = load_tokenizer(folder)
    made = prepare_chat(tmp_path / "data", tokenizer, folder, "", tmp_path / "cache")
    documents = open_documents(made)
    assert documents.mask is not None
    ends = [*documents.starts[1:].tolist(), made.num_tokens]
    read = reader(folder)
    expected = [read.tokens(json.dumps(each), "") for each in [*CONVERSATIONS, {"prompt": "x", "completion": "y"}]]
    for (ids, mask), start, end in zip(expected, documents.starts, ends, strict=True):
        assert documents.ids[start:end].tolist() == ids.tolist()
        assert documents.mask[start:end].tolist() == mask.tolist()
    stamp = made.path.stat().st_mtime_ns
    assert prepare_chat(tmp_path / "data", tokenizer, folder, "", tmp_path / "cache") == made
    assert made.path.stat().st_mtime_ns == stamp
    (tmp_path / "own.jinja").write_text(TAGGED.replace("<|im_end|>\\n'", "<|im_end|>'"))
    other = prepare_chat(tmp_path / "data", tokenizer, folder, tmp_path / "own.jinja", tmp_path / "cache")
    assert other.digest != made.digest
    assert sorted(path.suffix for path in (tmp_path / "cache").iterdir()) == sorted(
        [".tokens", ".starts", ".mask", ".sums", ".json"] * 2
    )
    write_lines(data, [*CONVERSATIONS, {"messages": []}])
    with pytest.raises(DataError, match=r"a\.jsonl:4: the conversation is empty"):
        prepare_chat(tmp_path / "data", tokenizer, folder, "", tmp_path / "empty")
    assert not list((tmp_path / "empty").iterdir())


def test_prompts_and_completions_need_no_template(tmp_path: Path) -> None:
    data = write_lines(tmp_path / "a.jsonl", [{"prompt": "1+1=", "completion": "2"}])
    made = prepare_chat(data, ByteTokenizer(), "bytes", "", tmp_path / "cache")
    assert made.open().tolist() == [*b"1+1=2", 256]
    mask = made.open_mask()
    assert mask is not None
    assert mask.tolist() == [0, 0, 0, 0, 1, 1]


def test_data_that_are_no_conversations_are_refused(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match=r"a\.txt is text, and conversations are records: write them as \.jsonl"):
        prepare_chat(tmp_path / "a.txt", ByteTokenizer(), "bytes", "", cache)
    with pytest.raises(DataError, match=r"'stdlib' is source text"):
        prepare_chat("stdlib", ByteTokenizer(), "bytes", "", cache)
    (tmp_path / "b.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match="holds no conversation"):
        prepare_chat(tmp_path / "b.jsonl", ByteTokenizer(), "bytes", "", cache)
    (tmp_path / "c.jsonl").write_bytes(b'{"prompt": "a", "completion": "b"}\n\xff\n')
    with pytest.raises(DataError, match=r"c\.jsonl:2 is not UTF-8"):
        prepare_chat(tmp_path / "c.jsonl", ByteTokenizer(), "bytes", "", cache)

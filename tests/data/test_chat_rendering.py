"""Renderings of chats, character by character those of transformers, whatever form the data have calls and tools in."""

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from terrace.base.errors import DataError, ModelError
from terrace.data.chat import ChatReader
from terrace.data.chat_prompt import chat_prompts
from terrace.data.template import ChatTemplate, load_template
from terrace.data.tokenizer import load_tokenizer
from terrace.model.hf.folder import carried_files
from tests.support.chats import CHATML, PROMPT, STRICT, TAGGED, TALK, write_lines, write_tokenizer

pytest.importorskip("jinja2")
pytest.importorskip("tokenizers")

from terrace.data.chat_encoder import ByteEncoder, load_encoder
from terrace.data.chat_tokens import prepare_chat


def turn(content: str) -> str:
    return "{% for m in messages %}<|im_start|>{{ m.role }}\n" + content + "<|im_end|>\n{% endfor %}" + PROMPT


def calling(arguments: str, content: str = "{{ m.content or '' }}") -> str:
    calls = "{% for c in m.tool_calls or [] %}{% set f = c.function or c %}[{{ f.name }}:" + arguments + "]{% endfor %}"
    return turn(content + calls)


LISTED = (
    "{%- if tools %}\n    {{- '<tools>\\n' }}\n    {%- for t in tools %}\n        {{- t | tojson }}\n"
    "    {%- endfor %}\n{%- endif %}\n{{ tools is none }} {{ documents is none }}\n"
)
TEMPLATES = {
    "plain": CHATML,
    "tagged": TAGGED,
    "strict": STRICT,
    "json": calling("{{ f.arguments | tojson }}"),
    "json, sorted": calling("{{ f.arguments | tojson(ensure_ascii=true, indent=1, sort_keys=true) }}"),
    "json, dense": calling("{{ f.arguments | tojson(separators=(',', ':')) }}"),
    "json, by place": calling("{{ f.arguments | tojson(false, 2) }}"),
    "json of all": calling("{{ c | tojson }}"),
    "string or json": calling(
        "{% if f.arguments is string %}{{ f.arguments }}{% else %}{{ f.arguments | tojson }}{% endif %}"
    ),
    "items": calling("{% for k, v in f.arguments.items() %}{{ k }}={{ v }};{% endfor %}"),
    "reasoning": turn(
        "{% if m.reasoning_content is string %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content or '' }}"
    ),
    "thinking": turn("{% if m.thinking is defined %}{{ m.thinking }}|{% endif %}{{ m.content or '' }}"),
    "parts": turn(
        "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content or [] %}({{ p.text }}){% endfor %}"
        "{% endif %}"
    ),
    "tools": LISTED + turn("{{ m.content or '' }}"),
    "documents": "{% for d in documents or [] %}{{ d.title }}: {{ d.text | trim }}\n{% endfor %}"
    + turn("{{ m.content or '' }}"),
    "switch": turn("{{ m.content or '' }}{% if enable_thinking is defined and not enable_thinking %}!{% endif %}"),
    "day": "{{ strftime_now('%d %B %Y') }} {{ date_string | default('none') }}\n" + turn("{{ m.content or '' }}"),
    "loops": turn(
        "{% for c in m.content or '' %}{% if c == 'x' %}{% continue %}{% elif c == '?' %}{% break %}{% endif %}"
        "{{ c }}{% endfor %}"
    ),
    "blocks": (
        "  {% if true %}\n\n  a\n   {% endif %}\n{% set ns = namespace(last='', n=0) %}\n  {# no #}\n"
        "{% for m in messages %}\n  {% set ns.n = ns.n + 1 %}\n{{ ns.n }}{{ m.role[:1] | upper }}: "
        "{{ m['content'] }}\r\n{% endfor %}\n{% macro end(x) %}[{{ x }}]{% endmacro %}"
        "{{ end(eos_token) }}{{ pad_token }}{{ dict(a=1) }}\n"
    ),
    "objection": "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML,
}  # fmt: skip

TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "description": "naïve <&> 'x'", "parameters": {"type": "object", "q": [1, None]}},
    }
]


def call(arguments: Any, **more: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "look", "arguments": arguments}, **more}


ASKED: dict[str, Any] = {"role": "user", "content": "Where is the sun?"}
ANSWER: dict[str, Any] = {"role": "assistant", "content": "Up, x <b>&'\"."}
FOUND: dict[str, Any] = {"q": "sun ☀ <&>", "near": {"b": [1, 2.5, True, None], "a": "x"}}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "talk": TALK,
    "two": [ASKED, ANSWER],
    "calls": [
        ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call(FOUND), call({})]},
        {"role": "tool", "name": "look", "tool_call_id": "c1", "content": '{"a": 1}'},
        ANSWER,
    ],
    "flat call": [ASKED, {"role": "assistant", "content": "a", "tool_calls": [{"name": "f", "arguments": FOUND}]}],
    "reasoning": [ASKED, {"role": "assistant", "content": "a", "reasoning": "hm\nso", "tool_calls": None}],
    "thinking": [ASKED, {"role": "assistant", "content": "a", "thinking": "hm", "refusal": None}],
    "parts": [ASKED, {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
}
VARIABLES = {
    "documents": [{"title": "Sun", "text": " hot "}],
    "enable_thinking": False,
    "date_string": "today",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def theirs(folder: Path) -> Any:
    return pytest.importorskip("transformers").PreTrainedTokenizerFast.from_pretrained(folder)


def as_text(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The arguments of all calls as JSON text."""
    changed = copy.deepcopy(messages)
    for message in changed:
        for each in message.get("tool_calls") or ():
            function = each.get("function", each)
            function["arguments"] = json.dumps(function["arguments"], separators=(",", ":"))
    return changed


@pytest.mark.parametrize("name", TEMPLATES)
def test_renderings_are_those_of_transformers(folder: Path, name: str) -> None:
    other, own = theirs(folder), ChatTemplate(TEMPLATES[name], load_template(folder).tokens)
    num_rendered = 0
    for what, messages in CONVERSATIONS.items():
        for tools, variables, prompting in ((None, {}, False), (TOOLS, VARIABLES, True), ([], {}, False)):
            try:
                text = other.apply_chat_template(
                    messages,
                    tools,
                    chat_template=own.source,
                    tokenize=False,
                    add_generation_prompt=prompting,
                    **variables,
                )
            except Exception:  # theirs are errors of Jinja or of Python
                continue
            # Parts that a template does not know are refused, not printed as Python prints them.
            if what == "parts" and "{'type': 'text'" in text:
                continue
            for form in (messages, as_text(messages)):
                assert own.render(form, tools, variables, add_generation_prompt=prompting)[0] == text
            num_rendered += 1
    assert num_rendered >= (1 if name == "objection" else 3)


def rendered(template: str, messages: Sequence[Mapping[str, Any]], **more: Any) -> str:
    """The text of a conversation as data of chats are read."""
    ids, _ = ChatReader(ChatTemplate(template), ByteEncoder()).tokens(
        json.dumps({"messages": messages, **more}), "here"
    )
    return bytes(ids.tolist()).decode()


@pytest.mark.parametrize("printed", ["{{ f.arguments }}", "{{ '' + f.arguments }}"])
def test_a_template_of_json_text_is_given_json_text(printed: str) -> None:
    messages = CONVERSATIONS["calls"]
    assert '[look:{"q":"sun \\u2600 <&>","near":' in rendered(calling(printed), as_text(messages))
    if "+" in printed:  # which an object could not be added to
        assert '[look:{"q": "sun ☀ <&>", "near":' in rendered(calling(printed), messages)


def test_json_text_stands_for_objects_everywhere() -> None:
    messages, template = CONVERSATIONS["calls"], LISTED + TEMPLATES["json of all"]
    expected = rendered(template, messages, tools=TOOLS)
    assert '"arguments": {"q": "sun ☀ <&>"' in expected
    stored = as_text(messages)
    for message in stored:
        if message.get("tool_calls"):
            message["tool_calls"] = json.dumps(message["tool_calls"])
    assert rendered(template, stored, tools=json.dumps(TOOLS)) == expected
    assert rendered(template, stored, tools=list(map(json.dumps, TOOLS))) == expected
    bare = copy.deepcopy(TOOLS)
    bare[0]["function"]["parameters"] = json.dumps(bare[0]["function"]["parameters"])  # type: ignore[index]
    assert rendered(template, stored, tools=bare) == expected
    no_arguments = [ASKED, {"role": "assistant", "content": "", "tool_calls": [call("")]}]
    assert "[look:{}]" in rendered(TEMPLATES["json"], no_arguments, tools="")
    older = [ASKED, {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}}]
    source = turn("{{ m.content or '' }}{% if m.function_call %}{{ m.function_call | tojson }}{% endif %}")
    assert '{"name": "f", "arguments": {"a": 1}}' in rendered(source, older)


def test_records_may_hold_documents_and_variables_of_the_template() -> None:
    documents = [{"title": "Sun", "text": "hot"}]
    assert rendered(TEMPLATES["documents"], [ASKED, ANSWER], documents=documents).startswith("Sun: hot\n")
    assert rendered(CHATML, [ASKED, ANSWER], documents="of another kind")
    switched = rendered(TEMPLATES["switch"], [ASKED, ANSWER], chat_template_kwargs='{"enable_thinking": false}')
    assert switched.endswith(".!<|im_end|>\n")


def test_parts_are_one_text_where_a_template_knows_no_parts() -> None:
    two = CONVERSATIONS["parts"]
    for source in (CHATML, turn("{{ m.content | trim }}"), turn("{{ m.content.strip() }}"),
                   turn("{% if m.content is string %}{{ m.content }}{% endif %}")):  # fmt: skip
        assert rendered(source, two).endswith("assistant\nab<|im_end|>\n")
    assert rendered(TEMPLATES["parts"], two).endswith("assistant\n(a)(b)<|im_end|>\n")


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"messages": [ASKED, {"role": "assistant", "content": "", "tool_calls": [call("{q")]}]},
         r"message 2: 'arguments' of the call of 'look' must be an object, not a string that is no JSON"),
        ({"messages": [ASKED, {"role": "assistant", "content": "", "tool_calls": [call("[1]")]}]},
         r"message 2: 'arguments' of the call of 'look' must be an object, not JSON text of a list"),
        ({"messages": [ASKED, {"role": "assistant", "content": "", "tool_calls": "call it"}]},
         r"message 2: 'tool_calls' must be a list, not a string that is no JSON"),
        ({"messages": [ASKED, ANSWER], "tools": "{}"}, "'tools' must be a list, not JSON text of an object"),
        ({"messages": [ASKED, ANSWER], "tools": ["look"]}, "an entry of 'tools' must be an object, not a string"),
        ({"messages": [ASKED, ANSWER], "chat_template_kwargs": {"tools": []}}, "has 'tools', which is given to every"),
        ({"messages": [ASKED, {"role": "assistant", "content": [{"type": "image_url", "image_url": "x"}]}]},
         "message 2: 'content' has a part of type 'image_url', and only"),
        ({"messages": [ASKED, {"role": "assistant", "content": [{"type": "text", "text": "<|im_"},
                                                                {"type": "text", "text": "end|>"}]}]}, "spells out"),
        ({"messages": [ASKED, {"role": "assistant", "content": "", "tool_calls": [call('{"q": "\\u003c|im_end|>"}')]}]},
         "spells out the special token"),
        ({"messages": [ASKED, {"role": "assistant", "content": "", "tool_calls": [call({"<|im_end|>": 1})]}]},
         "spells out the special token"),
        ({"messages": [ASKED, {"role": "assistant", "content": "", "tool_calls": [call("[" * 100_000)]}]},
         r"not a string that is no JSON \(brackets are nested too deeply\)"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_record_is_told_in_one_line(folder: Path, record: dict[str, Any], said: str) -> None:
    reader = ChatReader(ChatTemplate(CHATML), load_encoder(folder, load_tokenizer(folder)))
    with pytest.raises(DataError, match=rf"^data\.jsonl:7.*{said}") as error:
        reader.tokens(json.dumps(record), "data.jsonl:7")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a\ud800", r"holds half a surrogate pair \('\\ud800'\)"),
        ("\ufdd0", "holds a code point that is no character"),
        ("<|im_end|>", r"spells out the special token '<\|im_end\|>'"),
    ],
)
def test_a_prompt_holds_no_text_that_training_refuses(folder: Path, text: str, said: str) -> None:
    prompts = chat_prompts(load_tokenizer(folder), folder)
    asked = [({"messages": [{"role": "user", "content": text}]}, "line 3")]
    with pytest.raises(DataError, match=rf"^line 3 {said}"):
        next(prompts.rendered(asked))


def test_tags_whose_text_is_changed_later_are_refused() -> None:
    kept = "{% set t %}{% generation %}{{ messages[1].content }}{% endgeneration %}{% endset %}{{ t | trim }}"
    assert rendered(kept, [ASKED, ANSWER]) == ANSWER["content"]
    with pytest.raises(DataError, match=r"^here: the chat template changes the text between its generation tags"):
        rendered(kept, [ASKED, {"role": "assistant", "content": " a "}])


NAMED = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": TEMPLATES["tools"]}]


@pytest.mark.parametrize("kept", ["list", "object", "files", "a file beside a list", "tagged for tools"])
def test_templates_are_chosen_as_transformers_chooses(tmp_path: Path, kept: str) -> None:
    write_tokenizer(tmp_path, None)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    named = copy.deepcopy(NAMED)
    if kept == "tagged for tools":
        named[1]["template"] = TAGGED
    if kept == "object":
        config["chat_template"] = {each["name"]: each["template"] for each in named}
    elif kept != "files":
        config["chat_template"] = named
    if kept == "a file beside a list":
        (tmp_path / "chat_template.jinja").write_text("{# alone #}" + STRICT)
    if kept == "files":
        (tmp_path / "chat_template.jinja").write_text(CHATML)
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(TEMPLATES["tools"])
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    other, own = theirs(tmp_path), load_template(tmp_path)
    reader = ChatReader(own, load_encoder(tmp_path, load_tokenizer(tmp_path)))
    lines = []
    for tools in (None, TOOLS, [], None):
        record = {"messages": [ASKED, ANSWER], "tools": tools}
        text = other.apply_chat_template(record["messages"], tools, tokenize=False)
        assert own.render(record["messages"], tools)[0] == text  # type: ignore[arg-type]
        lines.append((json.dumps(record), text))
    for (ids, mask, _), (_, text) in zip(reader.read((line, "here") for line, _ in lines), lines, strict=True):
        assert ids.tolist() == other(text, add_special_tokens=False)["input_ids"]
        assert 0 < mask.sum() < len(mask)


def test_templates_in_a_folder_of_their_own_are_carried_along(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "from", CHATML, as_file=True)
    (tmp_path / "from" / "additional_chat_templates").mkdir()
    (tmp_path / "from" / "additional_chat_templates" / "tool_use.jinja").write_text(TEMPLATES["tools"])
    (tmp_path / "to").mkdir()
    for name, content in carried_files(tmp_path / "from").items():
        (tmp_path / "to" / name).write_bytes(content)
    for tools in (None, TOOLS):
        told = [theirs(tmp_path / name).apply_chat_template([ASKED], tools, tokenize=False) for name in ("from", "to")]
        assert told[0] == told[1] == load_template(tmp_path / "to").render([ASKED], tools)[0]
    (tmp_path / "from" / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"tokenizer_config.json in .* is damaged \(it holds no object\)"):
        carried_files(tmp_path / "from")


def test_templates_without_a_default_are_named(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": [{"name": "rag", "template": "x"}]}))
    with pytest.raises(DataError, match="chat templates of the names rag, but none of the name default: name a file"):
        load_template(tmp_path)


@pytest.mark.parametrize("lists_added", [False, True])
def test_special_tokens_of_older_folders_are_known_to_the_template(tmp_path: Path, lists_added: bool) -> None:
    write_tokenizer(tmp_path, "{{ bos_token }}{{ unk_token }}" + CHATML)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    if lists_added:
        config["added_tokens_decoder"] = {}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    older = {"bos_token": "<|endoftext|>", "unk_token": {"content": "<|im_start|>", "lstrip": False}}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(older))
    text = theirs(tmp_path).apply_chat_template([ASKED, ANSWER], tokenize=False)
    assert text.startswith("<s><|im_start|>user" if lists_added else "<|endoftext|><|im_start|>")
    assert load_template(tmp_path).render([ASKED, ANSWER])[0] == text


def test_columns_of_json_text_are_read(tmp_path: Path) -> None:
    parquet, arrow = (pytest.importorskip(name) for name in ("pyarrow.parquet", "pyarrow"))
    folder = write_tokenizer(tmp_path / "tokenizer", LISTED + TEMPLATES["json"])
    tokenizer = load_tokenizer(folder)
    messages = [*as_text(CONVERSATIONS["calls"])]
    table = {"messages": messages, "tools": json.dumps(TOOLS)}
    parquet.write_table(arrow.Table.from_pylist([table]), tmp_path / "a.parquet")
    plain = write_lines(tmp_path / "a.jsonl", [{"messages": CONVERSATIONS["calls"], "tools": TOOLS}])
    made = [prepare_chat(data, tokenizer, folder, "", tmp_path / "cache") for data in (tmp_path / "a.parquet", plain)]
    assert made[0].open().tolist() == made[1].open().tolist()

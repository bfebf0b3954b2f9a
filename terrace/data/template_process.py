"""The process that renders chat templates, with limits of memory and processor time; run as a program.

A template is an untrusted Jinja program. The sandbox keeps it from Python, but not from endless loops or unbounded
text, and a filter that does not return can only be ended with its process. So templates run in a child process, which
its parent (terrace.data.rendering) asks in lines of JSON, and which ends with the parent. It imports nothing of
Terrace.

A conversation is an object with the `forms` of its messages (terrace.data.message_forms), of which the first that the
template can print is used, its `tools`, and further `variables` of the template.
"""

import json
import resource
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

BEGIN, END = "\ufdd0", "\ufdd1"  # code points that no text may hold: Unicode keeps them for marks inside a program
MEMORY_BYTES = 1 << 30  # of addresses: Python and Jinja take some 40 MB, a long conversation a few
MOST_CHARACTERS = 16 << 20  # of an answer in JSON, ASCII alone: some 4 million tokens of English, 2 million of Chinese
PROCESSOR_S = 3  # of one conversation, which takes milliseconds
IDLE_S = 60  # then SIGALRM ends it: its parent may train for weeks
TOO_LONG = (
    f"the chat template makes more than {MOST_CHARACTERS >> 20} million characters of one conversation: repair it, or "
    "shorten the conversation"
)
Messages = Sequence[Mapping[str, Any]]
REASONING = ("reasoning_content", "thinking", "reasoning")  # one thing under the names that templates and data use


class RefusedError(Exception):
    """A template refuses a conversation, or cannot be used."""


class Renderer:
    """A compiled template. Raises `RefusedError` for an invalid source."""

    def __init__(self, source: str, name: str, tokens: Mapping[str, Any]) -> None:
        from jinja2 import TemplateError, nodes
        from jinja2.ext import Extension, LoopControlExtension
        from jinja2.parser import Parser
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        self._is_marking = False
        self._now = datetime.now()

        class Generation(Extension):
            tags = {"generation"}  # noqa: RUF012  # as Jinja has it

            def parse(self, parser: Parser) -> nodes.Node:
                line = next(parser.stream).lineno
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

            def _mark(_, caller: Any) -> str:  # noqa: N805  # `self` is the renderer
                return f"{BEGIN}{caller()}{END}" if self._is_marking else str(caller())

        def refuse(message: str) -> None:
            raise TemplateError(message)

        # The sandbox keeps a downloaded template from running arbitrary Python. Published templates expect trimming.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, LoopControlExtension]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = lambda form: self._now.strftime(form)
        self._name, self._tokens, self._template_error = name, tokens, TemplateError
        try:
            self._template = environment.from_string(source)
            calls = environment.parse(source).find_all(nodes.CallBlock)
            self.has_tags = any(isinstance(call.call.node, nodes.ExtensionAttribute) for call in calls)
        except (TemplateError, RecursionError) as error:
            raise RefusedError(f"{name} is no chat template: {_one_line(error)}") from error

    def render(self, conversation: Mapping[str, Any], prompting: bool) -> tuple[str, list[tuple[int, int]] | None]:
        """Text of a conversation, and the spans between generation tags, None if the template has no tags."""
        messages, text = self._settled(conversation, prompting)
        return text, self._tagged(messages, conversation, text, prompting) if self.has_tags else None

    def assistant_spans(self, conversation: Mapping[str, Any]) -> tuple[str, list[tuple[int, int]]]:
        """Text of a conversation, and the character spans of the assistant."""
        messages, whole = self._settled(conversation, False)
        # Generation tags mark the turns exactly, so no prefixes are needed.
        if self.has_tags:
            return whole, self._tagged(messages, conversation, whole, False)
        spans = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            # The turn is the text between the prompt that leads to it and the conversation that ends with it.
            before = self._text(messages[:index], conversation, True)
            after = whole if index == len(messages) - 1 else self._text(messages[: index + 1], conversation, False)
            # Otherwise the model would be trained on text in a form that it never sees as a prompt.
            if not (whole.startswith(after) and after.startswith(before) and len(before) < len(after)):
                raise RefusedError(
                    f"{self._name} renders turn {index + 1} in another way as a prompt or once more turns follow, so "
                    "what the assistant said cannot be told: put {% generation %} and {% endgeneration %} around it "
                    "in a template of your own, and name that with data.chat_template"
                )
            spans.append((len(before), len(after)))
        return whole, spans

    def _settled(self, conversation: Mapping[str, Any], prompting: bool) -> tuple[Messages, str]:
        """The messages of a conversation in the first form that the template can print, and the rendered text."""
        self._now = datetime.now()  # one time for all renderings of a conversation
        first: RefusedError | None = None
        partial: tuple[Messages, str] | None = None
        for form in conversation["forms"]:
            try:
                text = self._text(form["messages"], conversation, prompting)
            except RefusedError as error:
                first = first or error
                continue
            printed = next((each for each in form["unfit"] if each in text), None)
            if printed is None:
                if all(part in text for part in form["parts"]):
                    return form["messages"], text
                partial = partial or (form["messages"], text)
                continue
            first = first or RefusedError(
                f"{self._name} prints {printed[:60]} as Python does: write it as one text, or take another template"
            )
        if partial is not None:
            return partial
        assert first is not None, "a conversation has a form"
        raise first

    def _tagged(
        self, messages: Messages, conversation: Mapping[str, Any], text: str, prompting: bool
    ) -> list[tuple[int, int]]:
        self._is_marking = True
        try:
            without, spans = _without_marks(self._text(messages, conversation, prompting))
        finally:
            self._is_marking = False
        # The marks are characters: a filter that trims or measures a text treats it otherwise with them.
        if without != text:
            raise RefusedError(
                f"{self._name} changes the text between its generation tags after they end, so its place cannot be "
                "told: put the tags where the text is printed"
            )
        return spans

    def _text(self, messages: Messages, conversation: Mapping[str, Any], prompting: bool) -> str:
        told = {
            "documents": None,
            **self._tokens,
            **conversation["variables"],
            "messages": [_as_templates_expect(message) for message in messages],
            "tools": conversation["tools"],
            "add_generation_prompt": prompting,
        }
        try:
            return self._template.render(told)
        except self._template_error as error:
            raise RefusedError(f"{self._name} refuses it: {_one_line(error)}") from error
        except MemoryError as error:
            raise RefusedError(f"{self._name} takes more than {MEMORY_BYTES >> 20} MB for it: repair it") from error
        # A template is a program: it may fail in any way on one conversation.
        except Exception as error:
            raise RefusedError(f"{self._name} fails: {type(error).__name__}: {_one_line(error)}") from error


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own filter would escape what is special in HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _as_templates_expect(message: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in message.items() if value is not None}
    # Templates read different keys for reasoning, so it is given under all that they use.
    reasoning = next((kept[name] for name in REASONING if name in kept), None)
    return kept if reasoning is None else {"thinking": reasoning, **kept, "reasoning_content": reasoning}


def _without_marks(marked: str) -> tuple[str, list[tuple[int, int]]]:
    text, spans = [], []
    place = 0
    head, *parts = marked.split(BEGIN)
    text.append(head)
    place += len(head)
    # Spans count characters of the text without marks.
    for part in parts:
        inside, end, after = part.partition(END)
        if not end or END in after:
            raise RefusedError("the chat template has generation tags inside generation tags")
        spans.append((place, place + len(inside)))
        text += [inside, after]
        place += len(inside) + len(after)
    return "".join(text), spans


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _limit_processor_time(most_s: int) -> None:
    # What a conversation may take counts from here; the kernel ends a process that is over its limit.
    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + most_s)


def _limit(what: int, most: int) -> None:
    with suppress(ValueError, OSError):  # a system without this limit, or with a lower one that holds
        resource.setrlimit(what, (most, resource.getrlimit(what)[1]))


def _answers(renderers: dict[int, Renderer], asked: dict[str, Any], most_s: int) -> Iterator[Any]:
    number = asked["template"]
    _limit_processor_time(most_s)
    if "source" in asked:
        renderers[number] = Renderer(asked["source"], asked["name"], asked["tokens"])
        yield renderers[number].has_tags
        return
    for conversation in asked["conversations"]:
        _limit_processor_time(most_s)
        if asked["spans"]:
            yield renderers[number].assistant_spans(conversation)
        else:
            yield renderers[number].render(conversation, asked["prompting"])


def serve(most_s: int) -> None:
    """Answers each line of standard input with one line per conversation, up to the first refusal."""
    try:
        import jinja2.sandbox  # noqa: F401  # before the limits; the parent is informed if it is missing
    except ImportError:
        print(json.dumps({"missing": "jinja2"}), flush=True)
        return
    _limit(resource.RLIMIT_AS, MEMORY_BYTES)
    renderers: dict[int, Renderer] = {}
    signal.alarm(IDLE_S)
    for line in sys.stdin:
        signal.alarm(0)
        try:
            # Each at once: if the next one ends this process, the parent has those before.
            for made in _answers(renderers, json.loads(line), most_s):
                answer = json.dumps({"made": made})
                if len(answer) > MOST_CHARACTERS:
                    raise RefusedError(TOO_LONG)
                print(answer, flush=True)
        except RefusedError as error:
            print(json.dumps({"refused": str(error)}), flush=True)
        except MemoryError:
            words = f"the chat template takes more than {MEMORY_BYTES >> 20} MB: repair it"
            print(json.dumps({"refused": words}), flush=True)
        signal.alarm(IDLE_S)


if __name__ == "__main__":
    serve(int(sys.argv[1]))

"""Chat data: from a JSON record to tokens and a mask of trained tokens.

A record has any form of terrace.data.row_forms: messages, perhaps with tools, or a prompt and its completion. Messages
are rendered by the tokenizer's chat template, and the assistant's text is trained on. Prompt and completion are plain
text, concatenated, between the tokens that begin and end a text; the completion and the end token are trained on.

A conversation is tokenised as a whole. Special tokens written by the template are encoded as such and none are added,
so the ids are those seen at inference with the same template. A token is trained on if any of its characters is the
assistant's.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from terrace.base.errors import DataError, did_you_mean
from terrace.data.chat_encoder import ChatEncoder, Ids
from terrace.data.left_out import LeftOut, unknown_characters
from terrace.data.message_forms import given, text_of, with_objects
from terrace.data.pieces import json_object, kind_of, shown_keys
from terrace.data.rendering import TemplateRefusalError
from terrace.data.row_forms import NUM_ASKED, chat_row
from terrace.data.template import ChatTemplate, Spans, marks_in
from terrace.data.turns import SPEAKERS

ROLES = ("system", "developer", "user", "assistant", "tool")
_BATCH, _BATCH_CHARACTERS = 64, 1 << 20  # conversations that are rendered together

Mask = npt.NDArray[np.uint8]
Line = str | Mapping[str, Any]  # of JSON, or the row that terrace.data.row_forms has made of one


@dataclass(frozen=True)
class ChatReader:
    template: ChatTemplate
    encoder: ChatEncoder
    left_out: LeftOut = field(default_factory=LeftOut)  # of what was read so far

    def tokens(self, line: Line, where: str) -> tuple[Ids, Mask]:
        """Ids of the conversation in `line`, and a mask that is 1 for trained tokens. Raises as `read` does."""
        ids, mask, _ = next(self.read([(line, where)]))
        return ids, mask

    def read(self, lines: Iterable[tuple[Line, str]]) -> Iterator[tuple[Ids, Mask, str]]:
        """Yields ids, mask and place of each conversation in `lines`, pairs (line, place).

        Raises `DataError` naming the place for a line that is not a conversation, has no assistant text, or is refused
        by the template.
        """
        # Conversations are rendered in batches: switching processes costs more than a rendering.
        for batch in _batches(lines):
            records, bad = [], None
            for line, where in batch:
                try:
                    records.append((self._checked(line, where), where))
                except DataError as error:
                    # Earlier lines may have template errors, which come first.
                    bad = error
                    break
            yield from self._made(records)
            if bad is not None:
                raise bad

    def _made(self, records: list[tuple[Mapping[str, Any], str]]) -> Iterator[tuple[Ids, Mask, str]]:
        conversations = [
            (record["messages"], record["tools"], record["variables"]) for record, _ in records if "messages" in record
        ]
        rendered = self.template.assistant_spans(conversations) if conversations else iter(())
        for record, where in records:
            # Prompt and completion need no template.
            if "messages" not in record:
                yield (*self._completion(record, where), where)
                continue
            try:
                text, spans = next(rendered)
            except TemplateRefusalError as error:
                raise DataError(f"{where}: {error}") from error
            by_turn = None if self.template.of(record["tools"]).has_tags else spans
            for place in self.left_out.note(record, text, by_turn, where):
                turn = sum(message["role"] == "assistant" for message in record["messages"][:place])
                self._check_rendered(record, place, text[: spans[turn][1]], where)
            ids, mask = self._mask(text, spans, where)
            # Some templates leave out turns, such as an assistant turn without content.
            if not mask.any():
                raise DataError(
                    f"{where}: nothing is left to train on, as {self.template.name} renders nothing that the assistant "
                    "said; repair the line or drop it"
                )
            yield ids, self._answers(record, mask, where) if record.get(NUM_ASKED) else mask, where

    def _check_rendered(self, record: Mapping[str, Any], place: int, text: str, where: str) -> None:
        """Raises `DataError` if `text`, rendered up to the assistant's message at `place`, leaves its content out."""
        messages, blank = record["messages"], {"role": "assistant", "content": ""}
        try:
            bare, _ = self.template.render([*messages[:place], blank], record["tools"], record["variables"])
        except TemplateRefusalError:
            return  # it tells an empty turn apart
        if bare == text:
            raise DataError(
                f"{where}: {self.template.name} renders nothing of message {place + 1}, so an empty turn would be "
                "trained on; name a template that renders it with data.chat_template, or drop the line"
            )

    def _answers(self, record: Mapping[str, Any], mask: Mask, where: str) -> Mask:
        """The mask without the assistant's turns that belong to the prompt."""
        starts = np.flatnonzero(np.diff(mask, prepend=0) == 1)
        num_earlier = self._num_earlier(record, where)
        if len(starts) <= num_earlier:
            raise DataError(
                f"{where}: {self.template.name} renders nothing of the last message that can be told from the "
                "assistant's earlier ones; repair or drop the record"
            )
        last = np.zeros_like(mask)
        last[starts[num_earlier] :] = mask[starts[num_earlier] :]
        return last

    def _num_earlier(self, record: Mapping[str, Any], where: str) -> int:
        # Number of the assistant's text ranges in the prompt's messages.
        earlier = record["messages"][: record[NUM_ASKED]]
        num_turns = len([message for message in earlier if message["role"] == "assistant"])
        if not num_turns or not self.template.of(record["tools"]).has_tags:
            return num_turns  # found by prefixes, every turn has text
        # Tags may mark nothing of a turn, or several parts of it.
        try:
            _, spans = self.template.render(earlier, record["tools"], record["variables"], add_generation_prompt=True)
        except TemplateRefusalError as error:
            raise DataError(f"{where}: {error}") from error
        parts = [(first, end) for first, end in spans or () if first < end]
        ends = [-1, *(end for _, end in parts)]
        return sum(first > before for (first, _), before in zip(parts, ends, strict=False))

    def _checked(self, line: Line, where: str) -> Mapping[str, Any]:
        record = line
        if isinstance(record, str):
            record = chat_row(json_object(record, lambda: where, '{"messages": [...]}'), where)
        if "messages" not in record:
            return record
        conversation = conversation_of(record, where, self.template)
        if not any(message["role"] == "assistant" for message in conversation["messages"]):
            raise DataError(f"{where}: the assistant says nothing, so nothing is left to train on; drop the line")
        # Before rendering: afterwards forged special tokens would look like the template's own.
        for text in texts_of(conversation):
            check_chat_text(text, where, self.encoder)
        return conversation

    def _completion(self, record: Mapping[str, Any], where: str) -> tuple[Ids, Mask]:
        prompt, completion = record["prompt"], record["completion"]
        if not completion:
            raise DataError(f"{where}: 'completion' is empty, so nothing is left to train on; drop the line")
        for text in (prompt, completion):
            check_chat_text(text, where, self.encoder)
        # Tokenised as one text, as a model sees it when it continues a prompt.
        ids, mask = self._mask(prompt + completion, [(len(prompt), len(prompt) + len(completion))], where)
        around = self.encoder.around
        if around.end is None:
            raise DataError(
                f"{where}: the tokenizer names no token that ends a text, so a completion would have no end: name it "
                'with --data.eos TOKEN, or write "messages"'
            )
        ends_mask = [*(0 for _ in around.begin), *mask, 1]
        return np.array([*around.begin, *ids, around.end], dtype=np.int64), np.array(ends_mask, dtype=np.uint8)

    def _mask(self, text: str, spans: Spans, where: str) -> tuple[Ids, Mask]:
        ids, firsts, ends = self.encoder.encode(text)
        known = ids != self.encoder.unknown
        self.left_out.note_unknown(unknown_characters(text, spans, firsts[known], ends[known]), where)
        mask = np.zeros(len(ids), dtype=np.uint8)
        # Characters are compared, since a token may cross the border of a span.
        for first, end in spans:
            # Any overlap counts: a token may begin before the assistant's first character. A token without characters
            # belongs to the next one.
            inside = np.flatnonzero((np.maximum(ends, firsts + 1) > first) & (firsts < end))
            if inside.size:
                mask[inside[0] : inside[-1] + 1] = 1
        return ids, mask


def _batches(lines: Iterable[tuple[Line, str]]) -> Iterator[list[tuple[Line, str]]]:
    batch: list[tuple[Line, str]] = []
    size = 0
    for line, where in lines:
        batch.append((line, where))
        size += sum(map(len, texts_in(line)))
        if len(batch) >= _BATCH or size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    yield batch


def conversation_of(record: Mapping[str, Any], where: str, template: ChatTemplate) -> dict[str, Any]:
    """`record` with its messages checked, and with the tools and variables for the template.

    Raises `DataError` naming `where`.
    """
    source = f"{template.source}{template.with_tools or ''}"
    check_messages(record["messages"], where, source)
    try:
        return {**record, **given(record, source)}
    except DataError as error:
        raise DataError(f"{where}: {error}") from error


def texts_of(conversation: Mapping[str, Any]) -> Iterator[str]:
    """All texts of a `conversation_of` result, also as they read with JSON strings decoded and the parts of a content
    joined.
    """
    messages = conversation["messages"]
    yield from texts_in(
        [messages, [with_objects(message) for message in messages], conversation["tools"], conversation["variables"]]
    )
    yield from (text_of(message["content"]) for message in messages if isinstance(message.get("content"), list))


def check_chat_text(text: str, where: str, encoder: ChatEncoder) -> None:
    """Raises `DataError` naming `where` if no message can hold `text`, for example because of a special token in it."""
    try:
        # JSON may spell half a surrogate pair, which has no UTF-8.
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{where} holds half a surrogate pair ({text[error.start]!a}); repair the line") from error
    # These code points mark the assistant's text inside a rendered conversation.
    if marks_in(text):
        raise DataError(f"{where} holds a code point that is no character (U+FDD0 or U+FDD1); remove it")
    token = encoder.forged(text)
    if token is not None:
        raise DataError(
            f"{where} spells out the special token {token!r}, which would end or begin a turn; write it in another way "
            "or leave it out"
        )


def check_messages(messages: Any, where: str, template: str) -> None:
    """Raises `DataError` naming `where` unless `messages` can be rendered by a `template`."""
    if not isinstance(messages, list):
        raise DataError(f"{where}: 'messages' must be a list, not {kind_of(messages)}; write one message an entry")
    if not messages:
        raise DataError(f"{where}: the conversation is empty; drop the line")
    for number, message in enumerate(messages, start=1):
        here = f"{where}: message {number}"
        if not isinstance(message, dict):
            raise DataError(f"{here} is {kind_of(message)}; each must be an object with 'role' and 'content'")
        role = message.get("role")
        if not isinstance(role, str):
            raise DataError(f"{here} has no 'role' (keys: {shown_keys(message)}); say who speaks")
        # A template may know further roles; it then names them in quotes.
        if role not in ROLES and f"'{role}'" not in template and f'"{role}"' not in template:
            hint = f"; did you mean {SPEAKERS[role]!r}?" if role in SPEAKERS else did_you_mean(role, ROLES)
            raise DataError(f"{here} has the unknown role {role!r}{hint}")
        content = message.get("content")
        # A turn that only calls tools has no content.
        if content is None and not message.get("tool_calls") and not message.get("function_call"):
            raise DataError(f"{here}, of the {role}, has no 'content'; say what is said or drop it")
        if isinstance(content, list):
            _check_parts(content, here)
        elif content is not None and not isinstance(content, str):
            raise DataError(f"{here}: 'content' must be a string, not {kind_of(content)}; convert it")
        # Ignoring it would train on turns that the user meant to leave out.
        if "weight" in message:
            raise DataError(f"{here} has a 'weight', which is not taken into account; remove the key, or the message")


def _check_parts(parts: list[Any], here: str) -> None:
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = f"of type {part.get('type')!r}" if isinstance(part, dict) else kind_of(part)
            raise DataError(
                f'{here}: \'content\' has a part {kind}, and only {{"type": "text", "text": ...}} is read; '
                "convert it or drop the line"
            )


def texts_in(value: Any) -> Iterator[str]:
    """All strings in a JSON value, at any depth, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from texts_in(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from texts_in(item)

"""Chat prompts: messages rendered by a chat template, up to the assistant's next answer."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from terrace.base.errors import DataError
from terrace.data.chat import check_chat_text, conversation_of, texts_of
from terrace.data.chat_encoder import ChatEncoder, load_encoder
from terrace.data.rendering import TemplateRefusalError
from terrace.data.template import ChatTemplate, load_template
from terrace.data.tokenizer import Tokenizer

Asked = Mapping[str, Any]  # messages, perhaps with tools: a row of terrace.data.row_forms


@dataclass(frozen=True)
class ChatPrompts:
    tokenizer: Tokenizer
    template: ChatTemplate
    encoder: ChatEncoder

    def rendered(self, asked: Sequence[tuple[Asked, str]]) -> Iterator[tuple[str, list[int]]]:
        """Yields text and ids of each conversation in `asked`, pairs (row, place), up to the assistant's answer.

        Raises `DataError` naming the place for invalid messages, for a text that training refuses, such as a special
        token, and for messages that the template refuses.
        """
        conversations = [conversation_of(row, where, self.template) for row, where in asked]
        for conversation, (_, where) in zip(conversations, asked, strict=True):
            for text in texts_of(conversation):
                check_chat_text(text, where, self.encoder)
        made = self.template.prompts(
            [
                (conversation["messages"], conversation["tools"], conversation["variables"])
                for conversation in conversations
            ]
        )
        for _, where in asked:
            try:
                text = next(made)
            except TemplateRefusalError as error:
                raise DataError(f"{where} cannot be put into a chat: {error}") from error
            # The template begins the text itself.
            yield text, [int(token) for token in self.tokenizer.encode_prompt(text, begins_text=False)]


def chat_prompts(tokenizer: Tokenizer, tokenizer_path: str | Path, template_path: str | Path = "") -> ChatPrompts:
    """Chat prompts with the template at `template_path`, or the tokenizer's own. Raises `DataError` if there is
    none.
    """
    template = load_template(tokenizer_path, template_path)
    return ChatPrompts(tokenizer, template, load_encoder(tokenizer_path, tokenizer))


def chat_ids(tokenizer: Tokenizer, tokenizer_path: str | Path, template_path: str | Path, message: str) -> list[int]:
    """Ids of a conversation that a user begins with `message`, up to the assistant's answer.

    Raises `DataError` as `ChatPrompts.rendered` does.
    """
    asked = {"messages": [{"role": "user", "content": message}]}
    _, ids = next(chat_prompts(tokenizer, tokenizer_path, template_path).rendered([(asked, "the message")]))
    return ids

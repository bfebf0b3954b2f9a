"""A user's message as the beginning of a conversation, by the chat template of training."""

from pathlib import Path

from terrace.base.errors import DataError
from terrace.data.chat_encoder import load_encoder
from terrace.data.rendering import TemplateRefusalError
from terrace.data.template import load_template
from terrace.data.tokenizer import Tokenizer


def chat_ids(tokenizer: Tokenizer, tokenizer_path: str | Path, template_path: str | Path, message: str) -> list[int]:
    """Ids of a conversation that a user begins with `message`, up to where the assistant answers.

    Raises `DataError` without a template, for a message that it refuses, and for one that spells out a special token,
    which no conversation in training does.
    """
    template = load_template(tokenizer_path, template_path)
    forged = load_encoder(tokenizer_path, tokenizer).forged(message)
    if forged is not None:
        raise DataError(f"the message spells out the special token {forged!r}: leave it out, or ask without a template")
    try:
        text, _ = template.render([{"role": "user", "content": message}], add_generation_prompt=True)
    except TemplateRefusalError as error:
        raise DataError(f"the message cannot be put into a chat: {error}") from error
    # The template begins the text itself.
    return [int(token) for token in tokenizer.encode_prompt(text, begins_text=False)]

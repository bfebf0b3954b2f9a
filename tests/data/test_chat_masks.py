"""Masks of chats against a slow reference, over many tokenizers: the assistant's tokens, and no header's."""

import json
from typing import Any

import pytest

from terrace.data.chat import ChatReader
from terrace.data.text_tokens import TextTokens

pytest.importorskip("jinja2")
pytest.importorskip("tokenizers")

from terrace.data.chat_encoder import SpecialEncoder
from terrace.data.template import ChatTemplate
from tests.support.slow_masks import Pieces, many_tokenizers, slow_mask

HEADERS, END = ("<|user|>", "<|assistant|>"), "<|end|>"
ANSWERS = [
    "yes",
    "\nyes",
    " yes \n",
    "é🙂 ﬁ½ yes",
    "🙂\n\n",
    "  \n hi, Éa yes  ",
    "e\u0301s and 12",
    "and 🙂so🙂 on",
    "\n",
]

# A template, and the pieces of one turn of the assistant under it.
FORMS: dict[str, tuple[str, list[tuple[str, bool]]]] = {
    "prefixes": (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
        [("<|assistant|>\n", False), ("{}", True), ("<|end|>\n", True)],
    ),
    "close prefixes": (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
        [("<|assistant|>", False), ("{}", True), ("<|end|>", True)],
    ),
    "tags": (
        "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>\n{% generation %}{{ m.content }}"
        "{% endgeneration %}<|end|>\n{% else %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endif %}{% endfor %}",
        [("<|assistant|>\n", False), ("{}", True), ("<|end|>\n", False)],
    ),
}


def conversation(form: str) -> tuple[list[dict[str, Any]], Pieces]:
    ends = FORMS[form][1][0][0].removeprefix("<|assistant|>")
    messages, pieces = list[dict[str, Any]](), list[tuple[str, bool]]()
    for number, answer in enumerate(ANSWERS):
        asked = ["hi", " u\n", "yes🙂"][number % 3]
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        pieces.append((f"<|user|>{ends}{asked}<|end|>{ends}", False))
        pieces += [(text.replace("{}", answer), trained) for text, trained in FORMS[form][1]]
    return messages, pieces


@pytest.mark.parametrize("form", FORMS)
def test_masks_are_those_of_the_slow_reference(form: str) -> None:
    messages, pieces = conversation(form)
    line, num_tokenizers = json.dumps({"messages": messages}), 0
    for name, tokenizer in many_tokenizers(HEADERS, END, apart=form != "close prefixes"):
        reader = ChatReader(ChatTemplate(FORMS[form][0]), SpecialEncoder(tokenizer, TextTokens()))
        ids, mask = reader.tokens(line, "here")
        text = "".join(piece for piece, _ in pieces)
        assert ids.tolist() == tokenizer.encode(text, add_special_tokens=False).ids
        found = [tokenizer.id_to_token(token) for token in ids]
        assert list(zip(found, mask.tolist(), strict=True)) == list(
            zip(found, slow_mask(tokenizer, pieces), strict=True)
        ), name
        num_tokenizers += 1
    assert num_tokenizers >= 60


@pytest.mark.parametrize(
    ("normalizer", "text"),
    [("Lowercase", "a <|END|> b"), ("NFKC", "\uff1c|end|\uff1e"), ("StripAccents", "<|e\u0301nd|>")],
)
def test_a_mark_that_normalised_text_spells_is_forged(normalizer: str, text: str) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    for is_normalised in (True, False):
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "<|end|>": 1}, []))
        tokenizer.normalizer = getattr(tokenizers.normalizers, normalizer)()
        tokenizer.add_special_tokens([tokenizers.AddedToken(END, special=True, normalized=is_normalised)])
        encoder = SpecialEncoder(tokenizer, TextTokens())
        # Read in the text as it is, the mark is spelled in one way alone.
        assert encoder.forged(text) == (END if is_normalised else None)
        assert encoder.forged(f"a{END}b") == END

"""Templates, a tokenizer's folder and conversations for tests of chat data."""

import json
from pathlib import Path
from typing import Any

TURNS = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = TURNS + PROMPT  # what the assistant said is told by prefixes

TAGGED = (  # the same text, but the template says itself what the assistant said
    "{%- for message in messages %}\n"
    "    {%- if message.role == 'assistant' %}\n"
    "        {{- '<|im_start|>assistant\\n' }}\n"
    "        {%- generation %}\n"
    "            {{- message.content + '<|im_end|>\\n' }}\n"
    "        {%- endgeneration %}\n"
    "    {%- else %}\n"
    "        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}\n"
    "    {%- endif %}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n"
    "    {{- '<|im_start|>assistant\\n' }}\n"
    "{%- endif %}"
)

FORGETFUL = (  # drops the reasoning of all turns but the last, so that prefixes do not agree
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}" + PROMPT
)

STRICT = (  # in the manner of older templates: turns must alternate, tokens are named, blanks trimmed
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] | trim + eos_token }}{% endif %}{% endfor %}"
)

HERMES = (  # in the manner of Hermes and Qwen, with tools and their calls
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
    "</tool_response><|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

THINKING = (  # in the manner of Qwen 3: reasoning stands in the last turn alone, be it empty
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
    "</tool_response><|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content.split('</think>')[-1] }}{% for call in m.tool_calls %}{% if m.content %}\n{% endif %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is a tier?"},
    {"role": "assistant", "content": "A level of the cluster — naïve, but true 🙂"},
    {"role": "user", "content": "And  a plan?\n"},
    {"role": "assistant", "content": "\nWhere things go."},
]


def write_lines(path: Path, records: list[Any]) -> Path:
    """Write one record a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def write_tokenizer(folder: Path, template: str | None = CHATML, *, as_file: bool = False) -> Path:
    """Write a byte-level BPE tokenizer with ChatML's special tokens, as a chat model's folder has it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    encoder = Tokenizer(models.BPE())
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    text = " ".join(str(message["content"]) for message in TALK) + " user assistant system" * 20
    encoder.train_from_iterator([text] * 20, trainer)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>"]
    encoder.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    folder.mkdir(parents=True, exist_ok=True)
    encoder.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"content": "<|im_end|>", "__type": "AddedToken"},
        "clean_up_tokenization_spaces": False,
    }
    if template is not None and as_file:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    elif template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder

"""`terrace generate FOLDER`: text from a trained model."""

import argparse
import sys
from collections.abc import Sequence
from shlex import quote
from typing import Any

from terrace.base.errors import ConfigError
from terrace.base.schema import check_text
from terrace.cli.output import raw_stream

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed")


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    if rest:
        fix = (
            "see terrace generate --help"
            if rest[0].startswith("-")
            else f"if it is the text: --prompt {quote(rest[0])}"
        )
        raise ConfigError(f"unknown argument {rest[0]!r}; {fix}")
    # Imported here, since --help needs none of it.
    from terrace.cli.files import check_count
    from terrace.generation.request import Sampling

    check_count("--tokens", options.tokens)
    given = {name: value for name in SAMPLING if (value := getattr(options, name)) is not None}
    try:
        sampling = Sampling(**given)
        if idle := sampling.without_effect(given):
            raise ConfigError(idle)
    except ConfigError as error:
        raise ConfigError(_as_options(str(error))) from error
    if not options.prompt:
        about = "what the user says" if options.chat else 'the text to continue, or "" to let the model begin'
        raise ConfigError(f"--prompt TEXT is missing: give {about}")
    # After the options are checked: importing torch takes seconds.
    from terrace.train.generate import chat_prompt, generate_texts

    # A prompt from a shell may contain bytes that are not valid text.
    for prompt in options.prompt:
        check_text("--prompt", prompt)
    for stop in options.stop:
        check_text("--stop", stop)
    model = load_model_of(options)
    asked = [chat_prompt(model, prompt) if options.chat else prompt for prompt in options.prompt]

    def say(words: str, is_fallback: bool) -> None:
        if options.verbose or is_fallback:
            print(words, file=sys.stderr)

    texts = generate_texts(model, asked, options.tokens, sampling, options.stop, say)
    if not options.chat:
        texts = [prompt + text for prompt, text in zip(options.prompt, texts, strict=True)]
    # A terminal gets control characters spelled out; a file gets the text as it is.
    print("\n\n".join(texts), file=sys.stdout if sys.stdout.isatty() else raw_stream(sys.stdout))
    return 0


def _as_options(words: str) -> str:
    # Named as options: --top-k 3 for top_k = 3.
    for name in SAMPLING:
        words = words.replace(f"{name} = ", f"--{name.replace('_', '-')} ")
    return words


def load_model_of(options: argparse.Namespace) -> Any:
    import torch

    from terrace.train.trained import load_trained

    try:
        device = torch.device(options.device)
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError("no model runs there")
        # A device may be known by name and still unusable: allocate on it.
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"--device {options.device} cannot be used ({reason}): give cpu, cuda or cuda:N") from error
    model = load_trained(options.folder, dtype=options.dtype, tokenizer=options.tokenizer, device=device)
    if model.note:
        print(model.note, file=sys.stderr)
    return model

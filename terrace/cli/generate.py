"""`terrace generate FOLDER`: text from a trained model."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from terrace.base.errors import ConfigError
from terrace.base.schema import check_text
from terrace.cli.output import raw_stream

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed")


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "generate",
        description="Continue a text with the newest checkpoint of a run, or with the weights of a Hugging Face "
        "folder, token by token, in one process.",
    )
    add_model_options(parser)
    parser.add_argument(
        "--prompt",
        metavar="TEXT",
        action="append",
        help="text to continue, in which special tokens count as such; may be given several times, and all are "
        'continued at once; "" lets the model begin',
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="take each prompt as what a user says, and print the answer: with the chat template of the model's "
        "tokenizer, or of its training",
    )
    parser.add_argument(
        "--tokens", type=int, metavar="N", default=200, help="tokens to add at most (default: %(default)s)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="how freely tokens are drawn: 0 always takes the likeliest, 1 draws as the model predicts (default: 0.8)",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        metavar="K",
        help="draw from the K likeliest, 0: from all (default: 40)",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        help="of these, with probabilities scaled to 1, draw from the smallest set of the likeliest that together have "
        "at least probability P (default: 1.0, all)",
    )
    parser.add_argument(
        "--min-p",
        type=float,
        metavar="P",
        help="of these, draw from the tokens with at least P times the probability of the likeliest "
        "(default: 0.0, all)",
    )
    parser.add_argument(
        "--stop",
        metavar="TEXT",
        action="append",
        default=[],
        help="end a continuation before TEXT; may be given several times",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="seed of the draws (default: 0)")
    parser.add_argument(
        "--verbose", action="store_true", help="begin with the pages of memory that keys and values have, on stderr"
    )
    parser.set_defaults(run=run)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that choose a trained model and how it is loaded."""
    parser.add_argument(
        "folder",
        metavar="FOLDER",
        type=Path,
        help="run folder, or Hugging Face folder with config.json and *.safetensors",
    )
    parser.add_argument(
        "--tokenizer", metavar="PATH", help="tokenizer.json, or 'bytes' (default: the one that belongs to the model)"
    )
    parser.add_argument(
        "--dtype",
        choices=("fp32", "bf16", "fp64"),
        default="fp32",
        help="dtype of weights and activations (default: %(default)s)",
    )
    parser.add_argument("--device", metavar="NAME", default="cpu", help="cpu, cuda or cuda:N (default: %(default)s)")


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Prints each prompt with its continuation; returns 0."""
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
    return load_trained(options.folder, dtype=options.dtype, tokenizer=options.tokenizer, device=device)

"""`terrace generate RUN`: text from the newest checkpoint of a run."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from terrace.base.errors import CheckpointError, ConfigError
from terrace.base.schema import read_table
from terrace.train.config import parse_run


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "generate",
        help="continue a text with a trained model",
        description="Continue a text with the newest checkpoint of a run, token by token, in one process.",
    )
    parser.add_argument("folder", metavar="RUN", type=Path, help="run folder that terrace train has left")
    parser.add_argument("--prompt", metavar="TEXT", default="def ", help="text to continue (default: %(default)r)")
    parser.add_argument(
        "--tokens", type=int, metavar="N", default=200, help="tokens to add at most (default: %(default)s)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        default=0.8,
        help="how freely tokens are drawn: 0 always takes the likeliest, 1 draws as the model predicts "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        metavar="K",
        default=40,
        help="draw from the K likeliest, 0: from all (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, metavar="N", default=0, help="seed of the draws (default: %(default)s)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Print the prompt with its continuation and return 0."""
    if rest:
        raise ConfigError(f"unknown argument {rest[0]!r}; see terrace generate --help")
    for name, least in (("tokens", 1), ("temperature", 0), ("top_k", 0), ("seed", 0)):
        if not least <= getattr(options, name) < 2**63:
            raise ConfigError(
                f"--{name.replace('_', '-')} {getattr(options, name)} must be at least {least} and below 2^63"
            )
    if not (options.folder / "config.toml").is_file():
        raise CheckpointError(f"{options.folder} is not a run folder: it has no config.toml")
    config = parse_run(read_table(options.folder / "config.toml"))
    from terrace.train.checkpoint import latest
    from terrace.train.data import load_tokenizer
    from terrace.train.generate import generate

    checkpoint = latest(options.folder)
    if checkpoint is None:
        raise CheckpointError(f"{options.folder} has no complete checkpoint yet")
    text = generate(
        checkpoint,
        load_tokenizer(config.data.tokenizer),
        options.prompt,
        num_tokens=options.tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        seed=options.seed,
        window=config.train.sequence,
    )
    print(options.prompt + text)
    return 0

"""`terrace data`: `prepare` tokenises a run's data before its job starts; products may add actions."""

import argparse
from collections.abc import Sequence
from typing import Any

from terrace.base.products import add_parser as add_action
from terrace.base.products import commands as actions_of
from terrace.base.words import counted
from terrace.cli.options import add_run_options, resolve_run
from terrace.model.facts import vocabulary_size


def add_parser(commands: Any) -> None:
    data = commands.add_parser("data", description="Look at a corpus before a run, or tokenise it; nothing is trained.")
    actions = data.add_subparsers(dest="action", required=True, metavar="ACTION")
    parser = actions.add_parser(
        "prepare",
        help="tokenise and pack the data of a run",
        description="Tokenise and pack the data of a run into its data.cache, where terrace train with the same "
        "options finds them. Nothing is trained, and no device is needed.",
        epilog="Every option is that of terrace train, e.g. --config run.toml, or --data PATH --model FOLDER "
        "--train.sequence 4096.",
    )
    add_run_options(parser)
    parser.set_defaults(run=run)
    for action in actions_of("data").values():
        add_action(action, actions)


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Makes the missing cache files and prints their names; returns 0."""
    config = resolve_run(options, rest)
    # After the options are checked: these need numpy and a tokenizer.
    from terrace.data.prepared import prepare_eval_sources, prepare_sources
    from terrace.data.tokenizer import load_tokenizer
    from terrace.train.folder import check_tokenizer

    data = config.data.absolute()
    tokenizer = load_tokenizer(data.tokenizer, data.bos, data.eos)
    check_tokenizer(tokenizer, config)
    sources = [
        *prepare_sources(data, tokenizer, config.train.sequence, lambda text: print(text, flush=True)),
        *prepare_eval_sources(data, tokenizer, config.train.sequence, lambda text: print(text, flush=True)),
    ]
    for source in sources:
        source.tokens.check_vocab(vocabulary_size(config.model))
        documents = counted(source.tokens.num_documents, "document", ",")
        print(
            f"{source.name}: {counted(source.tokens.num_tokens, 'token', ',')} in {documents}\n  {source.tokens.path}"
        )
    return 0

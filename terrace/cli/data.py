"""`terrace data`: `prepare` tokenises a run's data before its job starts; products may add actions."""

import argparse
from collections.abc import Sequence

from terrace.base.words import counted
from terrace.cli.options import resolve_run
from terrace.model.facts import vocabulary_size


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Makes the missing cache files and prints their names; returns 0."""
    config = resolve_run(options, rest)
    # After the options are checked: these need numpy and a tokenizer.
    from terrace.data.batches import Batches
    from terrace.data.prepared import prepare_eval_sources, prepare_sources
    from terrace.data.tokenizer import load_tokenizer
    from terrace.train.epochs import with_steps
    from terrace.train.folder import check_tokenizer

    data = config.data.absolute()
    tokenizer = load_tokenizer(data.tokenizer, data.bos, data.eos)
    check_tokenizer(tokenizer, config)
    trained = prepare_sources(data, tokenizer, config.train.sequence, lambda text: print(text, flush=True))
    evaluated = prepare_eval_sources(data, tokenizer, config.train.sequence, lambda text: print(text, flush=True))
    if config.train.epochs:
        with_steps(config, Batches(trained, config.train.sequence, config.rows, config.train.seed, data.holdout), print)
    for source in (*trained, *evaluated):
        source.tokens.check_vocab(vocabulary_size(config.model))
        documents = counted(source.tokens.num_documents, "document", ",")
        print(
            f"{source.name}: {counted(source.tokens.num_tokens, 'token', ',')} in {documents}\n  {source.tokens.path}"
        )
    return 0

"""Repeats a run's own evaluation in one process, with the parameters of its newest checkpoint.

The data are its hold-out and the sources of `data.eval`, in the same rows as during the run (terrace.train.validation).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from terrace.base.errors import CheckpointError, ConfigError
from terrace.checkpoint.layout import latest
from terrace.checkpoint.reading import Checkpoint
from terrace.data.batches import Batches
from terrace.data.eval_batches import EvalBatches, eval_batches
from terrace.data.prepared import compare_facts, prepare_eval_sources, prepare_sources
from terrace.model.decoder import IGNORE_INDEX
from terrace.model.facts import refuse_non_causal, vocabulary_size
from terrace.train.config import RunConfig
from terrace.train.evaluate import Evaluation, nats_of
from terrace.train.runs import read_trained
from terrace.train.trained import Trained

_ROW_TOKENS = 2048  # most tokens of rows that run together, unless one row has more


@dataclass(frozen=True, kw_only=True)
class OwnEvaluation(Evaluation):
    """The evaluation of one source, of which `num_documents` of `num_found` rows were used."""

    name: str
    num_found: int


def own_data(folder: Path, say: Callable[[str], None]) -> list[EvalBatches]:
    """The evaluation data of the run in `folder`. `say` receives progress if the cache has to be rebuilt.

    Raises `ConfigError` if the folder is not a run, or the run has neither a hold-out nor evaluation data, and
    `CheckpointError` if its data have changed.
    """
    if not (folder / "config.toml").is_file():
        raise ConfigError(f"{folder} is not a run folder, so it has no data of its own: give --data PATH")
    run = read_trained(folder, "which has no data with a loss per token: give --data PATH")
    if run.on_pairs:
        raise ConfigError(
            f"{folder} was trained on pairs, which have no loss per token: give --data PATH, text or conversations"
        )
    if not run.data.holdout and not run.data.eval:
        raise ConfigError(f"{folder} holds nothing out (data.holdout = 0) and has no data.eval: give --data PATH")
    return _batches(folder, run, say)


def _batches(folder: Path, run: RunConfig, say: Callable[[str], None]) -> list[EvalBatches]:
    from terrace.data.tokenizer import load_tokenizer

    train, data = run.train, run.data
    tokenizer = load_tokenizer(data.tokenizer, data.bos, data.eos)
    sources = prepare_sources(data, tokenizer, train.sequence, say)
    newest = latest(folder)
    if newest is not None:  # without one there is no model, as its loading says
        for name, (old, new) in compare_facts(Checkpoint(newest).facts, sources, data.holdout).items():
            raise CheckpointError(
                f"{folder} was trained with {name} = {old!r}, now it is {new!r}, so other rows would be held "
                "out: restore it, or give --data PATH"
            )
    evaluated = prepare_eval_sources(data, tokenizer, train.sequence, say)
    batches = Batches(sources, train.sequence, run.rows, train.seed, data.holdout)
    return eval_batches(batches, evaluated, run.rows, train.eval_batches, vocabulary_size(run.model))


def evaluate_own(
    model: Trained, sources: list[EvalBatches], progress: Callable[[Evaluation], None] | None = None
) -> Iterator[OwnEvaluation]:
    """Yields the result of each source as soon as it is computed. `progress` receives the running result."""
    refuse_non_causal(model.config)
    device = next(model.blocks[0].parameters()).device
    for source in sources:
        nats, num_tokens, together = 0.0, 0, max(1, _ROW_TOKENS // source.sequence)

        def found(nats: float, num_tokens: int, source: EvalBatches = source) -> OwnEvaluation:
            return OwnEvaluation(
                nats=nats,
                num_tokens=num_tokens,
                num_documents=source.num_rows,
                num_bytes=0,
                name=source.name,
                num_found=source.num_found,
            )

        for step in range(source.num_batches):
            for start in range(0, source.batch, together):
                rows = np.arange(start, min(start + together, source.batch))
                tokens, labels, *positions = (torch.from_numpy(array).to(device) for array in source.rows(step, rows))
                nats += nats_of(model, tokens, labels, positions[0] if positions else None)
                num_tokens += int((labels != IGNORE_INDEX).sum())
                if progress is not None and num_tokens:
                    progress(found(nats, num_tokens))
        yield found(nats, num_tokens)

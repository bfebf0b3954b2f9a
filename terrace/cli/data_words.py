"""A summary of the data before a run: sources, shares, epochs, padding, documents left out."""

from terrace.base.words import counted
from terrace.data.batches import Batches, Source, SourceUse
from terrace.train.job import RunJob


def data_words(job: RunJob, verbose: bool = True) -> str:
    """One line on the data, plus one per source of a mixture and one per packed source.

    Without `verbose`, packed sources that lose documents are the only ones with lines of their own.
    """
    run, train = job.run, job.run.train
    uses = Batches(job.sources, train.sequence, run.rows, train.seed, run.data.holdout).uses(train.steps)
    count = _tokens(sum(source.tokens.num_tokens for source in job.sources))
    whole = [words for use in uses if verbose or _fates(use) for words in _packed_words(use, train.sequence)]
    # A single source needs no shares and epochs.
    if len(uses) == 1:
        held = f"; {counted(uses[0].num_holdout_samples, 'sequence')} held out" if uses[0].num_holdout_samples else ""
        return "\n".join([f"{count} of {job.sources[0].name}{held}", *whole])
    total = sum(source.weight for source in job.sources)
    each_of = zip(job.sources, uses, strict=True)
    lines = [_source_words(source, use, total) for source, use in each_of] if verbose else []
    return "\n".join([f"{count} of {len(uses)} sources", *lines, *whole])


def _source_words(source: Source, use: SourceUse, total: float) -> str:
    held = f", {use.num_holdout_samples} held out" if use.num_holdout_samples else ""
    return (
        f"  {use.name}: {source.weight / total:.1%} of the sequences, {_tokens(source.tokens.num_tokens)} in "
        f"{counted(use.num_samples, 'sequence')}, {use.epochs:.2f} epochs{held}"
    )


def _packed_words(use: SourceUse, sequence: int) -> list[str]:
    tally = use.tally
    # Only packed sources have a tally.
    if tally is None:
        return []
    return [
        f"  {use.name}: {counted(tally.num_documents, 'document')} packed whole into "
        f"{counted(tally.num_sequences, 'sequence')}, {tally.waste(sequence):.1%} of them padding"
        + "".join(f"; {fate}" for fate in _fates(use))
    ]


def _fates(use: SourceUse) -> list[str]:
    """Counts of a packed source's documents that are cut, dropped or left out, in words."""
    tally, fates = use.tally, list[str]()
    if tally is not None and tally.num_too_long:
        fates.append(f"{tally.num_too_long} longer than a sequence")
    if tally is not None and tally.num_untrained:
        fates.append(f"{tally.num_untrained} left out without a token to train on")
    return fates


def _tokens(count: int) -> str:
    return f"{count / 1e6:.1f} M tokens" if count >= 1e6 else f"{count / 1e3:.1f} k tokens"

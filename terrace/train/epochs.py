"""The steps of a run that is given in passes over its data, known once the data are prepared."""

from collections.abc import Callable
from dataclasses import replace

from terrace.base.errors import ConfigError
from terrace.base.words import counted
from terrace.data.batches import Batches
from terrace.train.config import RunConfig
from terrace.train.effects import why_no_peak
from terrace.train.keys import UNCOUNTED
from terrace.train.rules import check_run


def with_steps(run: RunConfig, batches: Batches, say: Callable[[str], None]) -> RunConfig:
    """The run with `train.steps` from `train.epochs`, checked as if the steps had been given; `say` gets a line.

    Each source is passed at least `train.epochs` times: by equal weights the larger ones exactly so. The last step is
    filled with sequences of the next pass, since every step has the same size. Raises `ConfigError` if `train.steps` is
    given as well and differs, as in the file of an earlier run that is used for other data.
    """
    epochs, given = run.train.epochs, run.train.steps
    if not epochs:
        return run
    steps, num_more = batches.steps_of(epochs)
    words = f"train.epochs = {epochs:g}: {counted(steps, 'step')} of {run.batch_words}"
    if given not in (UNCOUNTED, steps):
        raise ConfigError(
            f"train.steps = {given} beside {words}: give --train.epochs {epochs:g} or --train.steps {given} to say "
            "which of them counts"
        )
    counts = replace(run, train=replace(run.train, steps=steps))
    check_run(counts)
    uses = batches.uses(steps)
    passes = ", ".join(f"{use.name} {use.epochs:.2f} times" for use in uses) if len(uses) > 1 else ""
    # Where a batch is larger than the data, the last one goes on for several passes.
    next_ones = "the next pass" if num_more <= batches.num_samples else "the next passes"
    more = f"the last with {counted(num_more, 'sequence')} of {next_ones}" if num_more else ""
    say(", ".join(filter(None, (words, passes, more))))
    if reason := why_no_peak("train", run.train.warmup_steps, steps).replace("train.steps", "train.epochs"):
        say(f"warning: train.warmup_steps = {run.train.warmup_steps}: {reason}")
    return counts

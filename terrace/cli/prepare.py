"""Preparation of a run before its ranks start: data, checkpoint, run folder, disk."""

import shutil
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from itertools import count
from pathlib import Path
from shlex import quote
from typing import Any

import torch

from terrace.base.errors import CheckpointError, ConfigError
from terrace.base.files import remove_abandoned, write_atomic
from terrace.base.schema import read_table
from terrace.base.sealed import sealed_toml
from terrace.base.words import quantity
from terrace.checkpoint.layout import check_model, checkpoint_bytes, complete, latest, step_of
from terrace.checkpoint.reading import Checkpoint, newest_whole
from terrace.checkpoint.writing import clear_leftovers
from terrace.cli.programs import check_passes, checked_programs
from terrace.cli.step_progress import passing_lines
from terrace.data.batches import Batches, Source
from terrace.data.eval_batches import EvalSource
from terrace.data.prepared import compare_facts, prepare_eval_sources, prepare_sources
from terrace.data.tokenizer import FileTokenizer, Tokenizer, load_tokenizer, trained_otherwise
from terrace.launch.called import called
from terrace.launch.socket_folder import clear_all_abandoned
from terrace.launch.start import is_restarted
from terrace.model.facts import vocabulary_size
from terrace.model.liger import why_missing
from terrace.plan.gaps import gaps_words
from terrace.plan.layout import Layout
from terrace.runtime.compiled import check_compiler
from terrace.train.adapted import FACT, fact_of
from terrace.train.config import RunConfig, run_toml
from terrace.train.effects import why_no_sample
from terrace.train.facts import OBJECTIVE, check_facts, model_facts
from terrace.train.folder import SOURCE, check_tokenizer, check_weights, source_files
from terrace.train.job import RunJob
from terrace.train.lock import folder_lock
from terrace.train.prediction import resolved_run
from terrace.train.runs import table_to_resume
from terrace.train.sample import sample_prompt
from terrace.train.schedule import rate_jump
from terrace.train.trackers import check_installed
from terrace.train.validation import eval_batches_of

_RUNS = Path("runs")
OF_NUMBERS = ("train", "optimizer", "plan", "lora", "balance")  # sections of a run that may change its numbers


class CompleteError(CheckpointError):
    """The run has already completed all its steps."""


def goes_on(folder: Path | None, resume: Path | None, asked: bool) -> bool:
    """Whether to continue an existing run in `folder`: if `asked`, or if a launcher restarts the ranks."""
    return asked or (folder is not None and resume is None and is_restarted())


def check_command(folder: Path, command: str) -> None:
    """Raises `CheckpointError` if the run in `folder` belongs to the other command, whose files would be replaced.

    Unreadable settings do not prevent a resume (`earlier_table`).
    """
    with suppress(ConfigError):
        table_to_resume(folder, command)


def check_left(folder: Path, done: int, steps: int, key: str) -> None:
    """Raises `CompleteError` if the checkpoint in `folder` is already at the run's last step; `key` sets the number of
    steps.
    """
    if done >= steps:
        raise CompleteError(
            f"{folder} is after step {done} of {steps}, so nothing is left to train: ask for more with --{key} N"
        )


def say_complete(complete: CompleteError, going_on: bool) -> None:
    """Prints that a run is complete, or raises `complete` if the user asked for more."""
    # A launcher may restart a complete run once too often; a user gets an error with the fix.
    if not going_on:
        raise complete
    print(complete, flush=True)


def prepare(
    config: RunConfig,
    folder: Path | None,
    resume: Path | None,
    going_on: bool = False,
    memory: Checkpoint | None = None,
) -> RunJob:
    """Prepares the ranks' job: verifies the program, tokenises the data, and checks everything that will be read and
    written.

    With `going_on` the run continues from `folder`'s checkpoint, or from the one in `memory` if the disk has no later
    one, or else starts there. Raises `CompleteError` if nothing is left to train, and `TerraceError` for anything that
    cannot work; no run folder is made then.
    """
    there = resume or (folder if going_on and folder is not None and (folder / "config.toml").is_file() else None)
    if there is not None:
        check_command(there, "train")
        tidy(there, [there])
    # A run that ended before its first checkpoint has nothing to resume, and begins again in its folder.
    if going_on and folder is not None and (memory is not None or complete(folder / "checkpoints")):
        resume = folder
    # Cheap checks first: a missing package must not wait for the tokeniser.
    check_installed(config.train.metrics)
    check_passes(config, "trained")
    checked_programs(config)
    plan = resolved_run(config).plan
    if said := gaps_words(config.plan, plan):
        print(said, flush=True)
    # Stored, so that on other constants, too, a resumed run multiplies the same parts and rounds the same parts of
    # gradients. It may have other stages, so its file only names stages that the user gave.
    kept = config.plan.with_routing_of(plan)
    config = replace(config, plan=kept)
    is_compiled = compiles(config)
    _check_kernels(config)
    config = replace(config, data=config.data.absolute())  # so that config.toml works from any directory
    tokenizer = load_tokenizer(config.data.tokenizer, config.data.bos, config.data.eos)
    check_tokenizer(tokenizer, config)
    if isinstance(tokenizer, FileTokenizer):
        print(tokenizer.words(), flush=True)
        # Named in config.toml, so that files that change beside the tokenizer do not change the run.
        bos, eos = tokenizer.as_keys()
        config = replace(config, data=replace(config.data, bos=bos, eos=eos))
    if resume is None and (said := check_weights(config)):
        print(said, flush=True)
    sources, evaluated = _sources(config, tokenizer)
    if config.train.prompt is not None and not why_no_sample(config):
        sample_prompt(config, sources, tokenizer)  # refused now rather than at the end
    checkpoint = None if resume is None else _to_resume(resume, config, sources, tokenizer, memory)
    if checkpoint is not None:
        check_left(checkpoint.folder, checkpoint.step, config.train.steps, "train.steps")
    _check_disk(resume or folder or _RUNS, config)
    template = config.data.chat_template
    carried = {} if resume else source_files(config.train.weights, config.data.tokenizer, template, tokenizer)
    is_new = there is None
    chosen = resume or new_folder(folder, going_on)
    # A file of an earlier start is replaced by rank 0, once the ranks are ready and it holds the folder.
    earlier = earlier_table(chosen)
    try:
        with folder_lock(chosen):
            for name, content in carried.items():
                write_atomic(chosen / SOURCE / name, content)
            if earlier is None:
                write_atomic(chosen / "config.toml", sealed_toml(run_toml(config)))
    except OSError as error:
        if is_new:
            shutil.rmtree(chosen, ignore_errors=True)
        raise _unusable(chosen, error) from error
    return RunJob(
        run=replace(config, plan=plan, train=replace(config.train, compile=is_compiled)),
        folder=chosen,
        sources=sources,
        eval_sources=evaluated,
        tokenizer_fingerprint=tokenizer.fingerprint,
        resume=None if checkpoint is None else checkpoint.folder,
        config="" if earlier is None else run_toml(config),
        changes=() if checkpoint is None else _changes(checkpoint.step, earlier, config),
        memory="" if checkpoint is None else checkpoint.text,
        command=called(),
    )


def compiles(config: RunConfig) -> bool:
    """Whether the run compiles its blocks: if `train.compile` is true, and by default on CUDA.

    If the default is not available, prints a line with the reason. Raises `ConfigError` if `train.compile` is true and
    this machine cannot compile.
    """
    asked, device = config.train.compile, torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if asked is False or (asked is None and device.type == "cpu"):
        return False
    try:
        check_compiler(device)
    except ConfigError as error:
        if asked:
            raise
        print(f"not compiled: {error}", flush=True)
        return False
    return True


def _check_kernels(config: RunConfig) -> None:
    # Only the package and the device are checked here; each rank tests the kernels before it allocates anything.
    if config.train.kernels == "torch":
        return
    reason = why_missing() if torch.cuda.is_available() else "this machine has no CUDA device"
    if reason:
        raise ConfigError(f"train.kernels = {config.train.kernels!r} cannot serve: {reason}; leave train.kernels out")


def _sources(config: RunConfig, tokenizer: Tokenizer) -> tuple[tuple[Source, ...], tuple[EvalSource, ...]]:
    """The tokenised and checked data: training sources, and sources for evaluation only."""
    with passing_lines() as progress:
        sources = prepare_sources(config.data, tokenizer, config.train.sequence, progress)
        evaluated = prepare_eval_sources(config.data, tokenizer, config.train.sequence, progress)
    for source in (*sources, *evaluated):
        source.tokens.check_vocab(vocabulary_size(config.model))
    # Raises where the data is too short for a batch, or has nothing to evaluate.
    batches = Batches(sources, config.train.sequence, config.rows, config.train.seed, config.data.holdout)
    eval_batches_of(config, batches, evaluated)
    return sources, evaluated


def tidy(folder: Path, saves: Sequence[Path]) -> None:
    """Removes what a killed run left in its folder and in `saves`, the folders that hold its checkpoints.

    Needed for a run with nothing left to train, whose ranks are not started to do the same. Raises `CheckpointError` if
    another run writes there.
    """
    clear_all_abandoned()
    # Fails if another run writes there: its rank 0 holds the lock to the end.
    with folder_lock(folder):
        remove_abandoned(folder)
        for each in saves:
            # Also for a run that has nothing left to train, which was killed after its last checkpoint.
            if (each / "checkpoints").is_dir():
                try:
                    clear_leftovers(each / "checkpoints")
                except OSError as error:
                    raise _unusable(folder, error) from error


def _changes(step: int, earlier: Mapping[str, Any] | None, config: RunConfig) -> tuple[str, ...]:
    # One key may change a schedule, and the effect show in another number.
    jump = rate_jump(step, earlier, config.train, config.optimizer)
    return (*changes(earlier, tomllib.loads(run_toml(config))), *filter(None, [jump]))


def changes(
    old: Mapping[str, Any] | None, new: Mapping[str, Any], sections: Sequence[str] = OF_NUMBERS
) -> tuple[str, ...]:
    """Settings that may change a resumed run's numbers and differ from the earlier start: `key old -> new`.

    Data, model and ranks are compared with the checkpoint, and reported elsewhere.
    """
    if not old:
        return ("the settings of the earlier start cannot be read, so changes of them are not known",)
    found = []
    for section in sections:
        before, after = (_flat(table.get(section, {}), section) for table in (old, new))
        for key in sorted(before.keys() | after.keys()):
            values = (before.get(key), after.get(key))
            # An empty list equals a key unknown to an earlier version; 0 and false may not.
            if values[0] != values[1] and not all(value in (None, []) for value in values):
                found.append(f"{key} {before.get(key, 'unset')!s} -> {after.get(key, 'unset')!s}")
    return tuple(found)


def _flat(table: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{prefix}.{key}") if isinstance(value, Mapping) else {f"{prefix}.{key}": value}
    return flat


def earlier_table(folder: Path) -> dict[str, Any] | None:
    """The settings of a run's earlier start; None if there was none, empty if they cannot be read."""
    path = folder / "config.toml"
    try:
        return read_table(path, folder) if path.is_file() and path.stat().st_size else None
    except ConfigError:
        return {}


def _to_resume(
    run_folder: Path, config: RunConfig, sources: Sequence[Source], tokenizer: Tokenizer, memory: Checkpoint | None
) -> Checkpoint:
    checkpoint, wrong = _newest(run_folder, memory)
    folder = checkpoint.folder
    if wrong:
        print(f"resuming from {folder}, since {'; '.join(wrong)}", flush=True)
    check_same_run(checkpoint, config, sources, tokenizer)
    return checkpoint


def check_same_run(checkpoint: Checkpoint, config: RunConfig, sources: Sequence[Source], tokenizer: Tokenizer) -> None:
    """Raises `CheckpointError` if a checkpoint has another model, data or sample order than the run."""
    folder = checkpoint.folder
    check_model(folder, checkpoint.layout, config.blocks(), config.optimizer)
    # Every fact that decides the sequence of batches or the model must be the same.
    here: dict[str, Any] = {
        "tokenizer": tokenizer.fingerprint,
        "seed": config.train.seed,
        "batch": config.train.batch,
        "sequence": config.train.sequence,
        FACT: fact_of(config.lora),
        OBJECTIVE: config.train.objective if config.on_pairs else None,
    }
    there = {name: checkpoint.facts.get(name) for name in here}
    of_model = model_facts(checkpoint.facts.get("model", {}), config.model)
    there |= of_model[0]
    here |= of_model[1]
    for name, (old, new) in compare_facts(checkpoint.facts, sources, config.data.holdout).items():
        there[name], here[name] = old, new
    check_facts(folder, there, here, {"tokenizer": trained_otherwise(str(there["tokenizer"]), tokenizer)})


def _newest(run_folder: Path, memory: Checkpoint | None) -> tuple[Checkpoint, list[str]]:
    if memory is None:
        return newest_whole(run_folder)
    on_disk, wrong = latest(run_folder), list[str]()
    # A checkpoint on disk that is not the newest is never read.
    if on_disk is not None and step_of(on_disk) > memory.step:
        try:
            whole, wrong = newest_whole(run_folder)
        except CheckpointError as error:
            wrong = [str(error)]
        else:
            if whole.step > memory.step:
                return whole, wrong
    there = "none" if on_disk is None else f"step {step_of(on_disk)}{' damaged' if wrong else ''}"
    print(f"resuming from step {memory.step} in the memory of the machines (on disk: {there})", flush=True)
    return memory, wrong


def _check_disk(folder: Path, config: RunConfig) -> None:
    train = config.train
    each = checkpoint_bytes(
        config.blocks(),
        config.optimizer,
        config.plan,
        num_islands=Layout.of(config.cluster, config.plan).num_islands,
    )
    num_saves = -(-train.steps // train.checkpoint_every) if train.checkpoint_every else 1
    # The new checkpoint is complete before an old one is removed.
    num_saves += -(-train.steps // train.eval_every) if train.keep_best else 0
    num_kept = train.keep_checkpoints + bool(train.keep_best)
    num_at_once = min(num_saves + 1, num_kept + 1)  # an old one stays until the new one is complete
    existing = next((path for path in (folder, *folder.parents) if path.is_dir()), Path())
    try:
        usage = shutil.disk_usage(existing)
    except OSError as error:
        raise _unusable(folder, error) from error
    free = usage.free if usage.total else num_at_once * each  # a file system that counts nothing has no figures
    if free < num_at_once * each:
        raise ConfigError(
            f"{existing} has {quantity(free, 'B')} free, but a checkpoint takes {quantity(each, 'B')} and "
            f"{num_at_once} exist at once: free space, lower train.keep_checkpoints, or name another --folder"
        )


def new_folder(folder: Path | None, going_on: bool = False) -> Path:
    """Makes a run folder, by default named after the current time. Raises `ConfigError` if it cannot be made."""
    # An empty config.toml claims the folder at once, so that no two runs take the same one. With `going_on` the folder
    # of a run that ended before its first checkpoint is taken over, too.
    if going_on and folder is not None and (folder / "config.toml").is_file():
        return folder
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    # Two runs of the same second get different folders.
    candidates = [folder] if folder is not None else (_RUNS / f"{stamp}{f'-{n}' * bool(n)}" for n in count())
    for candidate in candidates:
        try:
            candidate.mkdir(parents=True, exist_ok=folder is not None)
            if any(candidate.iterdir()):
                raise FileExistsError
            (candidate / "config.toml").touch(exist_ok=False)
            return candidate
        except FileExistsError:
            if folder is not None and folder.is_dir():
                break
            if folder is not None:
                raise ConfigError(f"--folder {folder} is a file: name a new folder") from None
        except OSError as error:
            raise _unusable(candidate, error) from error
    raise ConfigError(
        f"--folder {folder} is not empty: name a new folder, or resume with --resume {quote(str(folder))}"
    )


def _unusable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(f"cannot use {folder} as run folder: {error.strerror}; name another --folder")

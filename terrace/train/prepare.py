"""Preparation of a run before its ranks start, on every machine: data, checkpoint, run folder, disk."""

import shutil
import socket
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from terrace.accelerator import first_device, is_available
from terrace.base.errors import CheckpointError, ConfigError, DataError, PlanError
from terrace.base.files import write_atomic
from terrace.base.sealed import sealed_toml
from terrace.base.words import quantity
from terrace.checkpoint.layout import check_model, checkpoint_bytes, complete, latest, step_of
from terrace.checkpoint.reading import Checkpoint, newest_whole
from terrace.data.batches import Batches, Source
from terrace.data.eval_batches import EvalSource
from terrace.data.prepared import compare_facts, prepare_eval_sources, prepare_sources
from terrace.data.tokenizer import FileTokenizer, Tokenizer, load_tokenizer, trained_otherwise
from terrace.launch.called import called
from terrace.launch.world import World
from terrace.model.facts import vocabulary_size
from terrace.model.liger import why_missing
from terrace.plan.gaps import gaps_words
from terrace.plan.layout import Layout
from terrace.plan.members import boundary_formats, check_shares, with_formats, written_formats
from terrace.plan.wire_rules import check_wire
from terrace.runtime.compiled import check_compiler
from terrace.runtime.kept.file import check_folder
from terrace.train.adapted import FACT, fact_of
from terrace.train.config import RunConfig, run_toml
from terrace.train.deals import DEALS, Deals, deals_to_resume, formats_to_resume
from terrace.train.effects import why_no_sample
from terrace.train.epochs import with_steps
from terrace.train.evaluated import eval_batches_of
from terrace.train.facts import OBJECTIVE, check_facts, model_facts
from terrace.train.folder import SOURCE, check_tokenizer, check_weights, source_files
from terrace.train.follow_links import check_formats_follow
from terrace.train.from_memory import check_partners, check_when_asked, checks_end, chosen, offer, placed
from terrace.train.job import RunJob, job_text, read_job, read_sources, sources_text
from terrace.train.joined import check_world, one_makes
from terrace.train.keys import AUTO
from terrace.train.prediction import check_passes, checked_programs, resolved_run
from terrace.train.run_folder import (
    RUNS,
    CompleteError,
    changes,
    check_command,
    check_left,
    earlier_table,
    folder_lock,
    new_folder,
    say_complete,
    tidy,
    unusable,
)
from terrace.train.sample import sample_prompt
from terrace.train.schedule import rate_jump
from terrace.train.teacher_keys import teacher_model
from terrace.train.trackers import check_installed
from terrace.train.weights import check_values

Say = Callable[[str], None]


def _print(text: str) -> None:
    print(text, flush=True)


def prepare(
    config: RunConfig,
    folder: Path | None,
    resume: Path | None,
    going_on: bool = False,
    memory: Checkpoint | None = None,
    say: Say = _print,
) -> RunJob:
    """Prepares the ranks' job: verifies the program, tokenises the data, and checks everything that will be read and
    written. `say` gets lines for the user, and those of progress (terrace.base.progress).

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
    _check_programs(config)
    plan = resolved_run(config).plan
    if said := gaps_words(config.plan, plan):
        say(said)
    # Stored, so that on other constants, too, a resumed run multiplies the same parts and rounds the same parts of
    # gradients. It may have other stages, so its file only names stages that the user gave.
    kept = config.plan.with_routing_of(plan)
    config = replace(config, plan=kept)
    is_compiled = compiles(config, say)
    _check_kernels(config)
    config = replace(config, data=config.data.absolute(), train=config.train.absolute())  # from any directory
    tokenizer = load_tokenizer(config.data.tokenizer, config.data.bos, config.data.eos)
    check_tokenizer(tokenizer, config)
    if isinstance(tokenizer, FileTokenizer):
        say(tokenizer.words())
        # Named in config.toml, so that files that change beside the tokenizer do not change the run.
        bos, eos = tokenizer.as_keys()
        config = replace(config, data=replace(config.data, bos=bos, eos=eos))
    _check_folders(config, tokenizer, is_resumed=resume is not None, say=say)
    sources, evaluated, batches = _sources(config, tokenizer, say)
    # First, since the steps in a run's file are wrong where its batch or data are others now.
    checkpoint = None if resume is None else _to_resume(resume, config, sources, tokenizer, memory, say)
    config = with_steps(config, batches, say)
    if checkpoint is not None:
        check_left(checkpoint.folder, checkpoint.step, config.train.steps, config.train.length_key)
    _check_disk(resume or folder or RUNS, config)
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
        raise unusable(chosen, error) from error
    job = RunJob(
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
    return job if checkpoint is None else _with_deals(job, checkpoint.step, earlier or {}, say)


def _check_programs(config: RunConfig) -> None:
    checked_programs(config)
    if config.train.follow and boundary_formats(config.cluster, config.plan):
        check_formats_follow(config)


def _with_deals(job: RunJob, step: int, earlier: Mapping[str, Any], say: Say) -> RunJob:
    """A job that goes on after `step` steps, with the shares of its first one and what it deals later."""
    run = job.run
    given = run.plan.shares
    if formats := boundary_formats(run.cluster, run.plan):
        table = earlier.get("plan", {})
        before = written_formats(table.get("wire", {}), table.get("compute", run.plan.compute), run.cluster)
        chosen = formats_to_resume(job.folder, step, before, formats)
        for each in (dealt.formats for dealt in chosen if dealt.formats != formats):
            with _dealt(job, "formats", "plan.wire"):
                check_wire(with_formats(run.plan, run.cluster, each), run.layout)
        return replace(job, deals=chosen)
    deals = deals_to_resume(job.folder, step, earlier, given)
    plan = replace(run.plan, shares=Deals(given, deals).at(step))
    for shares in (plan.shares, *(each.shares for each in deals if each.step > step)):
        with _dealt(job, "shares", "plan.shares"):
            check_shares(run.cluster, replace(plan, shares=shares), run.layout)
    if plan.shares != given:
        say(f"shares = {list(plan.shares)}, as the run has dealt them in {DEALS}, and not plan.shares = {list(given)}")
    return replace(job, run=replace(run, plan=plan), deals=deals)


@contextmanager
def _dealt(job: RunJob, what: str, key: str) -> Iterator[None]:
    """A check of what the run has dealt itself, whose error says so."""
    try:
        yield
    except PlanError as error:
        raise PlanError(
            f"{error}; the run has dealt these {what} itself, in {job.folder / DEALS}: restore the plan, or give "
            f"other --{key}"
        ) from error


def compiles(config: RunConfig, say: Say = _print) -> bool:
    """Whether the run compiles its blocks: if `train.compile` is true, and by default on CUDA.

    If the default is not available, `say` gets a line with the reason. Raises `ConfigError` if `train.compile` is true
    and this machine cannot compile.
    """
    asked, device = config.train.compile, first_device()
    if asked is False or (asked is None and device.type == "cpu"):
        return False
    try:
        check_compiler(device)
    except ConfigError as error:
        if asked:
            raise
        say(f"not compiled: {error}")
        return False
    return True


def _check_kernels(config: RunConfig) -> None:
    if config.train.kernels == "torch":
        return
    reason = why_missing() if is_available() else "this machine has no CUDA device"
    if reason:
        raise ConfigError(f"train.kernels = {config.train.kernels!r} cannot serve: {reason}; leave train.kernels out")


def _check_folders(config: RunConfig, tokenizer: Tokenizer, *, is_resumed: bool, say: Say) -> None:
    """Raises a `TerraceError` unless the folders of the initial weights and of the teacher have what the run reads."""
    if not is_resumed and (said := check_weights(config)):
        say(said)
    if config.teacher.model:
        check_values(config.teacher.model, teacher_model(config.teacher.model), tokenizer, "teacher.model")


def _sources(
    config: RunConfig, tokenizer: Tokenizer, say: Say
) -> tuple[tuple[Source, ...], tuple[EvalSource, ...], Batches]:
    """The tokenised and checked data: training sources, sources for evaluation only, and the training batches."""
    sources = prepare_sources(config.data, tokenizer, config.train.sequence, say)
    evaluated = prepare_eval_sources(config.data, tokenizer, config.train.sequence, say)
    for source in (*sources, *evaluated):
        source.tokens.check_vocab(vocabulary_size(config.model))
    # Raises where the data is too short for a batch, or has nothing to evaluate.
    batches = Batches(sources, config.train.sequence, config.rows, config.train.seed, config.data.holdout)
    eval_batches_of(config, batches, evaluated)
    if config.train.prompt is not None and not why_no_sample(config):
        sample_prompt(config, sources, tokenizer)  # refused now rather than at the end
    return sources, evaluated, batches


def _changes(step: int, earlier: Mapping[str, Any] | None, config: RunConfig) -> tuple[str, ...]:
    # One key may change a schedule, and the effect show in another number.
    jump = rate_jump(step, earlier, config.train, config.optimizer)
    return (*changes(earlier, tomllib.loads(run_toml(config))), *filter(None, [jump]))


def _to_resume(
    run_folder: Path,
    config: RunConfig,
    sources: Sequence[Source],
    tokenizer: Tokenizer,
    memory: Checkpoint | None,
    say: Say,
) -> Checkpoint:
    checkpoint, wrong = _newest(run_folder, memory, say)
    folder = checkpoint.folder
    if wrong:
        say(f"resuming from {folder}, since {'; '.join(wrong)}")
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


def _newest(run_folder: Path, memory: Checkpoint | None, say: Say) -> tuple[Checkpoint, list[str]]:
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
    say(f"resuming from step {memory.step} in the memory of the machines (on disk: {there})")
    return memory, wrong


def _existing(folder: Path) -> Path:
    """The folder, or the first above it that exists."""
    return next((path for path in (folder, *folder.parents) if path.is_dir()), Path())


def _check_disk(folder: Path, config: RunConfig) -> None:
    train = config.train
    if "disk" in config.plan.keep.media:
        check_folder(train.keep_folder or _existing(folder))
    each = checkpoint_bytes(
        config.blocks(), config.optimizer, config.plan, num_islands=Layout.of(config.cluster, config.plan).num_islands
    )
    every = 1 if train.checkpoint_every == AUTO else train.known_every
    num_saves = -(-train.steps // every) if every else 1
    # The new checkpoint is complete before an old one is removed.
    num_saves += -(-train.steps // train.eval_every) if train.keep_best else 0
    num_kept = train.keep_checkpoints + bool(train.keep_best)
    num_at_once = min(num_saves + 1, num_kept + 1)  # an old one stays until the new one is complete
    existing = _existing(folder)
    try:
        usage = shutil.disk_usage(existing)
    except OSError as error:
        raise unusable(folder, error) from error
    free = usage.free if usage.total else num_at_once * each  # a file system that counts nothing has no figures
    if free < num_at_once * each:
        raise ConfigError(
            f"{existing} has {quantity(free, 'B')} free, but a checkpoint takes {quantity(each, 'B')} and "
            f"{num_at_once} exist at once: free space, lower train.keep_checkpoints, or name another --folder"
        )


def joined_job(
    world: World, config: RunConfig, folder: Path | None, resume: Path | None, going_on: bool, say: Say = _print
) -> RunJob | None:
    """The job of this rank in a launcher's world; None if nothing is left to train. Every rank calls this."""
    here = offer(world, folder)

    def prepare_here() -> str:
        with checks_end(world):
            check_world(world, config.cluster)
            is_new = resume is None and not (going_on and folder is not None and (folder / "config.toml").is_file())
            check_partners(world, config, is_new)
            memory = chosen(world, folder, here) if going_on and folder is not None and here is not None else None
        try:
            return job_text(prepare(config, folder, resume, going_on, memory, say))
        except CompleteError as complete:
            say_complete(complete, going_on)
            return ""

    if world.rank != 0:
        check_when_asked(world, here)
    text = one_makes(world, "job", world.rank == 0, prepare_here)
    return placed(read_job(text), here, world) if text else None


def with_sources(world: World, job: RunJob) -> RunJob:
    """The job with sources of this machine, of rank 0's contents. Every rank calls this."""
    # Token caches may be local to a machine: its first rank opens or builds them.
    host = world.hosts[world.rank]
    first = world.hosts.index(host) == world.rank
    text = one_makes(world, f"tokens/{host}", first, lambda: sources_text(*_sources_here(job)))
    sources, eval_sources = read_sources(text)
    return replace(job, sources=sources, eval_sources=eval_sources)


def _sources_here(job: RunJob) -> tuple[tuple[Source, ...], tuple[EvalSource, ...]]:
    # Once per machine: its run folder and its data must be rank 0's.
    if not (job.folder / "config.toml").is_file():
        raise CheckpointError(
            f"{socket.gethostname()} does not see the run folder {job.folder} that rank 0 made: name a --folder on a "
            "file system that all machines share"
        )
    data = job.run.data
    tokenizer, sequence = load_tokenizer(data.tokenizer, data.bos, data.eos), job.run.train.sequence
    sources = prepare_sources(data, tokenizer, sequence)
    eval_sources = prepare_eval_sources(data, tokenizer, sequence)
    # Paths may be local to machines: contents must be the same.
    for mine, of_rank_0 in zip((*sources, *eval_sources), (*job.sources, *job.eval_sources), strict=True):
        here, there = ((each.tokens.digest, each.tokens.sums_digest) for each in (mine, of_rank_0))
        if here != there:
            raise DataError(
                f"{mine.name} on {socket.gethostname()} differs from rank 0's: give every machine the same data"
            )
    return sources, eval_sources

"""A run of `terrace rl` on this machine: folder, runtime, screen and metrics."""

import math
import os
import sys
import tomllib
from collections.abc import Collection, Iterable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from shlex import quote

import tomli_w
import torch

from terrace.base.errors import ConfigError, ModelError, TerraceError
from terrace.base.files import write_atomic
from terrace.base.sealed import sealed_toml
from terrace.base.words import counted, quantity
from terrace.checkpoint.layout import latest
from terrace.checkpoint.reading import Checkpoint
from terrace.cli.output import Terminated, outlive_output, sigterm_raises
from terrace.comm.collectives import DTYPES
from terrace.data.chat_prompt import chat_prompts
from terrace.data.ends import ends_of
from terrace.data.tokenizer import Tokenizer, load_tokenizer
from terrace.generation.cache_shape import cache_shape
from terrace.generation.mapped import pages_words
from terrace.launch.called import called
from terrace.launch.fork_server import fork_server_ahead
from terrace.launch.stop import StoppedEarly, StopRequest, passed_on
from terrace.model.blocks import block_specs
from terrace.model.facts import vocabulary_size
from terrace.model.hf.folder import TOKENIZER
from terrace.model.hf.pretrained import Pretrained
from terrace.program.report import why_no_verdict
from terrace.rl.agreement import Agreement
from terrace.rl.algorithms.metrics import Metrics
from terrace.rl.calls.inline import InlineRuntime
from terrace.rl.calls.local import LocalRuntime
from terrace.rl.calls.runtime import Runtime
from terrace.rl.characters import CharacterTokenizer
from terrace.rl.commands.devices import check_devices, unused_gpus
from terrace.rl.commands.placement_words import generators, measured_words, unrepeatable
from terrace.rl.commands.record import METRICS, record_prediction, recording
from terrace.rl.config import RlConfig, to_toml_table
from terrace.rl.folder import FACTS
from terrace.rl.identity import contents_of
from terrace.rl.making import check_roles, environment_of, started
from terrace.rl.placement.placement import IterationReport
from terrace.rl.placing import ACTOR, LEARNING
from terrace.rl.predicted import PHASES, predicted, stages_of
from terrace.rl.rates import rate_lines
from terrace.rl.run import START, RunInputs, checkpoint_of
from terrace.rl.stream.prompt_file import PromptFile, read_prompts
from terrace.rl.tasks import TASKS
from terrace.rl.totals import Totals
from terrace.rl.values.prompts import PromptSource
from terrace.rl.workers.drawing import page_tokens_of
from terrace.rl.workers.environments import load_environment
from terrace.rl.workers.reward_forms import check_columns
from terrace.rl.workers.reward_function import load_function
from terrace.rl.workers.served import check_servers
from terrace.train.folder import SOURCE, source_files, with_sums
from terrace.train.run_folder import (
    CompleteError,
    changes,
    check_command,
    check_left,
    earlier_table,
    folder_lock,
    goes_on,
    new_folder,
    say_complete,
    tidy,
)
from terrace.train.runs import CONFIG, again
from terrace.train.trackers import check_installed
from terrace.train.weights import check_values

_OF_NUMBERS = ("run", "plan", "plans")  # sections of a run that may change its numbers


def run(
    config: RlConfig,
    folder: Path | None,
    resume: Path | None,
    ray: str = "",
    *,
    going_on: bool = False,
    verbose: bool = False,
) -> None:
    """Runs `config` in a new `folder`, or continues in `resume`, in processes of this machine or on the Ray cluster at
    `ray`.

    With `going_on`, or if Slurm restarts the job, an existing run in `folder` is continued. Raises the `TerraceError`
    of the first mistake, and `Terminated` after a signal.
    """
    outlive_output(_say_loud)
    is_local = not ray and config.cluster.world_size > 1
    # The ranks' modules are imported while this process looks at what the run reads.
    with fork_server_ahead("terrace.rl.making") if is_local else nullcontext():
        _run(config, folder, resume, ray, goes_on(folder, resume, going_on), verbose)


def _run(config: RlConfig, folder: Path | None, resume: Path | None, ray: str, going_on: bool, verbose: bool) -> None:
    if going_on and folder is not None and (folder / CONFIG).is_file():
        check_command(folder, "rl")
        resume = folder
    if resume is not None:
        tidy(resume, [resume, *(resume / name for name in (START, *LEARNING))])
    inputs = _checked(config, ray)
    checkpoint, wrong = (None, list[str]()) if resume is None else checkpoint_of(inputs, resume)
    if checkpoint is not None:
        try:
            done = int(checkpoint.facts[FACTS]["step"])
            check_left(checkpoint.folder, done, config.run.steps, "run.steps")
        except CompleteError as complete:
            say_complete(complete, going_on)
            return
        if wrong:
            print(f"resuming from {checkpoint.folder}, since {'; '.join(wrong)}", flush=True)
    # Last, since it is the only check that waits for others, and a complete run needs none.
    check_servers(config.rollout, config.run.max_prompt + config.run.max_response)
    chosen = resume or new_folder(folder, going_on)
    asked, words = StopRequest(), None
    try:
        with sigterm_raises(), passed_on(asked.ask), folder_lock(chosen):
            pages, gpus = _pages(config, verbose), unused_gpus(config, ray)
            print(f"{_words(config)}{pages}{gpus}\nrun folder {chosen}", flush=True)
            with _runtime(config, ray) as runtime:
                words = _learned(inputs, runtime, chosen, checkpoint, asked)
    except StoppedEarly as early:
        asked.name = str(early)
    if asked.name is not None and words is None:
        raise Terminated(asked.name, again(called(), chosen, "rl", is_saved=latest(chosen / ACTOR) is not None))
    print(words)


def _checked(config: RlConfig, ray: str) -> RunInputs:
    """The inputs of a run, once all of them are checked. Raises the `TerraceError` of the first mistake."""
    inputs = inputs_of(config)
    check_roles(config)
    if config.reference_folder:
        check_values(config.reference_folder, config.reference_model, inputs.tokenizer, "run.reference")
    check_devices(config, ray)
    check_installed(config.run.metrics, "run.metrics")
    if config.environment.name:
        settings = environment_of(config, inputs)
        load_environment(settings.name, settings.folder)
        settings.dialect(inputs.stops).check()
    for each in config.rewards:
        if each.function:
            function = load_function(each.function, os.getcwd())
            for columns in _columns(inputs.prompts):
                check_columns(function, each.function, columns)
        else:
            _check_reward_model(each.model, inputs.tokenizer)
    return replace(inputs, contents=contents_of(config, inputs.prompts))


def _columns(prompts: PromptSource) -> Iterable[Collection[str]]:
    # Each set of columns once: lines of one file may have others.
    lines = prompts.prompts if isinstance(prompts, PromptFile) else [prompts.prompt(0)]
    return {frozenset(each.data): each.data.keys() for each in lines}.values()


def _learned(
    inputs: RunInputs, runtime: Runtime, folder: Path, checkpoint: Checkpoint | None, asked: StopRequest
) -> str | None:
    """Runs to the last step and returns the closing words; None if it was `asked` to stop earlier."""
    config, earlier = inputs.config, earlier_table(folder)
    if not earlier:
        for name, content in _source_of(inputs).items():
            write_atomic(folder / SOURCE / name, content)
        # Before the supervised start, so that a run that ends in it can be resumed.
        _write_config(folder, config)
    # Ranks on other machines have another working folder.
    made = started(inputs, runtime, folder.absolute(), lambda text: print(text, flush=True))
    first = made.resume(checkpoint)
    _write_config(folder, config)
    expected = _predicted(config)
    report = None if isinstance(expected, TerraceError) else expected
    record_prediction(folder, config, report, PHASES)
    totals, agreement = Totals(), Agreement(config)
    with recording(folder, config, first) as record:
        if first:
            print(f"going on after step {first}", flush=True)
            for change in changes(earlier, tomllib.loads(_toml(config)), _OF_NUMBERS):
                words = f"{change} since step {first}"
                print(words, flush=True)
                record.events.add("note", step=first, text=words)
        elif config.run.evaluate_every:
            print(" ".join(f"before: {name} {value:.3f}" for name, value in made.evaluated().items()), flush=True)
            record.samples(0, made.samples.taken(0, False))
        asked.begin()
        for step, metrics in made.steps(lambda: asked.name is not None, record.saved):
            samples = made.samples.taken(step, step == config.run.steps)
            record.step(step, metrics, made.calls, samples)
            totals.add(metrics)
            print(_line(step, metrics), flush=True)
            # Faults of one step are often alike.
            for warning in filter(None, (agreement.words(metrics), *made.faults()[:1])):
                print(warning, flush=True)
                record.events.add("note", step=step, text=warning)
        if step < config.run.steps:
            record.events.add("stopped", why=f"asked to by {asked.name}")
            return None
        record.events.add("finished", step=step, no_verdict=why_no_verdict(max(1, totals.num_steps - 1)))
    return f"{_summary(totals, folder)}\n{_beside_predicted(config, expected, totals)}"


def _source_of(inputs: RunInputs) -> dict[str, bytes]:
    """The files, besides its weights, that commands need to use the model."""
    weights = inputs.config.weights
    if isinstance(inputs.tokenizer, CharacterTokenizer):
        return with_sums(inputs.tokenizer.files())
    return source_files(weights, str(Path(weights) / TOKENIZER), "", inputs.tokenizer)


def _say_loud(words: str) -> None:
    print(f"terrace: {words}", file=sys.stderr, flush=True)


def _predicted(config: RlConfig) -> IterationReport | TerraceError:
    """The predicted step, or the error that prevents one, which must not fail a run that could continue."""
    try:
        return predicted(config)
    except TerraceError as error:
        return error


def _write_config(folder: Path, config: RlConfig) -> None:
    write_atomic(folder / CONFIG, sealed_toml(_toml(config)))


def _toml(config: RlConfig) -> str:
    return tomli_w.dumps(to_toml_table(config))


def inputs_of(config: RlConfig) -> RunInputs:
    """Prompts and tokenizer of a run. Raises `DataError`, `ConfigError` or `ModelError` if they do not fit."""
    if config.run.task:
        task = TASKS[config.run.task]
        prompts, tokenizer = task.prompts(config.run.seed), task.tokenizer
        _check_vocabulary(tokenizer, config)
        if config.weights:
            Pretrained(config.weights, config.model).check()
        stops = _stops(tokenizer)
        return RunInputs(config=config, prompts=prompts, tokenizer=tokenizer, stops=stops, examples=prompts.examples)
    if not config.weights:
        raise ConfigError("weights is missing: learning from feedback begins with a model; give --model FOLDER")
    Pretrained(config.weights, config.model).check()
    path = Path(config.weights) / TOKENIZER
    loaded = load_tokenizer(str(path))
    _check_vocabulary(loaded, config)
    name = config.environment.name
    found = read_prompts(
        Path(config.run.prompts_file),
        config.run.prompt_column,
        loaded,
        longest=config.run.max_prompt,
        num_held_out=config.run.held_out,
        seed=config.run.seed,
        chats=cache(lambda: chat_prompts(loaded, path)),
        tools=getattr(load_environment(name, os.getcwd()), "tools", None) if name else None,
    )
    chat = str(path) if name and found.is_chat else ""
    stops = _stops(loaded, config.weights)
    return RunInputs(config=config, prompts=found, tokenizer=loaded, stops=stops, chat=chat)


def _check_reward_model(folder: str, tokenizer: Tokenizer) -> None:
    Pretrained(folder).check()
    # It reads the tokens that the actor writes.
    if load_tokenizer(str(Path(folder) / TOKENIZER)).fingerprint != tokenizer.fingerprint:
        raise ModelError(f"{folder} has another tokenizer than the actor's model: train the reward model with that one")


def _check_vocabulary(tokenizer: Tokenizer, config: RlConfig) -> None:
    if tokenizer.vocab_size > (known := vocabulary_size(config.model)):
        raise ModelError(
            f"the largest id of the tokenizer is {tokenizer.vocab_size - 1}, but the model's vocabulary has "
            f"{known}: name the folder that the tokenizer belongs to"
        )


def _stops(tokenizer: Tokenizer, folder: str = "") -> frozenset[int]:
    found = ends_of(tokenizer, Path(folder) / TOKENIZER, folder=Path(folder) if folder else None)
    if not found:
        raise ConfigError("the tokenizer has no end of text, so no response could end: declare an eos_token")
    return frozenset(found)


def _runtime(config: RlConfig, ray: str) -> Runtime:
    timeout_s = config.run.timeout_s
    if ray:
        # The one module that imports Ray, which is an extra.
        from terrace.rl.calls.on_ray import RayRuntime

        return RayRuntime(ray, timeout_s=timeout_s)
    if config.cluster.world_size == 1:
        return InlineRuntime()
    return LocalRuntime(timeout_s=timeout_s, backend="gloo" if config.cluster.device.type == "cpu" else "nccl")


def _words(config: RlConfig) -> str:
    run, ranks = config.run, config.cluster.world_size
    size = sum(block.num_trainable + block.num_frozen for block in block_specs(config.model))
    return (
        f"{config.algorithm.name}: {size / 1e6:.2f} M parameters, {counted(run.steps, 'step')} of {run.prompts} "
        f"prompts x {counted(run.responses, 'response')}, {run.mini_batch} an update\n{counted(ranks, 'rank')}, plan "
        f"{config.plan.name}; {generators(config)} to generate"
        f"{_uncorrected(config)}{unrepeatable(config)}\n" + "\n".join(rate_lines(config))
    )


def _pages(config: RlConfig, verbose: bool) -> str:
    """A line on a replica's key-value pages, if `verbose` or if they cannot be mapped."""
    if config.rollout.is_served:
        return ""
    rows, dtype = config.run.rows, DTYPES[config.plan.compute]
    device = torch.device(config.cluster.device.type)
    shape = cache_shape(block_specs(config.model), rows)
    words, is_fallback = pages_words(shape, page_tokens_of(config.model, rows, dtype), device, dtype)
    return f"\n{words}" if verbose or is_fallback else ""


def _uncorrected(config: RlConfig) -> str:
    if not config.run.max_lag or config.algorithm.importance_bound is not None:
        return ""
    lag = counted(config.run.max_lag, "step")
    return f"\nresponses up to {lag} old count as fresh; algorithm.importance_bound = 2 would weigh them"


def _line(step: int, found: Metrics) -> str:
    shown = [f"step {step:4d}", f"reward {found.get('reward/mean', math.nan):.3f}"]
    for words, name in (("KL", "actor/kl"), ("cost", "safe/cost"), ("lambda", "safe/lambda")):
        # Without the sign of a rounded zero.
        shown += [f"{words} {round(found[name], 3) + 0.0:.3f}"] if name in found else []
    shown += [f"entropy {found['actor/entropy']:.3f}"] if "actor/entropy" in found else []
    shown += [f"turns {found['environment/turns/mean']:.1f}"] if "environment/turns/mean" in found else []
    shown.append(f"length {found.get('response_length/mean', math.nan):.1f}")
    shown.append(f"rollout diff {found.get('rollout/logprob_diff_max', math.nan):.1e}")
    shown += [f"lag {found['sync/version_lag']:.1f}"] if found.get("sync/version_lag") else []
    shown.append(f"{found['perf/tokens_per_s']:,.0f} tokens/s, {found['time/step']:.1f} s")
    shown += [f"held out {found['val/reward']:.3f}"] if "val/reward" in found else []
    return "   ".join(shown)


def _summary(found: Totals, folder: Path) -> str:
    """Mean seconds by phase, idle ranks, lag, and predicted and measured bytes of the hand-over."""
    phases = [(name.removeprefix("time/"), found.mean(name)) for name in found.names if name.startswith("time/")]
    lines = [f"\nseconds of a step, mean of {counted(found.num_steps, 'step')}"]
    lines += [f"    {name:14s} {value:8.3f}" for name, value in sorted(phases, key=lambda each: -each[1])]
    lines.append(f"ranks without a call: {100 * found.mean('sync/bubble'):.0f} % of a step{_lag_words(found)}")
    # The first step of a resumed run may learn from responses that were saved with their checkpoint.
    planned, sent = (found.mean_that_have(f"reshard/bytes_{kind}") for kind in ("planned", "sent"))
    if planned is not None and sent is not None:
        lines.append(f"hand-over: predicted {quantity(planned, 'B')}, measured {quantity(sent, 'B')}")
    lines.append(f"metrics in {folder / METRICS}; to go on: {called()} rl --resume {quote(str(folder))} --run.steps N")
    return "\n".join(lines)


def _lag_words(found: Totals) -> str:
    largest = found.largest("sync/version_lag_max")
    if not largest:
        return ""
    stale, resumed = (100 * found.mean(f"sync/{name}") for name in ("stale_tokens", "resumed"))
    return (
        f"; responses are {found.mean('sync/version_lag'):.1f} steps old, at most {largest:.0f}: older weights drew "
        f"{stale:.0f} % of tokens, several {resumed:.0f} % of responses"
    )


def _beside_predicted(config: RlConfig, expected: IterationReport | TerraceError, found: Totals) -> str:
    if isinstance(expected, TerraceError):
        return f"no prediction beside it: {expected}"
    asked = (
        "" if config.cluster.is_measured else "\nfrom the figures of the cluster's file; terrace probe measures them"
    )
    return f"{measured_words(expected, stages_of(found), why_no_verdict(max(1, found.num_steps - 1)))}{asked}"

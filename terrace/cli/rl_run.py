"""A run of `terrace rl` on this machine: its folder, runtime, screen and metrics."""

import math
import os
from functools import cache
from pathlib import Path
from shlex import quote
from statistics import fmean

import tomli_w

from terrace.base.errors import ConfigError, ModelError, PlanError, TerraceError, TrainingError
from terrace.base.files import write_atomic
from terrace.base.sealed import sealed_toml
from terrace.base.words import counted
from terrace.cli.prepare import new_folder
from terrace.cli.rl_record import METRICS, recording, write_prediction
from terrace.data.chat_prompt import chat_prompts
from terrace.data.ends import ends_of
from terrace.data.tokenizer import Tokenizer, load_tokenizer
from terrace.launch.start import local_devices
from terrace.model.config import block_specs
from terrace.model.hf.folder import TOKENIZER
from terrace.model.hf.pretrained import Pretrained
from terrace.planner.roles.placement import IterationReport
from terrace.report.roles import measured_words
from terrace.report.tables import quantity
from terrace.rl.algorithms.metrics import Metrics
from terrace.rl.calls.inline import InlineRuntime
from terrace.rl.calls.local import LocalRuntime
from terrace.rl.calls.runtime import Runtime
from terrace.rl.config import RlConfig, to_toml_table
from terrace.rl.making import check_roles, started
from terrace.rl.placing import ACTOR, ROLLOUT
from terrace.rl.predicted import PHASES, predicted, stages_of
from terrace.rl.run import RunInputs, checkpoint_of
from terrace.rl.sort_task import SortPrompts, SortTokenizer
from terrace.rl.stream.prompt_file import read_prompts
from terrace.rl.workers.reward_function import load_function
from terrace.train.lock import folder_lock
from terrace.train.trackers import check_installed

CONFIG = "config.toml"


def run(config: RlConfig, folder: Path | None, resume: Path | None, ray: str | None = None) -> None:
    """Run it in a new `folder`, or go on in `resume`, in processes of this machine or on the Ray cluster at `ray`.

    Raises the `TerraceError` of the first mistake.
    """
    inputs = inputs_of(config)
    check_roles(config)
    _check_devices(config, ray)
    check_installed(config.run.metrics)
    for each in config.rewards:
        if each.function:
            load_function(each.function, os.getcwd())
        else:
            _check_reward_model(each.model, inputs.tokenizer)
    if resume is not None:
        checkpoint_of(inputs, resume)
    chosen = resume or new_folder(folder)
    print(f"{_words(config)}{_unused_gpus(config, ray)}\nrun folder {chosen}", flush=True)
    with folder_lock(chosen), _runtime(config, ray) as runtime:
        if resume is None:
            # Before the supervised start, so that a run that ends in it can be resumed.
            _write_config(chosen, config)
        # Ranks on other machines have another working folder.
        made = started(inputs, runtime, chosen.absolute(), lambda text: print(text, flush=True))
        first = made.resume() if resume is not None else 0
        if first >= config.run.steps:
            raise TrainingError(f"{chosen} has all of its {counted(first, 'step')}: give a larger --run.steps to go on")
        _write_config(chosen, config)
        expected = _predicted(config)
        report = None if isinstance(expected, TerraceError) else expected
        write_prediction(chosen, report, PHASES, is_measured=config.cluster.is_measured)
        with recording(chosen, config, first) as record:
            if first:
                print(f"going on after step {first}", flush=True)
            elif config.run.evaluate_every:
                print(" ".join(f"before: {name} {value:.3f}" for name, value in made.evaluated().items()), flush=True)
                record.samples(0, made.samples.taken(0, False))
            found = list[Metrics]()
            for step, metrics in made.steps():
                samples = made.samples.taken(step, step == config.run.steps)
                record.step(step, metrics, made.calls, samples)
                found.append(metrics)
                print(_line(step, metrics), flush=True)
    print(_summary(found, chosen))
    print(_beside_predicted(config, expected, found))


def _predicted(config: RlConfig) -> IterationReport | TerraceError:
    """The predicted step, or why there is none: a run that can go on does not fail for it."""
    try:
        return predicted(config)
    except TerraceError as error:
        return error


def _write_config(folder: Path, config: RlConfig) -> None:
    write_atomic(folder / CONFIG, sealed_toml(tomli_w.dumps(to_toml_table(config))))


def inputs_of(config: RlConfig) -> RunInputs:
    """Prompts and tokenizer of a run; raises `DataError`, `ConfigError` or `ModelError` where they do not fit."""
    if config.run.task:
        task = SortPrompts(config.run.seed)
        tokenizer: Tokenizer = SortTokenizer()
        _check_vocabulary(tokenizer, config)
        if config.weights:
            Pretrained(config.weights, config.model).check()
        stops = _stops(tokenizer)
        return RunInputs(config=config, prompts=task, tokenizer=tokenizer, stops=stops, examples=task.examples)
    if not config.weights:
        raise ConfigError("weights is missing: learning from feedback begins with a model; give --model FOLDER")
    Pretrained(config.weights, config.model).check()
    tokenizer = load_tokenizer(str(Path(config.weights) / TOKENIZER))
    _check_vocabulary(tokenizer, config)
    prompts = read_prompts(
        Path(config.run.prompts_file),
        config.run.prompt_column,
        tokenizer,
        longest=config.run.max_prompt,
        num_held_out=config.run.held_out,
        seed=config.run.seed,
        chats=cache(lambda: chat_prompts(tokenizer, Path(config.weights) / TOKENIZER)),
    )
    return RunInputs(config=config, prompts=prompts, tokenizer=tokenizer, stops=_stops(tokenizer, config.weights))


def _check_reward_model(folder: str, tokenizer: Tokenizer) -> None:
    Pretrained(folder).check()
    # It reads the tokens that the actor writes.
    if load_tokenizer(str(Path(folder) / TOKENIZER)).fingerprint != tokenizer.fingerprint:
        raise ModelError(f"{folder} has another tokenizer than the actor's model: train the reward model with that one")


def _check_vocabulary(tokenizer: Tokenizer, config: RlConfig) -> None:
    if tokenizer.vocab_size > config.model.vocab_size:
        raise ModelError(
            f"the largest id of the tokenizer is {tokenizer.vocab_size - 1}, but the model's vocabulary has "
            f"{config.model.vocab_size}: name the folder that the tokenizer belongs to"
        )


def _stops(tokenizer: Tokenizer, folder: str = "") -> frozenset[int]:
    found = ends_of(tokenizer, Path(folder) / TOKENIZER, folder=Path(folder) if folder else None)
    if not found:
        raise ConfigError("the tokenizer has no end of text, so no response could end: declare an eos_token")
    return frozenset(found)


def _runtime(config: RlConfig, ray: str | None) -> Runtime:
    timeout_s = config.run.timeout_s
    if ray is not None:
        # The one module that imports Ray, which is an extra.
        from terrace.rl.calls.on_ray import RayRuntime

        return RayRuntime(ray, timeout_s=timeout_s)
    if config.cluster.world_size == 1:
        return InlineRuntime()
    return LocalRuntime(timeout_s=timeout_s, backend="nccl" if config.cluster.device.backend == "cuda" else "gloo")


def _check_devices(config: RlConfig, ray: str | None) -> None:
    if config.cluster.device.backend != "cuda":
        return
    if ray is not None:
        raise ConfigError(
            f"cluster {config.cluster.name!r} has CUDA devices, and under Ray roles run on CPUs: add "
            "--cluster.device.backend cpu, or leave out --ray"
        )
    ranks, num_devices = config.cluster.world_size, len(local_devices())
    if num_devices < ranks:
        raise PlanError(
            f"cluster {config.cluster.name!r} has {counted(ranks, 'rank')} with a CUDA device each, and this machine "
            f"has {counted(num_devices, 'CUDA device')}: give it fewer ranks, such as --cluster.tiers.NAME.size 1, or "
            "try it on this machine's CPU with --cluster.device.backend cpu"
        )


def _unused_gpus(config: RlConfig, ray: str | None) -> str:
    """A line on GPUs of this machine that the run leaves idle; empty where there are none."""
    num = len(local_devices())
    if not num or ray is not None or config.cluster.device.backend == "cuda":
        return ""
    return (
        f"\nroles run on the CPU, as device.backend of cluster {config.cluster.name!r} says: {counted(num, 'GPU')} of "
        "this machine not used"
    )


def _words(config: RlConfig) -> str:
    run, ranks = config.run, config.cluster.world_size
    drawing = config.places[ROLLOUT if config.is_apart else ACTOR].cluster.world_size
    size = sum(block.num_trainable + block.num_frozen for block in block_specs(config.model))
    return (
        f"{config.algorithm.name}: {size / 1e6:.2f} M parameters, {counted(run.steps, 'step')} of {run.prompts} "
        f"prompts x {counted(run.responses, 'response')}, {run.mini_batch} an update\n{counted(ranks, 'rank')}, plan "
        f"{config.plan.name}; {counted(drawing // run.rows, 'replica')} of {counted(run.rows, 'rank')} to generate"
        f"{_uncorrected(config)}"
    )


def _uncorrected(config: RlConfig) -> str:
    if not config.run.max_lag or config.algorithm.importance_bound is not None:
        return ""
    lag = counted(config.run.max_lag, "step")
    return f"\nresponses up to {lag} old count as fresh; algorithm.importance_bound = 2 would weigh them"


def _line(step: int, found: Metrics) -> str:
    shown = [f"step {step:4d}", f"reward {found.get('reward/mean', math.nan):.3f}"]
    for words, name in (("KL", "actor/kl"), ("cost", "safe/cost"), ("lambda", "safe/lambda")):
        shown += [f"{words} {found[name]:.3f}"] if name in found else []
    shown += [f"entropy {found['actor/entropy']:.3f}"] if "actor/entropy" in found else []
    shown.append(f"length {found.get('response_length/mean', math.nan):.1f}")
    shown.append(f"rollout diff {found.get('rollout/logprob_diff_max', math.nan):.1e}")
    shown += [f"lag {found['sync/version_lag']:.1f}"] if found.get("sync/version_lag") else []
    shown.append(f"{found['perf/tokens_per_s']:,.0f} tokens/s, {found['time/step']:.1f} s")
    shown += [f"held out {found['val/reward']:.3f}"] if "val/reward" in found else []
    return "   ".join(shown)


def _summary(found: list[Metrics], folder: Path) -> str:
    """Mean seconds by phase, idle ranks, lag, and the hand-over's bytes, predicted and measured."""
    names = dict.fromkeys(name for step in found for name in step if name.startswith("time/"))
    means = {name: _mean(found, name) for name in names}
    phases = [(name.removeprefix("time/"), value) for name, value in means.items()]
    lines = [f"\nseconds of a step, mean of {counted(len(found), 'step')}"]
    lines += [f"    {name:14s} {value:8.3f}" for name, value in sorted(phases, key=lambda each: -each[1])]
    lines.append(f"ranks without a call: {100 * _mean(found, 'sync/bubble'):.0f} % of a step{_lag_words(found)}")
    # The first step of a resumed run may learn from responses that were saved with their checkpoint.
    handed = [step for step in found if "reshard/bytes_sent" in step]
    if handed:
        planned, sent = (fmean(step[f"reshard/bytes_{kind}"] for step in handed) for kind in ("planned", "sent"))
        lines.append(f"hand-over: predicted {quantity(planned, 'B')}, measured {quantity(sent, 'B')}")
    lines.append(f"metrics in {folder / METRICS}; to go on: terrace rl --resume {quote(str(folder))} --run.steps N")
    return "\n".join(lines)


def _lag_words(found: list[Metrics]) -> str:
    largest = max(step.get("sync/version_lag_max", 0.0) for step in found)
    if not largest:
        return ""
    stale, resumed = (100 * _mean(found, f"sync/{name}") for name in ("stale_tokens", "resumed"))
    return (
        f"; responses are {_mean(found, 'sync/version_lag'):.1f} steps old, at most {largest:.0f}: older weights drew "
        f"{stale:.0f} % of tokens, several {resumed:.0f} % of responses"
    )


def _mean(found: list[Metrics], name: str) -> float:
    return sum(step.get(name, 0.0) for step in found) / len(found)


def _beside_predicted(config: RlConfig, expected: IterationReport | TerraceError, found: list[Metrics]) -> str:
    if isinstance(expected, TerraceError):
        return f"no prediction beside it: {expected}"
    asked = (
        "" if config.cluster.is_measured else "\nfrom the figures of the cluster's file; terrace probe measures them"
    )
    return f"{measured_words(expected, stages_of(found))}{asked}"

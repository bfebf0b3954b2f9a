"""Options of other trainers, earlier versions and other commands: each is refused with its name here.

The last table of docs/coming-from.md shows `OPTIONS` and `PLANS`; a test holds both equal.
"""

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from terrace.base.errors import ConfigError

RUN = "RUN"  # the first word of commands that look at a run
# Our names -> other names. Of our names, the first one that a command has is suggested.
OPTIONS: Mapping[tuple[str, ...], tuple[str, ...]] = {
    ("--model",): ("--model-name-or-path",),
    ("--data",): ("--data-path", "--train-data-path"),
    ("--train.batch", "--batch"): ("--batch", "--train.batch", "--global-batch-size"),
    ("--plan.micro_batch",): ("--micro-batch-size", "--per-device-train-batch-size"),
    ("--train.sequence", "--sequence", "--context"): (
        "--sequence",
        "--train.sequence",
        "--seq",
        "--seq-len",
        "--seq-length",
    ),
    ("--train.steps", "--run.steps"): ("--steps", "--max-steps", "--train-iters"),
    ("--train.checkpoint_every",): ("--save-interval", "--save-steps"),
    ("--train.keep_checkpoints",): ("--save-total-limit",),
    ("--train.compile",): ("--torch-compile",),
    ("--train.metrics",): ("--report-to",),
    ("--optimizer.lr",): ("--lr", "--learning-rate"),
    ("--optimizer.weight_decay",): ("--weight-decay",),
    ("--optimizer.clip",): ("--clip-grad", "--max-grad-norm"),
    ("--optimizer.name",): ("--optim",),
    ("--plan zero1",): ("--use-distributed-optimizer",),
    ("--plan.compute bf16",): ("--bf16",),
    ("--plan.recompute",): ("--gradient-checkpointing", "--recompute-granularity"),
    ("--plan.sequence_parallel",): ("--sequence-parallel",),
    ("--plan.mapping.node.tensor",): ("--tensor-model-parallel-size",),
    ("--plan.mapping.system.pipeline",): ("--pipeline-model-parallel-size",),
    ("--plan.mapping.system.context.ring",): ("--context-parallel-size",),
    (RUN, "--folder", "--out", "--picture"): ("--run", "--folder", "--out", "--output", "--output-dir", "--page"),
    ("--resume",): ("--resume-from-checkpoint",),
    ("--tokens",): ("--max-tokens", "--max-new-tokens"),
}
PLANS: Mapping[str, tuple[str, ...]] = {
    "zero1": ("zero-1", "distributed-optimizer"),
    "zero2": ("zero-2", "shard_grad_op"),
    "zero3": ("zero-3", "fsdp", "fsdp2", "full_shard"),
    "hsdp": ("hybrid_shard",),
    "zero++": ("zeropp",),
}


def check_names(words: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """Raises `ConfigError` for the first option or plan of a command line that has another name here.

    `parser` is the whole parser with the subparser of the command. A plan that is the name of a file is left alone.
    """
    command, own = _command_of(words, parser)
    names = {name for action in own._actions for name in action.option_strings}
    takes_run = any(action.metavar in (RUN, "FOLDER") for action in own._actions if not action.option_strings)
    for before, word in pairwise(words):
        name, _, value = word.partition("=")
        if name.startswith("--") and name not in names:
            for each in _own_names(name):
                if each in names or _is_key(each, command) or each.partition(" ")[0] in names:
                    raise ConfigError(f"unknown argument {name!r}; did you mean {each}?")
                if each == RUN and takes_run:
                    raise ConfigError(
                        f"unknown argument {name!r}; the folder is the first word: terrace {command} {RUN}"
                    )
        plan = word if before == "--plan" else value if name == "--plan" else ""
        for preset, others in PLANS.items():
            if plan.replace("zero_", "zero-") in others and not os.path.exists(plan):
                raise ConfigError(f"there is no plan {plan!r}; did you mean --plan {preset}?")


def _command_of(words: Sequence[str], parser: argparse.ArgumentParser) -> tuple[str, argparse.ArgumentParser]:
    """The name of the command and its own parser; `data prepare` has two words."""
    name = ""
    for word in words:
        inner = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        if not inner or word not in inner[0].choices:
            break
        name, parser = f"{name} {word}".strip(), inner[0].choices[word]
    return name, parser


def _own_names(name: str) -> Iterator[str]:
    # Other trainers write - or _; keys have _.
    spelled = name if "." in name else name.replace("_", "-")
    if spelled != name:
        yield spelled
    for own, others in OPTIONS.items():
        if name in others or spelled in others:
            yield from (each for each in own if each != name)


def _is_key(name: str, command: str) -> bool:
    section, dot, key = name.removeprefix("--").partition(" ")[0].partition(".")
    if not dot:
        return False
    if command == "plan":  # the keys of the plan that is compared
        return section == "plan"
    # For an error alone: to know the keys takes a moment.
    from terrace.cli.keys import dotted, takers

    command = "train" if command == "data prepare" else command
    return command in takers() and f"{section}.{key.partition('.')[0]}" in dotted(command)

"""Translates option and plan names of other trainers, other commands and earlier versions to a command's own.

Examples are `--plan fsdp`, `--lr` and `plan --seq`. Each translation is printed. An option has the same name in all
commands (tests/cli/test_names_of_options.py).
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

_PLANS = {
    "zero-1": "zero1",
    "zero-2": "zero2",
    "zero-3": "zero3",
    "zero_1": "zero1",
    "zero_2": "zero2",
    "zero_3": "zero3",
    "fsdp": "zero3",
    "fsdp2": "zero3",
    "full_shard": "zero3",
    "shard_grad_op": "zero2",
    "hybrid_shard": "hsdp",
    "distributed-optimizer": "zero1",
    "zeropp": "zero++",
}
_BATCH = ("--batch", "--train.batch", "--global-batch-size")
_SEQUENCE = ("--sequence", "--train.sequence", "--seq", "--seq-len", "--seq-length")
_FOLDER = ("--out", "--output", "--output-dir", "--output_dir", "--run")
_KEYS = {
    "--lr": "--optimizer.lr",
    "--learning-rate": "--optimizer.lr",
    "--learning_rate": "--optimizer.lr",
    "--weight-decay": "--optimizer.weight_decay",
    "--weight_decay": "--optimizer.weight_decay",
    "--steps": "--train.steps",
    "--max-steps": "--train.steps",
    "--max_steps": "--train.steps",
    "--train-iters": "--train.steps",
    **{name: "--train.batch" for name in _BATCH if name != "--train.batch"},
    **{name: "--train.sequence" for name in _SEQUENCE if name != "--train.sequence"},
}
_SIZES = {name: own for own, names in (("--batch", _BATCH), ("--sequence", _SEQUENCE)) for name in names if name != own}
_DRAWS = {
    "--max-tokens": "--tokens",
    "--max-new-tokens": "--tokens",
    "--max_new_tokens": "--tokens",
    "--top_k": "--top-k",
    "--top_p": "--top-p",
    "--min_p": "--min-p",
}
_OPTIONS = {
    "train": _KEYS | dict.fromkeys(_FOLDER, "--folder"),
    "rl": dict.fromkeys(_FOLDER, "--folder") | {"--steps": "--run.steps", "--max-steps": "--run.steps"},
    "simulate": _KEYS,
    "explain": _KEYS,
    "doctor": _KEYS,
    "plan": _SIZES | {"--output": "--out"},
    "scale": _SIZES | {"--output": "--picture", "--out": "--picture"},
    "data": _SIZES | {"--output": "--picture", "--out": "--picture"},
    "report": {"--output": "--out", "--page": "--out"},
    "probe": {"--output": "--out"},
    "generate": _DRAWS,
    "eval": dict.fromkeys(_SEQUENCE, "--context"),
}
# Commands whose first word is a run folder.
_OF_A_RUN = ("report", "replay", "generate", "eval", "export")
_RUN = ("--run", "--folder")


def translated(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns `words` with Terrace's own names, and a line for each change.

    A `--plan` value that is the path of a file is not translated.
    """
    command, options = (words[0], _OPTIONS.get(words[0], {})) if words else ("", {})
    if words[:2] == ["data", "prepare"]:
        options = _KEYS
    found, said = list(words[:1]), list[str]()
    for before, word in pairwise(words):
        name, equals, value = word.partition("=")
        own = word
        if name in options:
            own = options[name] + equals + value
            said.append(f"{name} is {options[name]} here")
        plan = word if before == "--plan" else value if name == "--plan" else ""
        if plan in _PLANS and not Path(plan).exists():
            own = own.removesuffix(plan) + _PLANS[plan]
            said.append(f"--plan {plan} is --plan {_PLANS[plan]} here")
        found.append(own)
    if command in _OF_A_RUN:
        found = _run_first(found, said)
    return found, said


def _run_first(words: list[str], said: list[str]) -> list[str]:
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name not in _RUN or not (equals or words[place + 1 :]):
            continue
        value = value if equals else words[place + 1]
        said.append(f"{name} {value} is the first word here: terrace {words[0]} {value}")
        return [words[0], value, *words[1:place], *words[place + (1 if equals else 2) :]]
    return words

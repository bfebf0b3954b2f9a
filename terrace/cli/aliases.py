"""Words of other trainers on the command line, translated aloud: `--plan fsdp`, `--lr`."""

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
_KEYS = {
    "--lr": "--optimizer.lr",
    "--learning-rate": "--optimizer.lr",
    "--learning_rate": "--optimizer.lr",
    "--weight-decay": "--optimizer.weight_decay",
    "--weight_decay": "--optimizer.weight_decay",
    "--global-batch-size": "--train.batch",
    "--seq-len": "--train.sequence",
    "--seq-length": "--train.sequence",
    "--max-steps": "--train.steps",
    "--max_steps": "--train.steps",
    "--train-iters": "--train.steps",
}
_OF_RUNS = ("train", "simulate", "doctor")  # commands whose options are keys of a run


def translated(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """(`words` with Terrace's own names, a line for each that has changed).

    A plan's file of such a name is that file.
    """
    found, said = list(words[:1]), list[str]()
    for before, word in pairwise(words):
        name, equals, value = word.partition("=")
        own = word
        if name in _KEYS and words[0] in _OF_RUNS:
            own = _KEYS[name] + equals + value
            said.append(f"{name} is {_KEYS[name]} here")
        plan = word if before == "--plan" else value if name == "--plan" else ""
        if plan in _PLANS and not Path(plan).exists():
            own = own.removesuffix(plan) + _PLANS[plan]
            said.append(f"--plan {plan} is --plan {_PLANS[plan]} here")
        found.append(own)
    return found, said

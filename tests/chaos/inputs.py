"""The inputs of the runs whose files are damaged: what a user has, and no command writes."""

import json
from pathlib import Path

import tomli_w

from terrace.base.schema import dump
from tests.support.chats import TALK, write_lines, write_tokenizer
from tests.support.tiny_runs import MODEL
from tests.support.toys import cluster_of

STEPS, EVERY = 6, 2
_SIZES = (1, 1, 2)


def write_inputs(inputs: Path) -> None:
    """Texts, conversations, a tokenizer, and the model, cluster and run files of two ranks, in the folder `inputs`."""
    inputs.mkdir(parents=True)
    lines = [f"The fox of line {number} jumps over the lazy dog.\n" for number in range(120)]
    (inputs / "text.txt").write_text("".join(lines))
    (inputs / "short.txt").write_text("".join(lines[:2]))
    (inputs / "texts").mkdir()
    for number in range(6):
        (inputs / "texts" / f"{number}.txt").write_text("".join(lines[20 * number : 20 * number + 20]))
    write_lines(inputs / "chats.jsonl", [{"messages": TALK[number % 2 :]} for number in range(12)])
    write_tokenizer(inputs / "tokenizer")
    (inputs / "config.json").write_text(json.dumps(MODEL | {"vocab_size": 420}))
    cluster = dump(cluster_of(*_SIZES))
    cluster["device"]["marks"] = {"kernels.gemm": "fitted"}  # so that no start measures the machine
    (inputs / "cluster.toml").write_text(tomli_w.dumps(cluster))
    table = {
        "cluster": "cluster.toml",
        "model": "config.json",
        "plan": {"preset": "zero3", "wire": {"reduce": {"system": "int8:16+feedback"}}},
        "data": {
            "tokenizer": "tokenizer/tokenizer.json",
            "cache": "../cache",
            "mixture": [
                {"path": "text.txt", "name": "text"},
                {"path": "chats.jsonl", "name": "chats", "format": "chat", "too_long": "split"},
            ],
        },
        "train": {"steps": STEPS, "batch": 8, "sequence": 32, "warmup_steps": 1, "timeout_s": 15.0}
        | {"checkpoint_every": EVERY, "background_save": False},
        "optimizer": {"lr": 1e-2},
    }
    (inputs / "run.toml").write_text(tomli_w.dumps(table))

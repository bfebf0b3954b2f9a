"""Teach a model by a reward function of your own, with GRPO.

    python -m examples.grpo_reward

The model is tiny and made here; put the folder of a downloaded one in its place. For a controller of your own, in place
of `terrace rl`, see `examples/grpo_by_hand.py`.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from examples.tiny_model import write_tiny_model
from terrace.rl.values.prompts import Sample

RUN = """
model = "base"
cluster = "local" # this machine
plan = "zero3"

[run]
prompts_file = "prompts.jsonl"
max_prompt = 16 # tokens
max_response = 12
steps = 12
prompts = 8 # per step
responses = 8 # per prompt
mini_batch = 64
warmup_steps = 2
evaluate_every = 0
high_lr = true # the weights are random

[algorithm]
name = "grpo"

[optimizer]
lr = 1e-2 # for random weights; a trained model takes about 1e-6

[[reward]]
function = "examples.grpo_reward:letters"
"""


def letters(samples: Sequence[Sample]) -> list[float]:
    """The share of small letters in each response, from 0 to 1.

    `sample.data` has the other columns of the prompt's line, such as a right answer.
    """
    return [sum("a" <= each <= "z" for each in sample.response) / 12 for sample in samples]


def write_run(folder: Path) -> Path:
    """Write the model, the prompts and the file of the run; return the latter."""
    write_tiny_model(folder / "base")
    prompts = [{"prompt": f"Write word {number}:"} for number in range(64)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(each) + "\n" for each in prompts), encoding="utf-8")
    (folder / "run.toml").write_text(RUN, encoding="utf-8")
    return folder / "run.toml"


def command(folder: Path) -> list[str]:
    """The words after `terrace`."""
    return ["rl", "--config", str(folder / "run.toml"), "--folder", str(folder / "run"), "--ranks", "2"]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        write_run(Path(name))
        subprocess.run([sys.executable, "-m", "terrace", *command(Path(name))], check=True)

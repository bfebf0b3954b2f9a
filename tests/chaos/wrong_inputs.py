"""Odd files, odd values and missing partners for the commands that read what others made: `python -m
tests.chaos.wrong_inputs [NUMBER]`.

Each trial has a sound folder of its own (a model with a tokenizer, or a run), in which one file is odd, or sound files
and odd words. It passes if the command ends in one line within seconds, or in its work where the file is one that it
can do without. Values of keys and misspelt words are in tests/support/wrong_inputs.py.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch

from terrace.base.errors import TrainingError
from terrace.launch import start
from terrace.model.blocks import block_specs
from terrace.model.config import parse_model
from terrace.model.hf.written import write_pretrained
from tests.chaos.odd import ODD, Trial, trials
from tests.support.chats import write_tokenizer
from tests.support.tiny_runs import MODEL, terrace, write_run
from tests.support.wrong_inputs import BAD, ENDS, Case, Ended, campaign, ended

_REACHED = "the trial has reached its ranks"
_MUST = "accepted without effect"


def make_sound(folder: Path) -> None:
    """The folder that every trial has a copy of."""
    write_run(folder, 1, steps=3, checkpoint_every=1)
    done = terrace("train", "--config", "run.toml", "--folder", "run", cwd=folder)
    assert done.returncode == 0, done.stderr
    (checkpoint, *_) = sorted((folder / "run" / "checkpoints").iterdir(), reverse=True)
    for other in (folder / "run" / "checkpoints").iterdir():
        if other != checkpoint:
            shutil.rmtree(other)
    texts = [{"text": f"The fox of line {number} jumps."} for number in range(50)]
    (folder / "texts.jsonl").write_text("".join(json.dumps(each) + "\n" for each in texts))
    turns = [{"role": "user", "content": "two and two"}, {"role": "assistant", "content": "four"}]
    (folder / "chats.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    tokenizer = write_tokenizer(folder / "tokenizer")
    config = parse_model({**MODEL, "vocab_size": 512})
    values = {
        (block.name, param.name): 0.02 * torch.randn(param.shape)
        for block in block_specs(config)
        for param in block.params
    }
    write_pretrained(folder / "model", config, lambda block, param: values[block, param], "fp32")
    for path in tokenizer.iterdir():
        shutil.copy(path, folder / "model")
    (folder / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": 3}))


def play(trial: Trial, sound: Path, folder: Path) -> Ended:
    """How a trial ends in a fresh `folder`."""
    shutil.copytree(sound, folder, symlinks=True)
    if trial.file:
        newest = next((folder / "run" / "checkpoints").iterdir())
        ODD[trial.odd](
            Path(trial.file.replace("@checkpoint", str(newest))) if "@" in trial.file else folder / trial.file
        )
    words = tuple(word.replace("@", str(folder)) for word in trial.words)
    found = ended(Case(trial.command, words))
    if _REACHED in found.said:
        found = replace(found, how="accepted")
    if found.how == "accepted" and trial.must_refuse:
        found = replace(found, how=_MUST)
    return found


def run(
    number: int | None, seed: int = 0, without: Sequence[str] = (), show: Callable[[str], object] = lambda line: None
) -> list[tuple[Trial, Ended]]:
    """Play `number` of the trials, drawn evenly, or all; none whose file is odd in one of the ways `without`.

    `show` gets a line on each that ends as it may not, at once.
    """
    every = [trial for trial in trials() if trial.odd not in without]
    if number is not None and number < len(every):
        every = random.Random(seed).sample(every, number)
    with tempfile.TemporaryDirectory(prefix="terrace-wrong-") as name:
        sound, folder = Path(name, "sound"), Path(name, "trial")
        folder.mkdir()
        make_sound(folder)
        folder.rename(sound)  # whose files name each other as in every trial
        found = []
        reached = mock.patch.object(start, "launch_local", side_effect=TrainingError(_REACHED))
        with campaign(Path(name)), reached:
            for trial in every:
                found.append((trial, play(trial, sound, folder)))
                for line in bad(found[-1:]):
                    show(line)
                shutil.rmtree(folder, ignore_errors=True)
        return found


def bad(found: Sequence[tuple[Trial, Ended]]) -> list[str]:
    """A line for each trial that ended in another way than it may."""
    ways = (*BAD, _MUST)
    return [f"{end.how}: {trial} -> {end.said!r}" for trial, end in found if end.how in ways]


def table(found: Sequence[tuple[Trial, Ended]]) -> str:
    """Counts of trials by command and end."""
    ends = (*ENDS, _MUST)
    counts = Counter((trial.command, end.how) for trial, end in found)
    lines = [f"{'':14}" + "".join(f"{end:>13}" for end in ends[:-1]) + f"{ends[-1]:>25}{'all':>6}"]
    for command in [*sorted({trial.command for trial, _ in found}), "all"]:
        row = [sum(n for (of, how), n in counts.items() if how == end and command in (of, "all")) for end in ends]
        lines.append(f"{command:14}" + "".join(f"{n:>13}" for n in row[:-1]) + f"{row[-1]:>25}{sum(row):>6}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("number", nargs="?", type=int, help="trials to draw (default: all)")
    parser.add_argument("--without", action="append", default=[], choices=tuple(ODD), help="leave out files like this")
    options = parser.parse_args()
    # The standard streams are those of a trial while it runs.
    out = sys.stdout
    found = run(
        options.number, without=options.without, show=lambda line: print(f"FAILED {line}", file=out, flush=True)
    )
    print(table(found))
    print("every input ended in one line" * (not bad(found)))
    slowest = sorted(((round(end.took_s, 1), str(trial)[:90]) for trial, end in found), reverse=True)[:5]
    print("slowest:", *(f"  {took_s} s  {what}" for took_s, what in slowest), sep="\n")
    return int(bool(bad(found)))


if __name__ == "__main__":
    sys.exit(main())

"""Odd files, odd values and missing partners for the commands that read what others made: `python -m
tests.chaos.wrong_inputs [NUMBER]`.

Each trial has a sound folder of its own (a model with a tokenizer, or a run), in which one file is odd, or sound files
and odd words. It passes if the command ends in one line within seconds, or in its work where the file is one that it
can do without. Values of keys and misspelt words are in tests/support/wrong_inputs.py.
"""

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import torch

from terrace.base.errors import TrainingError
from terrace.launch import start
from terrace.model.config import block_specs, parse_model
from terrace.model.hf.pretrained import write_pretrained
from tests.support.chats import write_tokenizer
from tests.support.tiny_runs import MODEL, terrace, write_run
from tests.support.wrong_inputs import BAD, ENDS, Case, Ended, campaign, ended

_REACHED = "the trial has reached its ranks"
_MUST = "accepted without effect"


def _tables(change: Callable[[object], object]) -> Callable[[Path], None]:
    """Changes every value of a JSON, JSON lines or TOML file."""

    def changed(path: Path) -> None:
        text = path.read_bytes().decode("utf-8", errors="replace")
        if path.suffix == ".toml":
            lines = [
                line.partition("=")[0] + "= " + json.dumps(change(1)) if "=" in line else line
                for line in text.splitlines()
            ]
        elif path.suffix == ".jsonl":
            lines = [
                json.dumps({key: change(value) for key, value in json.loads(line).items()})
                for line in text.splitlines()
            ]
        else:
            try:
                table = json.loads(text)
            except ValueError:  # no table: weights, prose
                table = {"weights": 1}
            lines = [json.dumps({key: change(value) for key, value in table.items()})]
        path.write_text("\n".join(lines))

    return changed


def _instead(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def put(path: Path) -> None:
        path.unlink()
        make(path)

    return put


def _bytes(of: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(of(path.read_bytes())) and None


ODD: Mapping[str, Callable[[Path], None]] = {
    "empty": _bytes(lambda raw: b""),
    "one byte": _bytes(lambda raw: raw[:1]),
    "half": _bytes(lambda raw: raw[: len(raw) // 2]),
    "without its last bytes": _bytes(lambda raw: raw[:-7]),
    "noise": _bytes(lambda raw: random.Random(len(raw)).randbytes(2000)),
    "zeros": _bytes(lambda raw: bytes(3000)),
    "a text": _bytes(lambda raw: b"Once upon a time."),
    "no UTF-8": _bytes(lambda raw: b"\xff\xfe{" + raw[:50]),
    "a list": _bytes(lambda raw: b"[1, 2]"),
    "a number": _bytes(lambda raw: b"1" * 5000),
    "nested": _bytes(lambda raw: b"[" * 100_000),
    "nested tables": _bytes(lambda raw: b'{"a":' * 50_000),
    "huge numbers": _tables(lambda value: 10**30),
    "negative numbers": _tables(lambda value: -1),
    "texts": _tables(lambda value: "\x1b[2J\n" * 3),
    "lists": _tables(lambda value: [[], {}]),
    "nothing": _tables(lambda value: None),
    "gone": Path.unlink,
    "a folder": _instead(Path.mkdir),
    "a pipe": _instead(os.mkfifo),
    "a link to itself": _instead(lambda path: path.symlink_to(path)),
    "a link to /dev/zero": _instead(lambda path: path.symlink_to("/dev/zero")),
}
_WORDS = (
    "-1",
    "0",
    "nan",
    "inf",
    "1e21",
    "1" * 30,
    "abc",
    "--",
    "\udcff",
    "a\nb",
    "true",
    "[]",
    "/dev/zero",
    "x" * 5000,
)


@dataclass(frozen=True)
class Trial:
    command: str
    words: tuple[str, ...]  # in which @ is the folder of the trial
    file: str = ""  # below that folder
    odd: str = ""
    must_refuse: bool = False

    def __str__(self) -> str:
        what = f"{self.file} is {self.odd}: " if self.file else ""
        return what + " ".join(ascii(word)[:60] for word in self.words)


# Command -> words, the files that it cannot do without, and those that it reads where they are sound.
_READERS: tuple[tuple[str, tuple[str, ...], tuple[str, ...], tuple[str, ...]], ...] = (
    (
        "generate",
        ("generate", "@/model", "--prompt", "a", "--tokens", "2"),
        ("model/config.json", "model/model.safetensors", "model/tokenizer.json"),
        ("model/tokenizer_config.json", "model/generation_config.json"),
    ),
    (
        "generate",
        ("generate", "@/run", "--prompt", "a", "--tokens", "2"),
        ("run/config.toml", "@checkpoint/manifest.json"),
        ("run/metrics.jsonl", "run/events.jsonl"),
    ),
    (
        "eval",
        ("eval", "@/model", "--data", "@/text.txt", "--documents", "1"),
        ("model/config.json", "model/model.safetensors"),
        (),
    ),
    ("eval", ("eval", "@/model", "--data", "@/chats.jsonl", "--data.format", "chat"), ("chats.jsonl",), ()),
    ("eval", ("eval", "@/run", "--data", "@/texts.jsonl"), ("texts.jsonl", "run/config.toml"), ()),
    ("export", ("export", "@/run", "@/out"), ("run/config.toml", "@checkpoint/manifest.json"), ("run/metrics.jsonl",)),
    (
        "report",
        ("report", "@/run"),
        (),
        ("run/config.toml", "run/metrics.jsonl", "run/events.jsonl", "run/prediction.json", "run/report.json"),
    ),
    ("replay", ("replay", "@/run", "--step", "2"), ("run/config.toml",), ("@checkpoint/manifest.json",)),
    (
        "upcycle",
        ("upcycle", "@/model", "@/out", "--experts", "2"),
        ("model/config.json", "model/model.safetensors"),
        ("model/tokenizer_config.json",),
    ),
    ("data prepare", ("data", "prepare", "--config", "@/run.toml"), ("run.toml", "cluster.toml", "config.json"), ()),
    ("data prepare", ("data", "prepare", "--config", "@/run.toml", "--data", "@/texts.jsonl"), ("texts.jsonl",), ()),
    (
        "train",
        ("train", "--config", "@/run.toml", "--folder", "@/new"),
        ("run.toml", "cluster.toml", "config.json"),
        (),
    ),
    (
        "train",
        (
            "train",
            "--model",
            "@/model",
            "--data",
            "@/text.txt",
            "--cluster",
            "local",
            "--train.sequence",
            "16",
            "--folder",
            "@/new",
        ),
        ("model/config.json", "model/model.safetensors", "model/tokenizer.json"),
        ("model/tokenizer_config.json", "model/generation_config.json"),
    ),
    (
        "train",
        ("train", "--resume", "@/run", "--train.steps", "9"),
        ("run/config.toml", "@checkpoint/manifest.json"),
        ("run/metrics.jsonl",),
    ),
    (
        "plan",
        (
            "plan",
            "--model",
            "@/config.json",
            "--cluster",
            "@/cluster.toml",
            "--batch",
            "8",
            "--sequence",
            "16",
            "--out",
            "@/p.toml",
        ),
        ("config.json", "cluster.toml"),
        (),
    ),
    ("simulate", ("simulate", "--config", "@/run.toml"), ("run.toml", "cluster.toml", "config.json"), ()),
    (
        "simulate",
        ("simulate", "--model", "@/model", "--cluster", "@/cluster.toml"),
        ("model/config.json", "cluster.toml"),
        ("model/tokenizer.json",),
    ),
)
# Odd contents that are sound ones for a file that holds text, or has no value that a command reads.
_SOUND = {
    "texts.jsonl": ("without its last bytes", "texts"),
    "train model/model.safetensors": ("gone",),  # its config.json is a shape to begin with from scratch
    "text.txt": ("one byte", "half", "a text", "a list", "a number"),
}
_PARTNERS: tuple[tuple[str, str], ...] = (
    ("generate", "@/model --prompt a --temperature 0 --top-p 0.5"),
    ("generate", "@/model --prompt a --temperature 0 --top-k 5"),
    ("generate", "@/model --prompt a --temperature 0 --min-p 0.5"),
    ("generate", "@/model --prompt a --top-k 1 --seed 5"),
    ("generate", "@/model"),
    ("generate", "@/model a"),
    ("eval", "@/run --data.format chat"),
    ("eval", "@/run --data.split train"),
    ("eval", "@/run --context 5"),
    ("eval", "@/model --data @/text.txt --data.split train"),
    ("eval", "@/model --data @/text.txt --data.column x"),
    ("eval", "@/model --data @/text.txt --data.chat_template @/text.txt"),
    ("export", "@/run @/out --names torchtitan"),
    ("export", "@/run @/out --weights-only"),
    ("export", "@/run @/out --base x"),
    ("export", "@/run @/out --adapter"),
    ("export", "@/run @/out --step 2"),
    ("export", "@/run @/run"),
    ("export", "@/model @/out"),
    ("report", "@/run --port 80"),
    ("report", "@/run --force"),
    ("report", "@/run --watch --out @/page.html"),
    ("report", "@/model"),
    ("replay", "@/run --step 99"),
    ("upcycle", "@/model @/out --experts 1 --per-token 2"),
    ("upcycle", "@/run @/out --experts 2"),
    ("data prepare", "--config @/run.toml --data.bos x"),
    ("data prepare", "--config @/run.toml --data.split x"),
    ("data prepare", "--config @/run.toml --data.column x"),
    ("data prepare", "--config @/run.toml --plan.prefetch 99"),
    ("train", "--config @/run.toml --train.slow_steps 99"),
    ("train", "--config @/run.toml --train.beta 0.3"),
    ("train", "--config @/run.toml --train.decay linear"),
    ("train", "--config @/run.toml --data.too_long drop"),
    ("simulate", "--config @/run.toml --lines 3"),
    ("simulate", "--config @/run.toml --force"),
    ("simulate", "--config @/run.toml --data.cache @/text.txt"),
    ("simulate", "--config @/run.toml --data.format chat"),
    ("simulate", "--config @/run.toml --train.metrics ['nothing']"),
    ("plan", "--model @/config.json --cluster local --batch 8 --sequence 16 --out @/p.toml --outer every<=9,delay<=20"),
    ("plan", "--model @/config.json --cluster local --batch 8 --sequence 16 --out @/p.toml --pin nothing=1"),
)
# Options whose values are odd words, with what the command needs beside them.
_OPTIONS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "generate",
        "@/model --prompt a --tokens 2",
        ("--prompt", "--temperature", "--top-k", "--top-p", "--min-p", "--seed", "--stop", "--tokenizer", "--device"),
    ),
    ("eval", "@/model --data @/text.txt --documents 1", ("--context", "--data.format", "--data", "--tokenizer")),
    ("export", "@/run @/out", ("--step", "--dtype", "--shard-bytes")),
    ("report", "@/run", ("--out", "--port")),
    ("replay", "@/run --step 2", ("--step",)),
    ("upcycle", "@/model @/out --experts 2", ("--experts", "--per-token", "--parts", "--noise", "--seed")),
    (
        "data prepare",
        "--config @/run.toml",
        ("--data", "--ranks", "--train.sequence", "--data.cache", "--data.holdout"),
    ),
    ("simulate", "--config @/run.toml", ("--ranks", "--view", "--page", "--stage")),
    (
        "plan",
        "--model @/config.json --cluster local --batch 8 --sequence 16",
        ("--nodes", "--outer", "--best", "--price"),
    ),
)
_NAMES = ("a\nb", "\udcff\udcfe", "-x", "~", "a\x1b[2J", "\u202e", "x" * 300)


def trials() -> Iterator[Trial]:
    for command, words, needed, spared in _READERS:
        for file in (*needed, *spared):
            for odd in ODD:
                # Whoever names a pipe is asked to wait for its writer; a folder may hold one unseen.
                if odd == "a pipe" and "/" not in file:
                    continue
                sound = file in spared or odd in (*_SOUND.get(file, ()), *_SOUND.get(f"{command} {file}", ()))
                yield Trial(command, words, file, odd, must_refuse=not sound)
    for command, given in _PARTNERS:
        yield Trial(command, (*command.split(), *given.split()), must_refuse=True)
    for command, given, options in _OPTIONS:
        for option in options:
            for word in _WORDS:
                yield Trial(command, (*command.split(), *given.split(), f"{option}={word}"))
    for name in _NAMES:
        for command, given in (
            ("generate", f"@/{name} --prompt a"),
            ("export", f"@/run @/{name}/x"),
            ("report", f"@/run --out=@/{name}"),
            ("eval", f"@/model --data=@/{name}"),
            ("data prepare", f"--config @/run.toml --data=@/{name}"),
            ("replay", f"@/{name} --step 1"),
        ):
            yield Trial(command, (*command.split(), *given.split(" ")))


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

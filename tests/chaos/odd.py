"""The trials of tests/chaos/wrong_inputs.py: ways in which a file is odd, and what each command is given."""

import json
import os
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path


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
    def changed(path: Path) -> None:
        path.write_bytes(of(path.read_bytes()))

    return changed


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
    (
        "prune",
        ("prune", "@/model", "@/out", "--intermediate", "0.5", "--data", "@/text.txt", "--documents", "1"),
        ("model/config.json", "model/model.safetensors"),
        ("model/tokenizer_config.json",),
    ),
    (
        "prune",
        ("prune", "@/run", "@/out", "--intermediate", "0.5", "--data", "@/texts.jsonl"),
        ("texts.jsonl", "run/config.toml", "@checkpoint/manifest.json"),
        (),
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
    ("prune", "@/run @/run --layers 0.5"),
    ("prune", "@/run @/out"),
    ("prune", "@/model @/out --heads 0.5 --documents 3"),
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
        "prune",
        "@/model @/out --data @/text.txt --documents 1",
        ("--layers", "--heads", "--intermediate", "--documents", "--dtype", "--shard-bytes", "--tokenizer", "--device"),
    ),
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

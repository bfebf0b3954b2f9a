"""Wrong inputs generated from the schema and the command lines, run in this process and counted by outcome.

`python -m tests.support.wrong_inputs [NUMBER]` prints the table, and every input that ended in another way than it may.
"""

import argparse
import io
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from unittest import mock

from terrace.cli import worker
from terrace.cli.main import main, parser_of
from terrace.data.config import DataConfig
from terrace.model.config import ModelConfig
from terrace.model.lora.config import LoraConfig
from terrace.plan.plan import Plan
from terrace.runtime.settings import OptimizerConfig
from terrace.train.keys import TrainConfig
from tests.support.time_limit import TooLate, limited
from tests.support.tiny_runs import MODEL, write_run

HANG_S = 10.0
_COMPILES_S = 300.0  # a valid input: torch.compile is tried, 15 s of processor time
ENDS = ("refused", "failed", "accepted", "traceback", "hang", "not one line", "wrong code")
BAD = ENDS[3:]

_SECTIONS: dict[str, Any] = {
    "train": TrainConfig,
    "data": DataConfig,
    "optimizer": OptimizerConfig,
    "lora": LoraConfig,
    "plan": Plan,
}
_CLUSTER = (
    *(f"device.{name}" for name in ("name", "memory_bytes", "memory_bandwidth_bytes_per_s", "peak_flops_per_s.fp32")),
    *(f"tiers.node.{name}" for name in ("size", "latency_s", "bandwidth_bytes_per_s", "efficiency", "half_bytes")),
    *("name", "tiers", "device", "tiers.nowhere.size", "tiers.node", "device.kernels.gemm", "device.peak_flops_per_s"),
)
# As a shell gives them: each is of a wrong type for most keys, out of range or hostile for the others.
_VALUES = (
    "abc",
    "true",
    "-1",
    "0",
    "1.5",
    "-1e300",
    "nan",
    "inf",
    "1000000000000000000000",
    "[]",
    "[1, 'a']",
    "{}",
    "{ a = { b = 1 } }",
    "",
    "\x1b[2J\x1b]0;owned\x07",
    "a\nb = 1",
    "x" * 5000,
    "../../../../etc/passwd",
    "/dev/zero",
    "é漢\u202e🙂",
    "{% for %}",
    "1979-05-27",
    "[" * 2000,
    "$(id)",
)
_CONFLICTS = (
    "--plan ddp --plan.params node",
    "--plan zero3 --plan.stages [1,1]",
    "--plan.mapping.node.tensor 3",
    "--plan.mapping.node.pipeline 2 --plan.schedule zbv",
    "--plan.schedule interleaved:7",
    "--plan.schedule 1f1b --plan.mapping.node.pipeline 4",
    "--plan.balance cost",
    "--plan.unit 3",
    "--plan.micro_batch 5",
    "--plan.compute fp12",
    "--plan.master bf16 --plan.compute fp64",
    "--train.schedule wsd --train.decay_steps 1.5",
    "--train.schedule constant --train.decay sqrt --train.decay_steps 3",
    "--train.freeze ['*']",
    "--train.freeze ['nothing']",
    "--train.weights nowhere",
    "--train.sequence 4096",
    "--train.profile 9-3",
    "--train.profile 3 --train.steps 2",
    "--train.profile_torch true",
    "--train.error_budget.sync 0.1",
    "--train.metrics ['nothing']",
    "--train.slow_steps 9 --train.slow_factor 0",
    "--optimizer.name muon --plan.update adamw",
    "--optimizer.name lion --optimizer.eps 1",
    "--data.format chat",
    "--data.documents pack --data.too_long drop --plan.balance cost",
    "--data.holdout 1.5",
    "--data.mixture [{path='a'},{path='a'}]",
    "--data.tokenizer nowhere",
    "--lora.rank 0",
    "--lora.rank 4 --plan.mapping.node.tensor 2 --plan.mapping.package.tensor 3",
    "--balance.z 0.1",
    "--balance.bias 0.001",
    "--balance.step 0.01",
    "--balance.sequence -1",
    "--balance.capacity 1.25",
    "--resume auto",
    "--resume nowhere",
    "--resume nowhere --folder run",
    "--model nowhere",
    "--cluster nowhere",
    "--plan nowhere",
    "--data nowhere",
    "--config nowhere",
    "--folder /dev/null/x",
    "--folder /proc/x",
    "positional",
    "--train",
    "--train.",
    "--.steps 3",
    "--train.steps",
    "--train..steps 3",
    "--nothing.key 1",
)
_FILES = (
    "\x00",
    "train = 3",
    "[train]\nsteps = ",
    "[train]\nsteps = 1\nsteps = 2",
    "[[train]]\nsteps = 1",
    "nothing = {}",
    "[train]\n" + ".".join("a" * 50) + " = 1",
    "a = " + "[" * 500,
    "[model]\nmodel_type = 'llama'",
    "plan = 3",
    "cluster = ['local']",
    "[plan]\npreset = 'zero3'\nmapping = 3",
    "[cluster]\nname = 'a'\ntiers = []",
    "[data]\npath = 3",
    "[train]\nsteps = 0x7fffffffffffffff",
    "\ufeff\ufeff[train]",
)


@dataclass(frozen=True)
class Case:
    kind: str
    words: tuple[str, ...]


@dataclass(frozen=True)
class Ended:
    case: Case
    how: str
    said: str
    took_s: float


def keys() -> list[str]:
    """Every dotted key of a run's file."""
    found = [f"{name}.{item.name}" for name, cls in _SECTIONS.items() for item in fields(cls)]
    found += [f"model.{name}" for name in {*MODEL, *(item.name for item in fields(ModelConfig))}]
    return sorted({*found, *(f"cluster.{name}" for name in _CLUSTER), "plan.preset", "plan.mapping.node.data"})


def cases(folder: Path) -> Iterator[Case]:
    """All inputs; `folder` has the files that they name."""
    train = ("train", "--config", str(write_run(folder, 2, 2)))
    for key in keys():
        for value in _VALUES:
            yield Case("values of keys", (*train, f"--{key}={value}"))
        section, _, name = key.rpartition(".")
        for wrong in {name[:-1], f"{name}s", name.replace("_", "-") + "x", name.swapcase()} - {name, ""}:
            yield Case("misspelt keys", (*train, f"--{section}.{wrong}", "1"))
    for words in _CONFLICTS:
        yield Case("conflicts", (*train, *words.split(" ")))
    for number, text in enumerate(_FILES):
        path = folder / f"bad{number}.toml"
        path.write_text(text)
        for command in ("train", "simulate", "doctor"):
            yield Case("files", (command, "--config", str(path)))
        yield Case("files", (*train, "--cluster", str(path)))
        yield Case("files", (*train, "--plan", str(path)))
    yield from _options(folder)


def _options(folder: Path) -> Iterator[Case]:
    # Every option of every command, with the other words that the command needs; nothing that it names is there, so
    # that none comes to its work.
    needed: Mapping[str, tuple[str, ...]] = {
        "plan": ("--model", "nowhere", "--cluster", "local", "--batch", "8", "--sequence", "8"),
        "simulate": ("--model", "nowhere"),
        "train": ("--model", "nowhere"),
        "doctor": ("--config", "nowhere"),
        "report": ("nowhere",),
        "generate": ("nowhere", "--prompt", "a"),
        "eval": ("nowhere", "--data", "nowhere"),
        "export": ("nowhere", "nowhere2"),
        "upcycle": ("nowhere", "nowhere2", "--experts", "2"),
        "prune": ("nowhere", "nowhere2", "--layers", "0.5"),
        "replay": ("nowhere", "--step", "1"),
        "data": ("lengths", "--data", "nowhere"),
        "probe": ("--cluster", "nowhere"),
        "rehearse": ("build", "nowhere"),
        "rl": ("--config", "nowhere"),
    }
    for parser in _parsers(parser_of()):
        command = parser.prog.split(" ")[1:]
        if not command:
            continue
        for action in parser._actions:
            if isinstance(action, (argparse._HelpAction, argparse._SubParsersAction, argparse._VersionAction)):
                continue
            for value in _VALUES:
                words = (action.option_strings[-1], value) if action.option_strings else (value,)
                base = needed.get(command[0], ()) if len(command) == 1 else ()
                yield Case("options", (*command, *base, *words))
        yield Case("options", (*command, "--nothing"))
        yield Case("options", (*command, *["x"] * 50))


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _parsers(inner)


@contextmanager
def campaign(folder: Path) -> Iterator[None]:
    """In `folder`, without a launcher's variables and without starting ranks."""
    before = Path.cwd()
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")
    kept = {name: value for name, value in os.environ.items() if name not in names}
    os.chdir(folder)
    try:
        with (
            mock.patch.object(worker, "launch_local", return_value=None),
            mock.patch.dict(os.environ, kept, clear=True),
        ):
            yield
    finally:
        os.chdir(before)


def ended(case: Case, limit_s: float = HANG_S) -> Ended:
    """How the command line ends with these words."""
    out, error, begin_s = io.StringIO(), io.StringIO(), time.perf_counter()
    try:
        compiles = "--train.compile=true" in case.words
        with limited(_COMPILES_S if compiles else limit_s), redirect_stdout(out), redirect_stderr(error):
            code: object = main(list(case.words))
    except TooLate:
        return Ended(case, "hang", "", time.perf_counter() - begin_s)
    except SystemExit as leaving:
        code = leaving.code
    except BaseException as bug:
        return Ended(case, "traceback", f"{type(bug).__name__}: {bug}"[:300], time.perf_counter() - begin_s)
    return Ended(case, _how(code, error.getvalue()), error.getvalue()[:300], time.perf_counter() - begin_s)


def _how(code: object, error: str) -> str:
    if code == 0:
        return "accepted"
    if code not in (1, 2):
        return "wrong code"
    if not error.startswith("terrace: error: ") or error.count("\n") != 1 or "\x1b" in error:
        # The doctor's findings are on its screen.
        return "failed" if code == 1 and not error else "not one line"
    return "refused" if code == 2 else "failed"


def table(found: Sequence[Ended]) -> str:
    """Counts of inputs by kind and outcome."""
    counts = Counter((each.case.kind, each.how) for each in found)
    kinds = list(dict.fromkeys(each.case.kind for each in found))
    lines = [f"{'':16}" + "".join(f"{how:>14}" for how in ENDS) + f"{'all':>8}"]
    for kind in [*kinds, "all"]:
        row = [sum(n for (of, end), n in counts.items() if end == how and kind in (of, "all")) for how in ENDS]
        lines.append(f"{kind:16}" + "".join(f"{n:>14,}" for n in row) + f"{sum(row):>8,}")
    return "\n".join(lines)


def run(number: int | None, seed: int = 0) -> list[Ended]:
    """Run `number` of the inputs, drawn evenly, or all."""
    with tempfile.TemporaryDirectory() as name:
        every = list(cases(Path(name)))
        if number is not None:
            every = random.Random(seed).sample(every, number)
        with campaign(Path(name)):
            return [ended(case) for case in every]


if __name__ == "__main__":
    results = run(int(sys.argv[1]) if len(sys.argv) > 1 else None)
    print(table(results))
    for each in results:
        if each.how in BAD:
            print(f"{each.how}: {' '.join(repr(word)[:80] for word in each.case.words[:6])} -> {each.said!r}")
    accepted = [each for each in results if each.how == "accepted"]
    for each in accepted:
        print("accepted:", " ".join(repr(word)[:60] for word in each.case.words[3:]))
    print("slowest:", sorted(((round(each.took_s, 1), each.case.words[-1][:60]) for each in results), reverse=True)[:8])

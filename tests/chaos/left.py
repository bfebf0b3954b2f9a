"""The files that runs leave, of every kind, and the commands that read them, in this process and a pool of two ranks.

inputs/             of the user: texts, conversations, tokenizer, run files; never damaged
cache/ run/         token caches, and a run that was killed in its fifth step of six
finished/           the same run, whole; exported/ is its model
torn/               the cache of a tokeniser that was killed
plan/ probed/       files of `terrace plan` and `terrace probe`
copied/ copies/     a run with copies in memory that was killed, and these copies (a link to /dev/shm)
"""

import hashlib
import io
import json
import os
import re
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

from terrace.base.errors import TerraceError
from terrace.checkpoint.memory import memory_folder, run_id
from terrace.checkpoint.reading import Checkpoint
from terrace.cli import worker
from terrace.cli.main import main
from terrace.cli.screen import Screen
from terrace.data import tokens as tokens_module
from terrace.data.tokenizer import ByteTokenizer
from terrace.data.tokens import prepare_tokens
from terrace.launch import start
from terrace.launch.start import LocalPool
from terrace.launch.world import World
from terrace.train import sample
from terrace.train.layers import resolve_table
from terrace.train.loop import train
from terrace.train.metrics import Observer, Silent, StepRecord
from terrace.train.prepare import joined_job
from terrace.train.resolve import fitted_run
from terrace.train.trained import load_trained
from tests.chaos.inputs import STEPS, write_inputs
from tests.support.time_limit import TooLate, limited
from tests.support.tiny_runs import metrics

KILLED_IN = 5
HANG_S = 20.0
HOSTS = ("a", "b")


@dataclass
class Ended:
    """How a command ended: exit code, its lines, and its results by name. `bug` is a traceback's last line."""

    code: int
    out: str
    error: str
    results: dict[str, str] = field(default_factory=dict)
    bug: str = ""


def ranked(world: World, target: Callable[..., Any], arguments: tuple[Any, ...], killed_in: int) -> tuple[Any, str]:
    """A rank of `launch_local`: its result and what it printed. It is killed in a step, from 1 on."""
    said = io.StringIO()
    with _short(killed_in), redirect_stdout(said):
        return target(world, *arguments), said.getvalue()


@contextmanager
def _short(killed_in: int) -> Iterator[None]:
    """A run with a short sample, whose ranks are all killed in a step."""
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(sample, "_SAMPLE_TOKENS", 1))
        for observer in (Screen, Silent):
            patches.enter_context(mock.patch.object(observer, "stepped", _killer(killed_in, observer.stepped)))
        yield


def _killer(step: int, shown: Callable[..., None]) -> Callable[..., None]:
    def stepped(observer: Observer, record: StepRecord, seconds_left: float) -> None:
        if record.step == step:
            os.kill(os.getpid(), signal.SIGKILL)
        shown(observer, record, seconds_left)

    return stepped


def copying_rank(world: World, table: dict[str, Any], folder: Path, killed_in: int) -> str:
    """A rank of a launcher's world of two machines, whose run keeps copies in memory; what it printed."""
    world, said = replace(world, hosts=HOSTS, machines=HOSTS), io.StringIO()
    with _short(killed_in), redirect_stdout(said):
        config, _ = fitted_run(table, world.world_size)
        job = joined_job(world, config, folder, None, going_on=True)
        if job is not None:
            train(world, job, Screen(job) if world.rank == 0 else Silent())
    return said.getvalue()


class Scene:
    """A folder with all that runs leave, put back before each case, and the readers of its files."""

    def __init__(self, folder: Path, pool: LocalPool) -> None:
        self.folder, self._pool, self._killed_in = folder, pool, 0
        self._kept = folder / "kept"  # sound copies
        self._places: dict[str, Path] = {}
        self._undisturbed: dict[str, Ended] = {}
        self._copying: dict[str, Any] = {}

    # ---- commands

    def command(self, *words: str | Path) -> Ended:
        """`terrace` with these words, whose ranks are those of the pool."""
        out, error = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(error), self._no_processes(), limited(2 * HANG_S):
            try:
                code: object = main([str(word) for word in words])
            except SystemExit as leaving:
                code = leaving.code
            except (Exception, TooLate) as bug:
                return Ended(-1, out.getvalue(), error.getvalue(), bug=f"{type(bug).__name__}: {bug}"[:400])
        return Ended(code if isinstance(code, int) else -1, out.getvalue(), error.getvalue())

    @contextmanager
    def _no_processes(self) -> Iterator[None]:
        def launched(size: int, target: Callable[..., Any], arguments: tuple[Any, ...] = (), **_: Any) -> Any:
            results = self._pool.run(size, ranked, target, arguments, self._killed_in, timeout_s=HANG_S)
            print(results[0][1], end="")
            return results[0][0]

        with mock.patch.object(start, "launch_local", launched), mock.patch.object(worker, "launch_local", launched):
            yield

    # ---- readers; each returns how a command ended, with the results that damage may not change

    def resume(self, run: str = "run") -> Ended:
        ended = self.command("train", "--resume", self.folder / run)
        return self._with_training(ended, run)

    def again(self) -> Ended:
        """The command of the first start once more, as a launcher gives it."""
        words = ("--config", self.folder / "inputs" / "run.toml", "--folder", self.folder / "run")
        return self._with_training(self.command("train", *words, "--resume", "auto"), "run")

    def _with_training(self, ended: Ended, run: str) -> Ended:
        if ended.code == 0:
            keys = ("step", "loss", "grad_norm", "learning_rate", "num_tokens")
            rows = [[row[key] for key in keys] for row in metrics(self.folder / run)]
            ended.results = {"metrics.jsonl": json.dumps(rows), "state": self._state(run)}
        return ended

    def _state(self, run: str) -> str:
        checkpoint, found = Checkpoint(self.folder / run / "checkpoints" / f"step-{STEPS:08d}"), hashlib.sha256()
        checkpoint.verify()
        for block in checkpoint.layout:
            for name, kinds in sorted(checkpoint.read(block).items()):
                for kind, value in sorted(kinds.items()):
                    found.update(f"{block}.{name}/{kind}".encode() + value.numpy().tobytes())
        return found.hexdigest()

    def report(self, run: str = "finished") -> Ended:
        ended = self.command("report", self.folder / run)
        if ended.code == 0:
            page = (self.folder / run / "report.html").read_text(encoding="utf-8")
            # The sample is a text for people, shown as it is.
            ended.results = {"page": re.sub(r"The model continues the prompt.*?</details>", "", page, flags=re.DOTALL)}
        return ended

    def evaluate(self, model: str = "finished") -> Ended:
        words = ("--data", self.folder / "inputs" / "short.txt", "--json")
        ended = self.command("eval", self.folder / model, *words)
        if ended.code == 0:
            with warnings.catch_warnings(action="ignore"):  # the command has said it
                found, trained = hashlib.sha256(), load_trained(self.folder / model)
            for block in trained.blocks:
                for name, value in sorted(block.state_dict().items()):
                    found.update(name.encode() + value.numpy().tobytes())
            facts = f"{trained.config} {trained.tokenizer.fingerprint} {trained.stops} {trained.context}"
            ended.results = {"figures": ended.out.splitlines()[-1], "values": found.hexdigest(), "facts": facts}
        return ended

    def generate(self, model: str = "finished") -> Ended:
        words = ("--prompt", "The fox", "--tokens", "4", "--temperature", "0")
        ended = self.command("generate", self.folder / model, *words)
        return self._with_text(ended)

    def chat(self) -> Ended:
        words = ("--chat", "--prompt", "What is a tier?", "--tokens", "4", "--temperature", "0")
        return self._with_text(self.command("generate", self.folder / "exported", *words))

    @staticmethod
    def _with_text(ended: Ended) -> Ended:
        if ended.code == 0:
            ended.results = {"text": ended.out}
        return ended

    def export(self) -> Ended:
        target = self.folder / "again"
        shutil.rmtree(target, ignore_errors=True)
        ended = self.command("export", self.folder / "finished", target)
        if ended.code == 0:
            ended.results = {path.name: _digest(path) for path in sorted(target.iterdir())}
        return ended

    def replay(self) -> Ended:
        ended = self.command("replay", self.folder / "finished", "--step", "5")
        if ended.code == 0:
            ended.results = {"table": "\n".join(line for line in ended.out.splitlines() if "│" in line)}
        return ended

    def tokenise(self) -> Ended:
        """A start whose tokeniser goes on where another was killed."""
        ended = Ended(0, "", "")
        texts = self.folder / "inputs" / "texts"
        said: list[str] = []
        try:
            found = prepare_tokens(texts, ByteTokenizer(), self.folder / "torn", progress=said.append)
        except TerraceError as error:
            return Ended(2, "", f"terrace: error: {error}\n")
        except Exception as bug:
            return Ended(-1, "", "", bug=f"{type(bug).__name__}: {bug}")
        ended.out = "\n".join(said)
        ended.results = {name: _digest(path) for name, path in (("ids", found.path), ("starts", found.starts))}
        return ended

    def simulate(self) -> Ended:
        return self._with_text(self.command("simulate", "--plan", self.folder / "plan" / "plan.toml"))

    def simulate_probed(self) -> Ended:
        words = (
            "--cluster",
            self.folder / "probed" / "cluster.toml",
            "--model",
            self.folder / "inputs" / "config.json",
        )
        return self._with_text(self.command("simulate", *words, "--plan", "zero3"))

    def from_memory(self) -> Ended:
        """The restart of the run with copies in memory, by a launcher."""
        try:
            said = self._pool.run(2, copying_rank, self._copying, self.folder / "copied", 0, timeout_s=HANG_S)
        except TerraceError as error:
            return Ended(2, "", f"terrace: error: {error}\n")
        except Exception as bug:
            return Ended(-1, "", "", bug=f"{type(bug).__name__}: {bug}"[-400:])
        return self._with_training(Ended(0, "\n".join(said), ""), "copied")

    # ---- making and putting back

    def make(self) -> None:
        """Everything that runs leave."""
        inputs = self.folder / "inputs"
        write_inputs(inputs)
        words = ("train", "--config", inputs / "run.toml", "--folder")
        _well(self.command(*words, self.folder / "finished", "--train.profile", "3-3"))
        self._killed_in = KILLED_IN
        killed = self.command(*words, self.folder / "run", "--train.profile", "3-3")
        self._killed_in = 0
        assert killed.code == 1, killed
        assert "killed by SIGKILL" in killed.error, killed
        _well(self.command("report", self.folder / "finished"))
        _well(self.command("export", self.folder / "finished", self.folder / "exported", "--shard-bytes", "9000"))
        self._torn_cache(inputs)
        (self.folder / "plan").mkdir()
        task = (
            "--model",
            inputs / "config.json",
            "--cluster",
            inputs / "cluster.toml",
            "--batch",
            "8",
            "--sequence",
            "32",
        )
        _well(self.command("plan", *task, "--best", "1", "--limit", "20", "--out", self.folder / "plan/plan.toml"))
        (self.folder / "probed").mkdir()
        probe = ("probe", "--cluster", inputs / "cluster.toml", "--seconds", "0.3")
        _well(self.command(*probe, "--out", self.folder / "probed" / "cluster.toml"))
        self._copied_run(inputs)
        for path in self.folder.iterdir():
            if path.name not in ("inputs", "kept"):
                self._places[path.name] = Path(os.path.realpath(path))
        for name, place in self._places.items():
            shutil.copytree(place, self._kept / name)

    def undisturbed(self, reader: str) -> Ended:
        """How a reader ends when nothing is damaged; everything is put back before."""
        if reader not in self._undisturbed:
            self.restore()
            self._undisturbed[reader] = READERS[reader](self)
            _well(self._undisturbed[reader])
        self.restore()
        return self._undisturbed[reader]

    def restore(self, *names: str) -> None:
        """Put what runs left back as it was, of these folders or of all."""
        for name in names or self._places:
            shutil.rmtree(self._places[name], ignore_errors=True)
            shutil.copytree(self._kept / name, self._places[name])

    def files(self) -> list[str]:
        """Paths of everything that was left, in the scene."""
        found = []
        for name in self._places:
            kept = self._kept / name
            found += [f"{name}/{path.relative_to(kept)}" for path in sorted(kept.rglob("*")) if path.is_file()]
        return found

    def close(self) -> None:
        """Remove what lies outside of the scene's folder."""
        for link in self.folder.glob("copies*"):
            shutil.rmtree(os.path.realpath(link), ignore_errors=True)

    def _torn_cache(self, inputs: Path) -> None:
        lines = iter(range(3))

        def progress(text: str) -> None:
            if next(lines, None) is None:
                raise KeyboardInterrupt

        with (
            mock.patch.multiple(tokens_module, _NOTE_BYTES=1, _TELL_S=0.0),
            suppress(KeyboardInterrupt),
        ):
            prepare_tokens(inputs / "texts", ByteTokenizer(), self.folder / "torn", progress=progress)
            raise AssertionError("the tokeniser was not stopped")

    def _copied_run(self, inputs: Path) -> None:
        own: dict[str, Any] = {"train": {"peer_copies": 1, "peer_copies_every": 1, "steps": STEPS}}
        self._copying = resolve_table(str(inputs / "run.toml"), {}, own)
        folder = self.folder / "copied"
        try:
            self._pool.run(2, copying_rank, self._copying, folder, KILLED_IN, timeout_s=60)
        except TerraceError:
            pass
        else:
            raise AssertionError("the run with copies was not killed")
        # Of both machines: each has the whole state.
        (self.folder / "copies").symlink_to(memory_folder(run_id(folder), folder, HOSTS[0]))
        (self.folder / "copies of b").symlink_to(memory_folder(run_id(folder), folder, HOSTS[1]))


Reader = Callable[[Scene], Ended]
READERS: Mapping[str, Reader] = {
    "train --resume": Scene.resume,
    "train --resume auto": Scene.again,
    "report of a killed run": lambda scene: scene.report("run"),
    "report": Scene.report,
    "eval": Scene.evaluate,
    "generate": Scene.generate,
    "export": Scene.export,
    "replay": Scene.replay,
    "eval of an export": lambda scene: scene.evaluate("exported"),
    "generate --chat of an export": Scene.chat,
    "tokenising again": Scene.tokenise,
    "simulate --plan": Scene.simulate,
    "simulate --cluster": Scene.simulate_probed,
    "restart from memory": Scene.from_memory,
}


def _well(ended: Ended) -> None:
    assert ended.code == 0, ended
    assert ended.error == "", ended


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()

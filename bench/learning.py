"""Training runs that benchmarks of learning compare: the same batches and learning rates for all, results in a file.

The text is the source of the Python standard library, in bytes.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from bench.keys import key_of
from terrace.data.batches import Batches
from terrace.data.token_file import TokenFile
from terrace.data.tokenizer import load_tokenizer
from terrace.data.tokens import prepare_tokens
from terrace.launch.start import LocalPool, World
from terrace.runtime.engine import Engine
from terrace.runtime.settings import OptimizerConfig
from terrace.runtime.step_sums import StepResult
from terrace.train.keys import TrainConfig
from terrace.train.micro_batches import MicroBatches
from terrace.train.schedule import learning_rate

CALL_S = 3600.0  # the longest run


@dataclass(frozen=True)
class Job:
    """One training run, as given to every rank."""

    variant: str
    seed: int
    steps: int
    sequence: int
    batch: int
    hidden: int
    layers: int
    lr: float
    tokens: TokenFile

    @property
    def setting(self) -> str:
        """The settings that all compared runs share."""
        size = f"hidden {self.hidden}, {self.layers} layers, lr {self.lr:g}"
        return f"{self.steps} steps of {self.batch} x {self.sequence}, {size}"

    @property
    def batches(self) -> Batches:
        return Batches(self.tokens, self.sequence, self.batch, self.seed)

    @property
    def optimizer(self) -> OptimizerConfig:
        return OptimizerConfig(lr=self.lr)

    @property
    def last(self) -> int:
        """The number of steps whose mean is compared."""
        return max(1, self.steps // 10)


def steps(job: Job, engine: Engine, numbers: range) -> list[StepResult]:
    """The results of these steps on this rank."""
    config = TrainConfig(steps=job.steps, batch=job.batch, sequence=job.sequence, warmup_steps=job.steps // 20)
    micros = MicroBatches(job.batches, engine.program, engine.rank, pinned=False)
    return [engine.step(micros.step(step).micros, learning_rate(step, config, job.optimizer)) for step in numbers]


def train(job: Job, engine: Engine) -> list[StepResult]:
    """The results of all steps on this rank; closes the engine."""
    results = steps(job, engine, range(job.steps))
    engine.check_bytes()
    engine.close()
    return results


@dataclass(frozen=True)
class Result:
    """Result of a run under the settings that all compared runs share."""

    variant: str
    seed: int
    setting: str
    loss: float
    seconds: float


Found = TypeVar("Found", bound=Result)


def first_of(pool: LocalPool, num_ranks: int, run: Callable[[World, Any], Found], job: Job) -> Found:
    """The result of a job on the first rank."""
    found: Found = pool.run(num_ranks, run, job, timeout_s=CALL_S)[0]
    return found


class Held(Generic[Found]):
    """Results of runs, one a line of a file if there is one; a run that the file has is not repeated.

    A run is known by a digest of its job, its text and its plans (bench.keys): one that is changed under the same name
    is another run.
    """

    def __init__(self, path: Path | None, of: type[Found]) -> None:
        self._path, self._known = path, dict[str, Found]()
        lines = path.read_text(encoding="utf-8").splitlines() if path is not None and path.exists() else []
        for record in map(json.loads, lines):
            # A line without a key does not say what was run.
            if key := record.pop("key", ""):
                self._known[key] = of(**record)

    def result(self, job: Job, plans: object, run: Callable[[], Found]) -> Found:
        """The result of a job, from the file or from `run`, whose result is appended to it; `plans` are the plans of
        its training, with all else that the job does not name.
        """
        key = key_of(job.variant, job.seed, job.setting, job.tokens.digest, plans)
        is_known = key in self._known
        found = self._known[key] if is_known else run()
        print(f"seed {job.seed} {job.variant}: {found.loss:.4f} in {found.seconds:.0f} s", flush=True)
        if self._path is not None and not is_known:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, **asdict(found)}) + "\n")
        return found


def parser_of(text: str | None, variants: Sequence[str], hidden: int, lr: float) -> argparse.ArgumentParser:
    """A parser with the options that these benchmarks share."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--variants", nargs="+", choices=variants, default=list(variants))
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=hidden)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=lr)
    parser.add_argument("--results", type=Path, help="append every run to this file as a JSON line")
    return parser


def tokens() -> TokenFile:
    return prepare_tokens("stdlib", load_tokenizer("bytes"), Path(".terrace-cache"))

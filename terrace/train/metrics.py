"""A run's metrics file, its observer, and the figures of its end."""

import json
import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Protocol

from terrace.base.errors import TrainingError
from terrace.base.files import write_atomic
from terrace.base.fitting import MaybeNaN, fitting, parse_table
from terrace.base.foreign import read_lines
from terrace.base.sealed import sealed_json
from terrace.checkpoint.saved import Saved
from terrace.cluster.cluster import Cluster
from terrace.program.exchange import OuterResult
from terrace.program.report import StepReport

# Bounds of kept figures, so that memory does not grow with a run.
NUM_SAVES = 100
_END_STEPS = 1_000


def num_final(num_steps: int) -> int:
    """Number of last steps over which the final loss is averaged: a tenth of the run, at most 1,000."""
    return min(max(1, num_steps // 10), _END_STEPS)


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One line of `metrics.jsonl`. `step` counts from 1; `tokens_per_s` is for the whole world.

    `values` are further numbers of a step, by name, which a run of another command may have; in the file each is a
    column of its own.

    With islands, loss, norm and tokens are those of rank 0's island, and the rate is that island's times the number of
    islands. `outer` has the exchanges applied in this step, by fragment, with the loss over all islands since the last
    one.

    Bytes and memory are rank 0's: `sent_bytes` by tier since the previous line, `memory_bytes` the peak so far of each
    category of model state, `peak_memory_bytes` the peak reported by the device's allocator, or on a CPU by the system.
    A utilisation is None if no peak was measured. `balance` is the predicted time of the busiest ring rank over the
    mean ring rank (1.0 is even); None without a context axis.
    """

    step: int
    loss: MaybeNaN
    grad_norm: MaybeNaN
    learning_rate: float
    num_tokens: int
    step_s: float
    tokens_per_s: float
    time_s: dict[str, float]
    quantisation_error: dict[str, MaybeNaN] = field(default_factory=dict)  # message class -> relative error
    router_losses: dict[str, MaybeNaN] = field(default_factory=dict)  # name in [balance] -> its mean over tokens
    pairs: dict[str, MaybeNaN] = field(default_factory=dict)  # accuracy and margin of pairs since the last such line
    teacher: dict[str, MaybeNaN] = field(default_factory=dict)  # cross entropy, and divergence from it, likewise
    further_tokens: dict[str, MaybeNaN] = field(
        default_factory=dict
    )  # cross entropy of tokens after the next, likewise
    dropped: int | None = None  # choices of routers beyond a capacity
    tokens_per_s_per_device: float = 0.0
    mfu: float | None = None
    hfu: float | None = None
    sent_bytes: dict[str, int] = field(default_factory=dict)
    memory_bytes: dict[str, int] = field(default_factory=dict)
    peak_memory_bytes: dict[str, int] = field(default_factory=dict)
    balance: float | None = None
    load: dict[str, float] = field(default_factory=dict)  # of the routers of rank 0's stage: terrace.program.loads
    outer: dict[str, dict[str, MaybeNaN]] = field(default_factory=dict)
    loss_scale: float | None = None  # in fp16
    skipped: bool = False  # nothing was updated, since gradients were not finite in fp16
    slow_ranks: dict[str, float] = field(default_factory=dict)  # rank -> its own time over its peers'
    slowest: dict[str, float] = field(default_factory=dict)  # rank with most own work, its median seconds of it
    eval: dict[str, dict[str, MaybeNaN]] = field(default_factory=dict)  # by source: loss, tokens; after the step
    time: float = 0.0  # when the step ended, in seconds since 1970
    values: dict[str, MaybeNaN] = field(default_factory=dict)


_COLUMNS = frozenset(field.name for field in fields(StepRecord))


def eval_figures(record: StepRecord) -> dict[str, dict[str, float]]:
    """The evaluations after a step, by source, with the perplexity added."""
    found = {}
    for name, row in record.eval.items():
        loss = row.get("loss", math.nan)
        found[name] = row | {"perplexity": math.exp(loss) if loss < 700 else loss}
    return found


def eval_lines(records: Iterable[StepRecord]) -> dict[str, list[tuple[int, float]]]:
    """Evaluation losses by source, as (step, loss) pairs."""
    found: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        for name, row in record.eval.items():
            found.setdefault(name, []).append((record.step, row.get("loss", math.nan)))
    return found


def own_seconds(time_s: Mapping[str, float]) -> float:
    """Seconds of a step that a rank spends on its own work, not waiting for messages."""
    return sum(spent for name, spent in time_s.items() if not name.startswith("wait "))


@dataclass(frozen=True, kw_only=True)
class SlowestRank:
    """The rank with the most own work in the mean step, with its predicted and measured seconds by category."""

    rank: int
    stage: int
    predicted_s: Mapping[str, float]
    measured_s: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a run: the final loss (mean of the last steps) and this rank's predicted and measured step.

    `stages` has the (predicted, measured) reports of the first data and tensor rank of each pipeline stage; empty
    without a pipeline. `quantisation_error` is from the last step, by message class. `slowest` is None with one rank.
    The times of `measured` are means over `num_timed` steps. `busy` says which share of the machine other programs used
    at the start.
    """

    final_loss: float
    num_steps: int
    checkpoint: Path
    predicted: StepReport
    measured: StepReport
    sample: str | None
    quantisation_error: dict[str, float] = field(default_factory=dict)
    stages: tuple[tuple[StepReport, StepReport], ...] = ()  # (predicted, measured)
    slowest: SlowestRank | None = None
    saves: tuple[Saved, ...] = ()  # the newest `NUM_SAVES` checkpoints of this rank, in order
    num_timed: int = 0
    busy: str = ""


class Summary:
    """Accumulates a run's mean times and final loss in constant memory.

    Times skip the first steps, which warm up caches, and then as many as needed for a whole number of cycles of `every`
    steps, if the run is long enough for one.
    """

    def __init__(self, num_steps: int, every: int = 1) -> None:
        # The first steps warm up caches; a short run keeps most of its steps.
        warm_up = min(num_steps // 4, 10)
        num_cycles = (num_steps - warm_up) // every
        # The mean step of a cycle is what is predicted.
        self.num_warm_up = num_steps - every * num_cycles if num_cycles else warm_up
        self._num_seen = 0
        self._losses: deque[float] = deque(maxlen=num_final(num_steps))
        self._time_s: dict[str, float] = defaultdict(float)
        self.quantisation_error: dict[str, float] = {}
        self._of_all = deque[tuple[int, float, float]](maxlen=_END_STEPS)  # of islands: step, loss, tokens

    def finish(self, results: Sequence[OuterResult]) -> None:
        """Adds the exchanges that end a run of islands."""
        self._of_all += [(self._num_seen, each.loss, each.num_tokens) for each in results]

    def add(self, record: StepRecord) -> None:
        self._num_seen += 1
        self._losses.append(record.loss)
        self._of_all += [(self._num_seen, each["loss"], each["tokens"]) for each in record.outer.values()]
        self.quantisation_error = record.quantisation_error
        # Losses count from the first step, times only after the warm-up.
        if self._num_seen > self.num_warm_up:
            for category, seconds in record.time_s.items():
                self._time_s[category] += seconds

    @property
    def final_loss(self) -> float:
        """Mean loss of the last tenth of the steps, at most 1,000; NaN before the first step.

        With islands, the token-weighted mean over all islands' exchanges in these steps.
        """
        last = [each for each in self._of_all if each[0] > self._num_seen - len(self._losses)]
        tokens = sum(number for _, _, number in last)
        if tokens:
            return sum(loss * number for _, loss, number in last) / tokens
        return sum(self._losses) / len(self._losses) if self._losses else float("nan")

    @property
    def num_timed(self) -> int:
        return max(0, self._num_seen - self.num_warm_up)

    @property
    def mean_time_s(self) -> dict[str, float]:
        steps = max(1, self.num_timed)
        return {category: total / steps for category, total in self._time_s.items()}


class Observer(Protocol):
    """Receives the events of a run. Only rank 0 has one that displays them."""

    def started(self, predicted: StepReport, cluster: Cluster, first_step: int) -> None:
        """Called when the engine is ready. `cluster` has the measured constants behind the prediction."""

    def stepped(self, record: StepRecord, seconds_left: float) -> None: ...

    def saved(self, folder: Path) -> None: ...

    def note(self, text: str) -> None: ...

    def detail(self, text: str) -> None:
        """A note shown only with `--verbose`, but always recorded."""

    def finished(self, outcome: Outcome) -> None: ...


class Silent:
    """The observer of ranks other than 0: ignores all events."""

    def started(self, predicted: StepReport, cluster: Cluster, first_step: int) -> None: ...

    def stepped(self, record: StepRecord, seconds_left: float) -> None: ...

    def saved(self, folder: Path) -> None: ...

    def note(self, text: str) -> None: ...

    def detail(self, text: str) -> None: ...

    def finished(self, outcome: Outcome) -> None: ...


def outer_figures(results: Sequence[OuterResult]) -> dict[str, dict[str, MaybeNaN]]:
    """Exchanges by fragment, as in `StepRecord.outer`."""
    found = {}
    for each in results:
        figures = {"loss": each.loss, "tokens": float(each.num_tokens), "change": each.change}
        found[str(each.fragment)] = figures | ({} if each.agreement is None else {"agreement": each.agreement})
    return found


def outer_words(results: Sequence[OuterResult]) -> str:
    """One line on the exchanges of a step."""
    tokens = max(each.num_tokens for each in results)
    loss = next(each.loss for each in results if each.num_tokens == tokens)
    return f"loss {loss:.3f} over the {tokens:,} tokens of all islands since their last exchange"


class MetricsFile:
    """`metrics.jsonl` of a run folder. On resume, damaged lines and lines of steps that will be repeated are dropped.

    `num_lost` counts earlier steps without a line. Raises `TrainingError` if the file cannot be written.
    """

    def __init__(self, path: Path, first_step: int) -> None:
        self._path = path
        try:
            # Lines of steps after the checkpoint will be written again.
            records = [record for record in (read_metrics(path) if path.exists() else []) if record.step <= first_step]
            self.num_lost = first_step - len(records)
            write_atomic(path, "".join(map(_line, records)))
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise self._unwritable(error) from error

    def write(self, record: StepRecord) -> None:
        """Appends one line and flushes it, so that readers can follow the file."""
        try:
            self._file.write(_line(record))
            # One flush per line: readers follow the file, and a crash loses at most one line.
            self._file.flush()
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> TrainingError:
        return TrainingError(
            f"cannot write {self._path}: {error.strerror}; make room, then go on from the last checkpoint with --resume"
        )

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[StepRecord]:
    """Records of a metrics file, one per step.

    Damaged lines, such as a last one truncated by a crash, are skipped. Raises `TrainingError` for a file of an earlier
    version.
    """
    return read_sound_metrics(path)[0]


def read_sound_metrics(path: Path) -> tuple[list[StepRecord], int]:
    """Like `read_metrics`, with the number of damaged lines."""
    records: dict[int, StepRecord] = {}
    num_written, num_former = 0, 0
    for line in read_lines(path, path.parent):
        num_written += bool(line.strip())
        try:
            table = parse_table(line)
            num_former += "time/step" in table and "step_s" not in table
            record = fitting(StepRecord, table | {"values": _further(table)})
        except ValueError:
            continue
        records.setdefault(record.step, record)
    if num_former and not records:
        raise TrainingError(
            f"{path} was written by an earlier version, and its lines lack columns of today (step_s, time_s): use the "
            "version that wrote it, or start a new run from the model of this one"
        )
    return list(records.values()), num_written - len(records)


def _further(table: Mapping[str, object]) -> dict[str, object]:
    """The numbers of a line whose names are no fields of a record."""
    return {name: value for name, value in table.items() if name not in _COLUMNS and type(value) in (int, float)}


def _line(record: StepRecord) -> str:
    table = asdict(record)
    return sealed_json(json.dumps(table | table.pop("values")))

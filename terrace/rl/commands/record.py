"""Records a run of `terrace rl` in its folder: the files of `terrace train`, and besides them its calls and samples.

Each line is sealed and holds one step. On resume, lines of repeated steps are dropped from all files.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terrace.base.files import write_atomic
from terrace.base.fitting import parse_table
from terrace.base.foreign import read_lines
from terrace.base.schema import dump
from terrace.base.sealed import sealed_json
from terrace.rl.algorithms.metrics import Metrics
from terrace.rl.calls.spans import now_s
from terrace.rl.config import RlConfig, to_toml_table
from terrace.train.metrics import MetricsFile, StepRecord
from terrace.train.recorder import PREDICTION, Predicted, event_log, write_prediction
from terrace.train.trackers import open_trackers

if TYPE_CHECKING:
    from terrace.rl.placement.placement import IterationReport
    from terrace.train.recorder import EventLog

METRICS, CALLS, SAMPLES = "metrics.jsonl", "calls.jsonl", "samples.jsonl"


@contextmanager
def recording(folder: Path, config: RlConfig, first_step: int) -> Iterator["Record"]:
    """The record of a run that has completed `first_step` steps, closed at the end of the body."""
    with event_log(folder) as events:
        record = Record(folder, config, first_step, events)
        try:
            yield record
        finally:
            record.close()


class Record:
    """The record files of a run, and its trackers. `events` has the start, checkpoints and the end."""

    def __init__(self, folder: Path, config: RlConfig, first_step: int, events: "EventLog") -> None:
        self.events = events
        self._metrics = MetricsFile(folder / METRICS, first_step)
        for name in (CALLS, SAMPLES):
            # A run that starts over writes the samples of step 0 again.
            kept = [line for line in _read(folder / name) if _is_done(line, first_step)]
            write_atomic(folder / name, "".join(map(_sealed, kept)))
        self._files = {name: (folder / name).open("a", encoding="utf-8") for name in (CALLS, SAMPLES)}
        self._trackers = open_trackers(config.run.metrics, folder, to_toml_table(config), first_step)
        cluster, plan = config.cluster, config.plan
        events.add("started", first_step=first_step, plan=plan.name, cluster=cluster.name, ranks=cluster.world_size)

    def step(self, step: int, metrics: Metrics, calls: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> None:
        """Writes a step: its metrics, its calls (`terrace.rl.call_lines`), and its samples, if any."""
        self._write(CALLS, {"step": step, **calls})
        self.samples(step, samples)
        self._metrics.write(step_record(step, metrics))
        for tracker in self._trackers.values():
            tracker.log(metrics, step)

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Writes samples (`terrace.rl.samples`), if any. Those of step 0 were taken before the first step."""
        if samples:
            self._write(SAMPLES, {"step": step, "samples": samples})
            for tracker in self._trackers.values():
                tracker.write("samples", markdown(samples), step)

    def saved(self, step: int, folder: Path) -> None:
        """Records a checkpoint of the actor, and with it of all roles."""
        self.events.add("saved", step=step, folder=f"{folder.parents[1].name}/{folder.name}")

    def close(self) -> None:
        self._metrics.close()
        for file in self._files.values():
            file.close()
        for tracker in self._trackers.values():
            tracker.close()

    def _write(self, name: str, line: Mapping[str, Any]) -> None:
        self._files[name].write(_sealed(line))
        self._files[name].flush()


def step_record(step: int, metrics: Metrics) -> StepRecord:
    """The line of a step: the columns of every run, and the metrics by verl's names."""
    step_s, tokens_per_s = metrics["time/step"], metrics["perf/tokens_per_s"]
    time_s = {name.removeprefix("time/"): spent for name, spent in metrics.items() if name.startswith("time/")}
    del time_s["step"]
    return StepRecord(
        step=step,
        loss=metrics.get("actor/pg_loss", math.nan),
        grad_norm=metrics.get("actor/grad_norm", math.nan),
        learning_rate=metrics.get("actor/lr", 0.0),
        num_tokens=round(tokens_per_s * step_s),
        step_s=step_s,
        tokens_per_s=tokens_per_s,
        tokens_per_s_per_device=metrics["perf/tokens_per_s_per_device"],
        time_s=time_s,
        time=now_s(),
        values=metrics,
    )


def record_prediction(
    folder: Path, config: RlConfig, report: "IterationReport | None", phases: Mapping[str, Sequence[str]]
) -> None:
    """Writes `prediction.json`: seconds per stage with its measured `phases`, and bytes of a hand-over by tier.

    Without a report, the file of an earlier start is removed.
    """
    if report is None:
        (folder / PREDICTION).unlink(missing_ok=True)
        return
    sent = {f"hand_over.{tier}": size for tier, size in report.sent_bytes.items()}
    write_prediction(
        folder,
        Predicted(
            is_measured=config.cluster.is_measured,
            cluster=dump(config.cluster),
            predicted={"time_s": dict(report.stages), "sent_bytes": sent, "memory_bytes": {}},
            step_s=report.seconds,
            parts={stage: list(phases[stage]) for stage in report.stages},
        ),
    )


def markdown(samples: Iterable[Mapping[str, Any]]) -> str:
    """Samples as a code block, so that no markup in a response takes effect."""
    lines = list[str]()
    for sample in samples:
        numbers = {"reward": sample["reward"], **sample["parts"]}
        numbers |= {name: sample[name] for name in ("cost", "advantage") if sample[name] is not None}
        lines.append(", ".join([sample["kind"], sample["finish"], *(f"{name} {x:.4g}" for name, x in numbers.items())]))
        said = sample["turns"] or [["response", sample["response"]]]
        lines += [line for who, text in [["prompt", sample["prompt"]], *said] for line in f"{who}: {text}".split("\n")]
        lines.append("")
    return "\n".join(f"    {line}" for line in lines)


def _is_done(line: Mapping[str, Any], first_step: int) -> bool:
    step = line.get("step")
    return isinstance(step, int) and step <= first_step and first_step > 0


def _read(path: Path) -> list[dict[str, Any]]:
    found = []
    for line in read_lines(path, path.parent) if path.exists() else ():
        with suppress(ValueError):  # a last line that a crash cut short
            found.append(parse_table(line))
    return found


def _sealed(line: Mapping[str, Any]) -> str:
    return sealed_json(json.dumps(line))

"""Records a run of `terrace rl` in its folder: metrics, calls and samples per step, and the prediction.

Each line is sealed and holds one step. On resume, lines of repeated steps are dropped from all files.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terrace.base.files import write_atomic
from terrace.base.fitting import parse_table
from terrace.base.foreign import read_lines
from terrace.base.sealed import sealed_json
from terrace.rl.algorithms.metrics import Metrics
from terrace.rl.config import RlConfig, to_toml_table
from terrace.train.recorder import PREDICTION
from terrace.train.trackers import open_trackers

if TYPE_CHECKING:
    from terrace.rl.placement.placement import IterationReport

METRICS, CALLS, SAMPLES = "metrics.jsonl", "calls.jsonl", "samples.jsonl"


@contextmanager
def recording(folder: Path, config: RlConfig, first_step: int) -> Iterator["Record"]:
    """The record of a run that has completed `first_step` steps, closed at the end of the body."""
    record = Record(folder, config, first_step)
    try:
        yield record
    finally:
        record.close()


class Record:
    """The record files of a run, and its trackers."""

    def __init__(self, folder: Path, config: RlConfig, first_step: int) -> None:
        for name in (METRICS, CALLS, SAMPLES):
            # A run that starts over writes the samples of step 0 again.
            kept = [line for line in _read(folder / name) if _is_done(line, first_step)]
            write_atomic(folder / name, "".join(map(_sealed, kept)))
        self._files = {name: (folder / name).open("a", encoding="utf-8") for name in (METRICS, CALLS, SAMPLES)}
        self._trackers = open_trackers(config.run.metrics, folder, to_toml_table(config), first_step)

    def step(self, step: int, metrics: Metrics, calls: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> None:
        """Writes a step: its metrics, its calls (`terrace.rl.call_lines`), and its samples, if any."""
        self._write(CALLS, {"step": step, **calls})
        self.samples(step, samples)
        self._write(METRICS, {"step": step, **metrics})
        for tracker in self._trackers.values():
            tracker.log(metrics, step)

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Writes samples (`terrace.rl.samples`), if any. Those of step 0 were taken before the first step."""
        if samples:
            self._write(SAMPLES, {"step": step, "samples": samples})
            for tracker in self._trackers.values():
                tracker.write("samples", markdown(samples), step)

    def close(self) -> None:
        """Closes the files and the trackers."""
        for file in self._files.values():
            file.close()
        for tracker in self._trackers.values():
            tracker.close()

    def _write(self, name: str, line: Mapping[str, Any]) -> None:
        self._files[name].write(_sealed(line))
        self._files[name].flush()


def write_prediction(
    folder: Path, report: "IterationReport | None", phases: Mapping[str, Sequence[str]], *, is_measured: bool
) -> None:
    """Writes `prediction.json`: seconds per step and per stage, each stage's `phases`, and bytes of a hand-over by
    tier.

    `is_measured`: the cluster was probed. Without a report, the file of an earlier start is removed.
    """
    if report is None:
        with suppress(FileNotFoundError):
            (folder / PREDICTION).unlink()
        return
    table = {
        "is_measured": is_measured,
        "seconds": report.seconds,
        "stages": {
            stage: {"seconds": seconds, "phases": list(phases[stage])} for stage, seconds in report.stages.items()
        },
        "sent_bytes": dict(report.sent_bytes),
    }
    write_atomic(folder / PREDICTION, sealed_json(json.dumps(table, indent=1)))


def markdown(samples: Iterable[Mapping[str, Any]]) -> str:
    """Samples as a code block, so that no markup in a response takes effect."""
    lines = list[str]()
    for sample in samples:
        numbers = {"reward": sample["reward"], **sample["parts"]}
        numbers |= {name: sample[name] for name in ("cost", "advantage") if sample[name] is not None}
        lines.append(", ".join([sample["kind"], sample["finish"], *(f"{name} {x:.4g}" for name, x in numbers.items())]))
        lines += [*f"prompt: {sample['prompt']}".split("\n"), *f"response: {sample['response']}".split("\n"), ""]
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

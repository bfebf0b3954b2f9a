"""Records of steps and files of metrics, for tests of whatever reads them."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from terrace.train.metrics import MetricsFile, StepRecord

_RECORD = StepRecord(
    step=1,
    loss=2.0,
    grad_norm=1.0,
    learning_rate=0.1,
    num_tokens=8,
    step_s=0.5,
    tokens_per_s=16.0,
    time_s={"forward": 0.5},
)


def step_record(step: int, **changes: Any) -> StepRecord:
    return replace(_RECORD, step=step, **changes)


def write_metrics(folder: Path, records: Iterable[StepRecord]) -> None:
    """Write a new metrics.jsonl."""
    file = MetricsFile(folder / "metrics.jsonl", 0)
    for record in records:
        file.write(record)
    file.close()

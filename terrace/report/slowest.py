"""The slowest rank of a run: the one with the most own work (time without waits), for which the others wait."""

import statistics
from collections.abc import Sequence
from contextlib import suppress

from terrace.base.errors import TerraceError
from terrace.base.words import seconds
from terrace.report.compared import ComparedAmounts
from terrace.train.config import RunConfig
from terrace.train.metrics import StepRecord, own_seconds
from terrace.train.recorder import RunEvent


def slowest_times(events: Sequence[RunEvent], run: RunConfig | None) -> tuple[str, ComparedAmounts] | None:
    """(Name of the slowest rank, its predicted and measured seconds) of a finished run; None if rank 0 or unknown."""
    last = events[-1] if events else None
    if last is None or last.event != "finished" or not last.slowest_rank or "measured" not in last.slowest_s:
        return None
    amounts = ComparedAmounts(last.slowest_s.get("predicted", {}), last.slowest_s["measured"])
    return _rank_words(last.slowest_rank, run), amounts


def slowest_points(records: Sequence[StepRecord]) -> list[tuple[int, float]]:
    """(Step, own seconds of the rank that was slowest then, as a median over its last steps)."""
    return [(record.step, record.slowest["own_s"]) for record in records if "own_s" in record.slowest]


def slowest_note(records: Sequence[StepRecord], run: RunConfig | None) -> str:
    """A sentence on the slowest rank of the last steps; "" if no record names one."""
    found = [record.slowest for record in records if {"rank", "own_s"} <= record.slowest.keys()]
    if not found:
        return ""
    rank, own_s = int(found[-1]["rank"]), found[-1]["own_s"]
    of_rank_0 = statistics.fmean(own_seconds(record.time_s) for record in records)
    return (
        f"In the last steps {_rank_words(rank, run)} has most work of its own, {seconds(own_s)} of a step; rank 0 has "
        f"{seconds(of_rank_0)} in the mean."
    )


def _rank_words(rank: int, run: RunConfig | None) -> str:
    """`rank 5`, or `rank 5 of stage 1` in a pipeline."""
    if run is not None:
        # The settings file may have been edited and be inconsistent.
        with suppress(TerraceError):
            mesh = run.mesh
            if mesh.total("pipeline") > 1 and rank < run.cluster.world_size:
                return f"rank {rank} of stage {mesh.stage(rank)}"
    return f"rank {rank}"

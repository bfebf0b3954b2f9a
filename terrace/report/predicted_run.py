"""The predicted step of a run, drawn: its rows, and its cycle of islands beside the measured one."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from terrace.base.errors import TerraceError
from terrace.cluster.cluster import Cluster
from terrace.model.facts import layers_of
from terrace.program.timeline import TimelineRow
from terrace.report.cycles import cycle_section, cycle_words
from terrace.report.record import mean_by_name
from terrace.report.sections import Section
from terrace.simulate.cycle_timeline import cycle_timeline
from terrace.simulate.members import member_step
from terrace.simulate.recording import record
from terrace.simulate.rows import passes_row, recording_rows
from terrace.simulate.step import play_whole
from terrace.train.config import RunConfig
from terrace.train.metrics import StepRecord
from terrace.train.prediction import predict, step_of

_MOST_PASSES = 30_000  # layer passes in a step that is simulated for a chart, at about a millisecond each


def check_length(run: RunConfig) -> None:
    """Raise `TerraceError` for a step of too many passes, since the settings may be untrusted."""
    num_passes = run.num_micros() * layers_of(run.model)
    if num_passes > _MOST_PASSES:
        raise TerraceError(f"a step passes layers {num_passes:,} times, and at most {_MOST_PASSES:,} are drawn")


def predicted_rows(run: RunConfig, cluster: Cluster | None, group: str) -> list[TimelineRow]:
    """Rows of the predicted step of rank 0; raises `TerraceError` if it cannot be predicted."""
    played = play_whole(member_step(step_of(run, cluster)))
    if len(played.programs) == 1:
        return recording_rows(record(played.programs[0], played.costs[0]), group)
    return [passes_row(played.programs[0], played.passes[0], group)]


def cycle_of_run(run: RunConfig, cluster: Cluster | None, records: Sequence[StepRecord]) -> list[Section]:
    """The section on a run's cycle, none without islands; `records` are rank 0's steady steps.

    Raises `TerraceError` for a run that cannot be predicted.
    """
    cycle = predict(run, cluster or run.cluster).cycle
    if cycle is None:
        return []
    measured = mean_steps(records, cycle.outer.every)
    words = cycle_words(cycle, None)
    if not measured:
        words += "\nno whole cycle has been measured"
    return [cycle_section(cycle_timeline(cycle, stage=0), words, measured)]


def mean_steps(records: Sequence[StepRecord], every: int) -> list[Mapping[str, float]]:
    """Mean seconds by category of each step of a cycle, over all whole cycles among `records`; [] without one."""
    cycles = defaultdict[int, dict[int, StepRecord]](dict)
    for each in records:
        number, place = divmod(each.step - 1, every)
        cycles[number][place] = each
    whole = [steps for steps in cycles.values() if len(steps) == every]
    found = list[Mapping[str, float]]()
    for place in range(every) if whole else ():
        found.append(mean_by_name([steps[place].time_s for steps in whole]))
    return found
